"""Check that a checkpoint fits the model, loss, optimiser and scheduler, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from engines.checkpoint.checkpoint_errors import make_damaged_error
from engines.checkpoint.checkpoint_reader import STATE, Checkpoint, get_tensor_file
from engines.checkpoint.dry_run import check_optimiser_step, check_scheduler_step
from engines.checkpoint.json_values import decode_value
from engines.checkpoint.tensor_file import parse_dtype
from engines.checkpoint.weight_state import get_class_name, make_optimiser_state
from engines.errors import CheckpointError
from engines.images.sampler import SamplerState
from engines.optimisers import make_optimiser
from engines.training import Recipe

__all__ = ["check_fits_recipe", "check_optimiser_state", "check_shapes", "read_scheduler_state"]

_SHOWN = 3
_SMALL = 1024  # tensors with up to this many elements are read and their values checked

Outline = tuple[tuple[int, ...], torch.dtype]
Outlines = Mapping[str, Outline]


def check_fits_recipe(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Check everything but the values of large tensors against what is to be trained. Raises CheckpointError."""
    graph = {**recipe.graph.weights, **recipe.graph.buffers}
    for owner, names in recipe.names.items():
        held = {name: (graph[said].shape, getattr(torch, graph[said].dtype)) for name, said in names.held.items()}
        kept = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in names.kept.items()}
        if held or kept or owner == "model":
            check_shapes(checkpoint, owner, held | kept)
    ours = set(recipe.graph.trainable & recipe.graph.weights.keys())
    theirs = checkpoint.weight_states.keys()
    for what, differing in (("not trained there", ours - theirs), ("not trained here", theirs - ours)):
        if differing:
            raise CheckpointError(
                f"{checkpoint.path}: this checkpoint trains {len(theirs)} weights, and this training {len(ours)}: "
                f"{_describe_names(what, differing)}. Give all weights the requires_grad that they had, or load the "
                "weights alone: safetensors.torch.load_file."
            )
    with checkpoint.translate_errors():
        needed = {f"{name}/{key}" for name, state in checkpoint.weight_states.items() for key in state.tensors}
    found = checkpoint.read_shapes(STATE).keys()
    if needed != found:
        told = (_describe_names("not in it", needed - found), _describe_names("of no weight", found - needed))
        raise make_damaged_error(checkpoint.path, f"of {STATE}, {'; '.join(text for text in told if text)}")
    _check_optimisation(checkpoint, recipe, bool(ours))
    if checkpoint.feed is not None:
        with checkpoint.translate_errors():
            SamplerState.of(checkpoint.feed)


def check_shapes(checkpoint: Checkpoint, owner: str, ours: Outlines) -> None:
    """Compare the tensors of the model or the loss with `ours`. Raises CheckpointError if they do not match."""
    file = get_tensor_file(owner)
    if file not in checkpoint.manifest["files"]:
        raise CheckpointError(f"{checkpoint.path}: it has no {file}. It is of a training whose {owner} had no weights.")
    with checkpoint.translate_errors():
        theirs = {name: (shape, parse_dtype(code)) for name, (shape, code) in checkpoint.read_shapes(file).items()}
    missing, unknown = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    # Dtypes may differ, as another precision is another plan; but a counter cannot become a weight.
    other = {
        name
        for name in ours.keys() & theirs.keys()
        if ours[name][0] != theirs[name][0] or ours[name][1].is_floating_point != theirs[name][1].is_floating_point
    }
    if not (missing or unknown or other):
        return
    told = (
        _describe_names("not in it", missing),
        _describe_names("not here", unknown),
        _describe_names(
            "of another shape",
            other,
            lambda name: f"{name} {_describe_outline(theirs[name])} instead of {_describe_outline(ours[name])}",
        ),
    )
    agree = len(ours) - len(missing) - len(other)
    raise CheckpointError(
        f"{checkpoint.path}: this checkpoint is of another {owner}: of its {len(theirs)} tensors {agree} are those of "
        f"the {len(ours)} here; {'; '.join(text for text in told if text)}. Load it into the {owner} that it was saved "
        "from."
    )


def _describe_outline(outline: Outline) -> str:
    shape, dtype = outline
    return f"{shape}" if dtype.is_floating_point else f"{shape} of {dtype}"


def _describe_names(what: str, names: Collection[str], tell: Callable[[str], str] = str) -> str:
    shown = ", ".join(tell(name) for name in sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {shown}{more}" if names else ""


def _check_optimisation(checkpoint: Checkpoint, recipe: Recipe, trains: bool) -> None:
    """Compare the classes of optimiser and scheduler, then check that both can continue from their saved state."""
    # Placeholders of all ranks' weights: a rank alone would only see those that it updates.
    given = {spec.name: spec.make_placeholder() for spec in recipe.parameters}
    optimiser = make_optimiser(recipe.optimiser, given) if trains else None
    paced = recipe.scheduler(optimiser) if recipe.scheduler and optimiser else None
    for what, made in (("optimiser", optimiser), ("scheduler", paced)):
        with checkpoint.translate_errors():
            stored = checkpoint.manifest[what]
            theirs = stored["kind"] if stored else "none"
        ours = get_class_name(made) if made else "none"
        if theirs != ours:
            raise CheckpointError(
                f"{checkpoint.path}: the {what} of this checkpoint is {str(theirs)[:40]}, and here it is {ours}. Train "
                "with the one that it was saved from; to begin another one, load the weights alone: "
                "safetensors.torch.load_file."
            )
    if optimiser:
        names = {id(given[spec.name]): spec.key for spec in recipe.parameters}
        made_state = check_optimiser_state(checkpoint, optimiser, names)
        if paced:
            state = read_scheduler_state(checkpoint, len(optimiser.param_groups))
            with checkpoint.translate_errors():
                check_scheduler_step(optimiser, made_state, recipe.scheduler, state, checkpoint.step)


def check_optimiser_state(
    checkpoint: Checkpoint, optimiser: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Check that a fresh optimiser can continue from the saved state; return what `load_state_dict` would take.

    `names` maps the ids of the optimiser's weights to their names. Tensors of more than 1024 elements in the result are
    on the meta device. Raises CheckpointError.
    """
    shapes = checkpoint.read_shapes(STATE)

    def read_if_small(name: str) -> Tensor:
        shape, code = shapes[name]
        small = math.prod(shape) <= _SMALL
        return (
            checkpoint.read_tensor(STATE, name) if small else torch.empty(shape, dtype=parse_dtype(code), device="meta")
        )

    with checkpoint.translate_errors():
        made = make_optimiser_state(optimiser, names, checkpoint.weight_states, read_if_small)
        check_optimiser_step(optimiser, made, names)
    return made


def read_scheduler_state(checkpoint: Checkpoint, groups: int) -> dict[str, Any]:
    """Return the argument of `scheduler.load_state_dict` for `groups` groups of weights. Raises CheckpointError."""
    with checkpoint.translate_errors():
        state = decode_value(checkpoint.manifest["scheduler"]["state"])
        if not isinstance(state, dict):
            raise TypeError(f"the scheduler's state is a {type(state).__name__}")
        rates = state.get("base_lrs", [None] * groups)
        if isinstance(rates, list) and len(rates) != groups:
            raise CheckpointError(
                f"{checkpoint.path}: the scheduler has {len(rates)} learning rates, but there are {groups} groups of "
                "weights here. Make the optimiser with the groups that it had, on every rank."
            )
        return state
