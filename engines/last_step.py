"""The last step of an epoch, if fewer images are left than a step takes.

It has as many micro-batches as every other step, each with fewer images, and each of its images has equal weight. So it
is the step of a training made for that many images, and the loss is the mean over them.
"""

from __future__ import annotations

from dataclasses import replace

from engines.errors import ImageError, PlanError, TraceError
from engines.layer.stages import cut_stages, find_layers
from engines.plan import OPTIONS, Plan
from engines.program.compile import compile_plan
from engines.trace_cache import TraceCache
from engines.training import Recipe, count_step_images, freeze_weights

__all__ = ["check_divides", "compute_smallest_step", "count_left_over", "make_smaller_recipe"]

_WAY_OUT = "Leave them out in each epoch (drop_last=True, --drop-last)"


def compute_smallest_step(plan: Plan) -> int:
    """Return the images of a step whose micro-batches have one image for each rank that shares them.

    >>> compute_smallest_step(Plan(parts=2, data_parallel=3, local_dp=2))
    12
    """
    return plan.micro_batches * plan.local_dp


def count_left_over(total: int, recipe: Recipe, steps: int | None, drop_last: bool) -> int:
    """Return the images of `total` that form a smaller step at the end of each epoch; 0 for none.

    An epoch has at most `steps` steps (None: no limit), and no smaller step if `drop_last` is set.
    Raises PlanError if the plan cannot divide them.
    """
    # An epoch of 22 images in steps of 8:    8 | 8 | 6
    # Without a full step before it there is nothing to be smaller than: the loader reports too few images instead.
    full, rest = divmod(total, count_step_images(recipe))
    if drop_last or not full or (steps is not None and steps <= full):
        return 0
    check_divides(rest, recipe)
    return rest


def check_divides(images: int, recipe: Recipe) -> None:
    """Raise PlanError if a step of `images` images cannot be divided into the plan's micro-batches."""
    plan, unit = recipe.plan, compute_smallest_step(recipe.plan)
    if images % unit:
        knobs = [f"{name}={value!r}" for name, value in plan.chosen.items() if OPTIONS[name].divides]
        raise PlanError(
            f"The last step of an epoch has {images} images, for a step takes {count_step_images(recipe)}. This plan "
            f"divides a step's images by {unit} ({', '.join(knobs)}), which {images} is no multiple of. {_WAY_OUT}, "
            f"give {images % unit} images less or {unit - images % unit} more, or use another plan."
        )


def make_smaller_recipe(recipe: Recipe, traces: TraceCache, images: int) -> Recipe:
    """Make the recipe for steps of `images` images besides the full ones, without the weights: the ranks hold them.

    `traces` are those of the recipe's model. Raises PlanError if the plan cannot divide the images, and TraceError if
    the model or its loss does not accept so few.
    """
    check_divides(images, recipe)
    # Each rank holds the weights of its stages already. An automatic balance could move layers between stages for
    # fewer images, so the stages of the full step are fixed as layer counts.
    found, plan = find_layers(recipe.graph), recipe.plan
    stages = cut_stages(found, plan)
    counts = tuple(sum(layer.nodes.start in stage for layer in found) for stage in stages)
    plan = replace(plan, balance=counts)
    try:
        graph = traces.with_batch(images // plan.batches).get_graph(plan)
        graph = freeze_weights(graph, graph.trainable - recipe.graph.trainable)
        compile_plan(graph, plan)
    except (TraceError, ImageError, PlanError) as error:
        why = f"The last step of an epoch has {images} images. {_WAY_OUT}, or mend this: {error}"
        raise type(error)(why) from error
    return replace(recipe, graph=graph, plan=plan, state={}, names={})
