"""The training loop of one rank: epochs of steps, and the smaller step that may end an epoch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.stages import cut_stages, find_layers
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.output_meaning import find_output_meaning
from mpi4dl_nb.engines.images.dataset import LabelledImages, find_ignored_label
from mpi4dl_nb.engines.images.loader import LoaderOptions, NotReady, RankLoader
from mpi4dl_nb.engines.images.shard_reader import ShardReader
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.train.recipe import Recipe, count_step_images, freeze_weights
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import (
    Counts,
    EpochResult,
    Scores,
    SkippedImage,
    StepResult,
    count_predictions,
)

# The last step of an epoch, if fewer images are left than a step takes.
#
# It has as many micro-batches as every other step, each with fewer images, and each of its images has equal weight. So
# it is the step of a training made for that many images, and the loss is the mean over them.

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
    _check_divides(rest, recipe)
    return rest


def _check_divides(images: int, recipe: Recipe) -> None:
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
    _check_divides(images, recipe)
    # Each rank holds the weights of its stages already. An automatic balance could move layers between stages for
    # fewer images, so the stages of the full step are fixed as layer counts.
    layers, plan = find_layers(recipe.graph), recipe.plan
    stages = cut_stages(layers, plan)
    counts = tuple(sum(layer.nodes.start in stage for layer in layers) for stage in stages)
    plan = replace(plan, balance=counts)
    try:
        graph = traces.with_batch(images // plan.batches).get_graph(plan)
        graph = freeze_weights(graph, graph.trainable - recipe.graph.trainable)
        smaller = replace(recipe, graph=graph, plan=plan, state={}, names={})
        smaller.check_programs()
    except (TraceError, ImageError, PlanError) as error:
        why = f"The last step of an epoch has {images} images. {_WAY_OUT}, or mend this: {error}"
        raise type(error)(why) from error
    return smaller


# The training loop on one rank, step by step: from images to weights.


@dataclass(frozen=True, slots=True)
class RankStepStats:
    """One rank's statistics of a step: the losses of its micro-batches, and the counts of its predictions."""

    images: int
    seconds: float
    losses: Mapping[int, float]
    counts: Counts
    epoch: int = 0
    step: int = 0
    wait_s: float = 0.0


class RankTrainLoop:
    """One rank's training loop over images; `specs` are those of a step. A failure stops the loader's worker threads.

    After a step, a checkpoint needs `training` and `feed.get_state()`; before the first step, `feed.resume(state)`
    resumes from there. `report` is that of the last step. Smaller steps at the end of an epoch need a training that is
    prepared for them (`RankTraining.add_size`). Raises ImageError if there are too few images for one step.
    """

    def __init__(
        self,
        world: World,
        training: RankTraining,
        specs: Mapping[str, TensorSpec],
        images: LabelledImages,
        feeding: LoaderOptions,
    ) -> None:
        self.world, self.training, self.images = world, training, specs["images"].shape[0]
        unit, sizes = compute_smallest_step(training.recipe.plan), training.sizes
        reader = ShardReader(training.cut, images, specs, find_ignored_label(training.graph))
        self.feed = RankLoader(world, reader, self.images, feeding, unit, sizes.__contains__)
        self.report: StepReport | None = None

    def step(self) -> RankStepStats | NotReady | None:
        """Run one training step; return None at the end of an epoch, after which the next one begins. Collective.

        Returns NotReady, and does nothing, if the next step is a smaller one for which the training is not prepared.
        Raises ImageError, on every rank, if an image cannot be read, and LossError if the loss is not finite.
        """
        try:
            get_status_board().report(b"reads the images of the next step")
            served = self.feed.load_next()
            if served is None or isinstance(served, NotReady):
                return served
            # `advance` only after the step: a checkpoint after a failed step resumes with the same images.
            self.report, stats = run_step(self.training, served.parts, served.images)
            self.feed.advance()
        except BaseException:
            self.close()
            raise
        return replace(stats, epoch=served.place.epoch, step=served.place.step, wait_s=served.wait_s)

    def close(self) -> None:
        """Stop the loader's worker threads."""
        self.feed.close()


def run_step(training: RankTraining, parts: Inputs, images: int) -> tuple[StepReport, RankStepStats]:
    """Run one training step on this rank's parts of the inputs."""
    start_s = time.perf_counter()
    training.step(parts, images)
    return collect_stats(training, parts, images, time.perf_counter() - start_s)


def collect_stats(
    training: RankTraining, parts: Inputs, images: int, seconds: float
) -> tuple[StepReport, RankStepStats]:
    """Return this rank's report and statistics of a completed step."""
    counts = Counts()
    meaning = find_output_meaning(training.graph)
    for micro_batch, part in parts.items():
        if "labels" not in part:
            continue
        way = training.program.get_direction_program(micro_batch)
        axes = way.input_shards["labels"].axes
        # A prediction that several ranks hold whole is counted on one of them, that which starts the backward pass.
        if way.prediction is not None and (axes or way.seeds_loss):
            scores = training.worker.peek(way.prediction, micro_batch).detach()
            counts += count_predictions(scores, part["labels"].to(scores.device), meaning)
    return training.report, RankStepStats(images, seconds, training.report.losses, counts)


def merge_stats(ranks: Sequence[RankStepStats]) -> StepResult:
    """Merge the statistics of all ranks into the result of a step."""
    # Several ranks may report the loss of one micro-batch: by its number it counts once.
    losses = {micro_batch: loss for stats in ranks for micro_batch, loss in stats.losses.items()}
    seconds, wait_s = max(stats.seconds for stats in ranks), max(stats.wait_s for stats in ranks)
    first, counts = ranks[0], sum((stats.counts for stats in ranks), Counts())
    loss = statistics.fmean(losses.values())
    return StepResult(first.epoch, first.step, first.images, seconds, loss, counts, wait_s)


# The training loop of all ranks.


class TrainLoop(Protocol):
    """The interface of a training loop, for a rank and for the notebook."""

    @property
    def bad(self) -> Sequence[str]:
        """For each image that was left out so far, which one it is and why."""

    def step(self) -> StepResult | None:
        """Run the next step; return None at the end of an epoch."""

    def evaluate(self) -> Scores | None:
        """Evaluate the current model on held-out images; return None if there are none."""


class CollectiveTrainLoop:
    """The train loops of all ranks, which every rank runs alike. `evaluate` is that of `TrainLoop`.

    `smaller` makes the recipe of a step of fewer images, for an epoch that ends with one.
    """

    def __init__(
        self,
        loop: RankTrainLoop,
        evaluate: Callable[[], Scores | None] = lambda: None,
        smaller: Callable[[int], Recipe] | None = None,
    ) -> None:
        self.loop, self.evaluate, self.smaller = loop, evaluate, smaller

    @property
    def bad(self) -> Sequence[str]:
        """The images that were left out, the same on every rank."""
        return self.loop.feed.bad

    def step(self) -> StepResult | None:
        """Run the next step, and return its result on every rank."""
        stats = self.loop.step()
        if isinstance(stats, NotReady) and self.smaller:
            # All ranks learn of the smaller step at the same place, so preparing it may be collective. Then try again.
            self.loop.training.add_size(self.smaller(stats.images))
            return self.step()
        return None if stats is None else merge_stats(self.loop.world.all_gather(stats))


def run(
    loop: TrainLoop, epochs: int = 1, begun: Sequence[StepResult] = (), is_over: bool = False
) -> Iterator[SkippedImage | StepResult | EpochResult]:
    """Yield each completed step, the bad images that it left out before it, and each epoch after its steps.

    An epoch that has already begun counts as one. `begun` are its steps to include in the epoch's result, and `is_over`
    says that they are all of its steps. Between two results the caller may save the training, or stop.
    """
    # `reported`: how many bad images the events have named so far, `seen_held_out`: those of the held-out images.
    reported, seen_held_out = len(loop.bad), set[str]()
    for epoch in range(epochs):
        steps = list(begun) if epoch == 0 else []
        # A training resumed exactly at the end of an epoch still owes that epoch's result, but no step.
        more = epoch > 0 or not is_over
        while more:
            step = loop.step()
            yield from map(SkippedImage, loop.bad[reported:])
            reported = len(loop.bad)
            more = step is not None
            if step is not None:
                steps.append(step)
                yield step
        if steps:
            held_out = loop.evaluate()
            new = [text for text in held_out.bad if text not in seen_held_out] if held_out else []
            seen_held_out.update(new)
            yield from map(SkippedImage, new)
            yield EpochResult.of(steps, reported, held_out)
