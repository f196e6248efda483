"""Check that a training can continue from a checkpoint: names, shapes, and a trial step of the optimiser."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engines.errors import CheckpointError
from engines.formatting import format_names
from engines.images.shard_reader import SamplerState
from engines.program.update import Scheduler
from engines.train.checkpoint_files import MOST_STEPS, parse_dtype
from engines.train.checkpoint_folder import make_damaged_error
from engines.train.checkpoint_reader import STATE, Checkpoint, get_tensor_file
from engines.train.checkpoint_values import (
    check_like,
    check_scheduler_state,
    decode_value,
    is_finite,
    make_optimiser_state,
)
from engines.train.optimisers import make_optimiser
from engines.train.training import Recipe

__all__ = [
    "check_fits_recipe",
    "check_optimiser_state",
    "check_optimiser_step",
    "check_scheduler_step",
    "check_shapes",
    "read_scheduler_state",
]


# Check by a trial step without memory that training can continue from the state of an optimiser and a scheduler.
#
# Weights on PyTorch's meta device have shapes and dtypes, but no memory. The same holds for their gradients and for
# the optimiser's state. Scalar state, such as the step count of a weight, keeps its value.
#
#     trial step of                       if the step fails
#     1. the optimiser as it was made     a trial is impossible: only sizes are checked
#     2. ... with the saved options       every step of the training would fail, too
#                                         (afterwards: its state shows what must have been saved)
#     3. ... and with the saved state     every step of the training would fail, too


def check_optimiser_step(optimiser: torch.optim.Optimizer, made: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Compare `made` with the state that a fresh `optimiser` builds, and try a step from it.

    `made` is the result of `make_optimiser_state`; `names` maps ids of weights to names. Raises ValueError if
    `load_state_dict` would accept the state but every step would fail.
    """
    weights = [weight for group in optimiser.param_groups for weight in group["params"]]
    kept = {index: (weights[index], names[id(weights[index])], held) for index, held in made["state"].items()}
    for weight, name, held in kept.values():
        # Optimisers' largest states have the weight's size, or are square matrices over one of its sides (Shampoo).
        most = max(weight.numel(), *(side**2 for side in weight.shape), 1)
        for key, value in held.items():
            if isinstance(value, Tensor) and value.numel() > most:
                raise ValueError(
                    f"{name}/{key} has the shape {tuple(value.shape)}, and its weight {tuple(weight.shape)}"
                )
    # Each trial uses its own copy, because a step changes the optimiser's state and its options. Many third-party
    # optimisers read values, which fails without memory.
    if _find_failure(_copy_to_meta(optimiser).step):
        return
    kind, after = type(optimiser).__name__, _copy_to_meta(optimiser, made)
    if error := _find_failure(after.step):
        raise ValueError(f"{kind} with these options cannot step: {type(error).__name__}: {error}") from error
    usual = dict(enumerate(after.state.get(weight, {}) for group in after.param_groups for weight in group["params"]))
    is_own = type(optimiser).__module__.startswith("torch.optim")
    for index, (_, name, held) in kept.items():
        _check_weight_values(held, usual[index], name, is_own)
    # The state is put in place by hand: `load_state_dict` would move it to the device of the weights, which is "meta",
    # and a step could not read its own count then.
    again = _copy_to_meta(optimiser, made)
    moved = [weight for group in again.param_groups for weight in group["params"]]
    for index, (_, _, held) in kept.items():
        again.state[moved[index]] = {key: _convert_like(value, usual[index].get(key)) for key, value in held.items()}
    if error := _find_failure(again.step):
        raise ValueError(f"{kind} from this state cannot step: {type(error).__name__}: {error}") from error


def check_scheduler_step(
    optimiser: torch.optim.Optimizer, made: Mapping[str, Any], scheduler: Scheduler, state: dict[str, Any], steps: int
) -> None:
    """Compare a scheduler's `state` with that of a fresh one, and try a step from it.

    `steps` is the number of steps that the training has made. Raises ValueError as `check_optimiser_step`. The end of a
    schedule (`total_steps`) is not an error here: the scheduler itself reports it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scheduler warns when it steps without its optimiser
        fresh: Any = scheduler(_copy_to_meta(optimiser))
        kind = type(fresh).__name__
        check_scheduler_state(state, fresh)
        done, first = state.get("last_epoch", 0), getattr(fresh, "last_epoch", 0)  # chained schedulers have none
        if not isinstance(done, int) or not 0 <= done <= first + steps:
            raise ValueError(f"{kind} has made {str(done)[:20]} steps, and the training {steps}")
        if _find_failure(fresh.step):
            return
        trial = _copy_to_meta(optimiser, made)
        paced: Any = scheduler(trial)
        _set_options(trial, made)
        paced.load_state_dict(copy.deepcopy(state))
        error = _find_failure(paced.step)
        if isinstance(error, ValueError):  # schedulers raise it when their schedule has ended: a valid state
            return
        if error:
            raise ValueError(f"{kind} cannot step from this state: {type(error).__name__}: {error}") from error
    for group in trial.param_groups:
        if not is_finite(group["lr"]):
            raise ValueError(f"{kind} steps from this state to a learning rate of {group['lr']}")


def _copy_to_meta(optimiser: torch.optim.Optimizer, made: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
    """Return a copy of `optimiser` on the meta device, with the options of `made`; trainable weights have gradients."""
    # Entries of `memo` replace tensors during the deep copy: no weight and no large state tensor is ever copied.
    # Zero-dimensional state keeps its value, because steps read it.
    memo: dict[int, Any] = {}
    for group in optimiser.param_groups:
        for weight in group["params"]:
            empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            memo[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
    for kept in optimiser.state.values():
        memo |= {id(value): value.to("meta") for value in kept.values() if isinstance(value, Tensor) and value.dim()}
    copied = copy.deepcopy(optimiser, memo)
    for group in copied.param_groups:
        for weight in group["params"]:
            weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    if made is not None:
        _set_options(copied, made)
    return copied


def _set_options(optimiser: torch.optim.Optimizer, made: Mapping[str, Any]) -> None:
    """Copy the options of `made`, except those that choose kernels: some are for GPUs only; results are equal."""
    for group, said in zip(optimiser.param_groups, made["param_groups"], strict=True):
        group.update({key: copy.deepcopy(said[key]) for key in said.keys() - {"params", "param_names"}})
        group.update(dict.fromkeys(group.keys() & {"fused", "foreach"}, False))


def _find_failure(step: Callable[[], object]) -> Exception | None:
    try:
        step()
    except Exception as error:
        return error
    return None


def _convert_like(value: Any, usual: Any) -> Any:
    """Move `value` to the device and dtype that the optimiser itself uses: kernels take nothing else."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(usual, Tensor):
        return value.to(usual.device, usual.dtype)
    return value.to("meta") if value.dim() else value


def _check_weight_values(held: Mapping[str, Any], usual: Mapping[str, Any], name: str, is_own: bool) -> None:
    """Check the state of one weight. A third-party optimiser may create some of it in a later step only."""
    for key, value in held.items():
        where = f"{name}/{key}"
        if key in usual:
            like = usual[key]
            check_like(value, like, where)
            if isinstance(value, Tensor) and isinstance(like, Tensor):
                if value.shape != like.shape:
                    raise ValueError(f"{where} has the shape {tuple(value.shape)} instead of {tuple(like.shape)}")
                # The width of a dtype may differ, as with another precision; `load_state_dict` converts it.
                classes = [(each.is_floating_point(), each.is_complex()) for each in (value, like)]
                if classes[0] != classes[1]:
                    raise ValueError(f"{where} is of type {value.dtype}, and here of type {like.dtype}")
                if not value.dim() and not value.is_meta and not is_finite(value):
                    raise ValueError(f"{where} is {value.item()}")
        elif is_own:
            raise ValueError(f"{where} is none of what it keeps: {', '.join(usual) or 'nothing'}")
        if key == "step" and not 0 <= _to_float(value) <= MOST_STEPS:
            raise ValueError(f"{where} is {_to_float(value)}, which is no number of steps")


def _to_float(value: Any) -> float:
    """Return `value` as a float, NaN if it is not a real number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_meta and not value.is_complex() else math.nan
    return value if isinstance(value, int | float) else math.nan


# Check that a checkpoint fits the model, loss, optimiser and scheduler, before anything is changed.


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
    return f"{len(names)} {what}: {format_names([tell(name) for name in sorted(names)])}" if names else ""


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
        ours = type(made).__name__ if made else "none"
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
        if math.prod(shape) <= _SMALL:
            return checkpoint.read_tensor(STATE, name)
        return torch.empty(shape, dtype=parse_dtype(code), device="meta")

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
