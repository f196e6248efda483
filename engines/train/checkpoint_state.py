"""The state of optimisers and schedulers: as JSON and tensors and back, and whether steps can be made from it."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.program.update import Scheduler, list_weights
from mpi4dl_nb.engines.train.checkpoint_files import MOST_STEPS

# Convert the state of optimisers and schedulers, except large tensors, to JSON and back.

_KIND = "python"  # key that marks a value of a type that JSON lacks
_MOST = 1024  # most elements of a tensor that is written as text


def encode_value(value: Any, where: str) -> Any:
    """Return `value` as JSON data: tuples, Counters, other dicts and small tensors are marked with their type.

    Numbers, strings, lists and dicts with string keys stay as they are. Raises CheckpointError for anything else;
    `where` names the value in its message.

    >>> decode_value(encode_value({"betas": (0.9, 0.999), "milestones": Counter({3: 1})}, "Adam"))
    {'betas': (0.9, 0.999), 'milestones': Counter({3: 1})}
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_KIND: "float", "value": str(value)}
        case tuple():
            return {_KIND: "tuple", "value": [encode_value(item, where) for item in value]}
        case list():
            return [encode_value(item, where) for item in value]
        case Tensor() if value.numel() <= _MOST and not value.is_complex():
            # float64 holds every value of the narrower types exactly, and JSON has its shortest exact decimal.
            wide = value.detach().cpu().to(torch.float64 if value.is_floating_point() else value.dtype)
            listed = encode_value(wide.tolist(), "a tensor")
            return {_KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "value": listed}
        case dict():
            # JSON's keys are strings: a dict with others becomes a list of pairs.
            if all(isinstance(key, str) for key in value) and _KIND not in value and not isinstance(value, Counter):
                return {key: encode_value(item, where) for key, item in value.items()}
            pairs = [[encode_value(key, where), encode_value(item, where)] for key, item in value.items()]
            return {_KIND: "Counter" if isinstance(value, Counter) else "dict", "value": pairs}
        case Tensor():
            kind = "complex numbers" if value.is_complex() else "elements"
            raise CheckpointError(
                f"{where} keeps a tensor of {value.numel():,} {kind} in a list, a dict or an option. A checkpoint has "
                f"tensors there of at most {_MOST:,} real elements, and others only where a key of a weight's state is "
                "theirs alone. Use one of torch.optim's own, or give each tensor such a key."
            )
    raise CheckpointError(
        f"{where} keeps a {type(value).__name__}, which a checkpoint does not hold: it has numbers, texts, lists and "
        "tensors only. Use one of torch.optim's own, or leave that out of its state_dict()."
    )


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` was given. Raises ValueError or TypeError for what it never writes."""
    match value:
        case list():
            return [decode_value(item) for item in value]
        case {"python": "float", "value": held}:
            return float(held)
        case {"python": "tuple", "value": held}:
            return tuple(decode_value(item) for item in held)
        case {"python": "tensor", "value": held}:
            listed, name = decode_value(held), value.get("dtype", "")
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name!r} is no type of tensor")
            return torch.tensor(listed, dtype=dtype)
        case {"python": "dict" | "Counter" as kind, "value": held}:
            pairs = {decode_value(key): decode_value(item) for key, item in held}
            return Counter(pairs) if kind == "Counter" else pairs
        case {"python": str(kind), "value": _}:
            raise ValueError(f"{kind!r} is no kind of value")
        case dict():
            return {key: decode_value(item) for key, item in value.items()}
    return value


def check_scheduler_state(found: dict[str, Any], owner: Any) -> None:
    """Compare a scheduler's state in a checkpoint with that of a fresh one, the `owner`. Raises ValueError.

    A name that only the checkpoint has may be one that the scheduler sets later. It must not be the name of a method or
    of the optimiser, because `load_state_dict` would overwrite that attribute.
    """
    fresh, kind = owner.state_dict(), type(owner).__name__
    for name in found.keys() - fresh.keys():
        if hasattr(owner, name):
            raise ValueError(f"{kind} keeps no {name!r}: it would replace what {kind} needs")
    _check_like({name: value for name, value in found.items() if name in fresh}, fresh, kind)


def _check_like(found: Any, fresh: Any, where: str) -> None:
    """Check that a saved value has the names and the kinds of types of a value in a fresh optimiser or scheduler.

    A fresh None may have become a number or a string, and a switch (a bool) may have been None, its default. Raises
    ValueError: a value of another type would be accepted and then fail in every step.
    """
    # A dict with string keys has fixed names, such as options: each value is compared with that of the same name. Other
    # dicts and lists have any length: their items are compared with the fresh ones as samples.
    if isinstance(found, dict) and isinstance(fresh, dict) and all(isinstance(key, str) for key in fresh):
        if unknown := [key for key in found if key not in fresh]:
            raise ValueError(f"{where} has no {str(unknown[0])!r}")
        for key, value in found.items():
            _check_like(value, fresh[key], f"{where}.{key}")
    elif _get_kind(found) != _get_kind(fresh) and not (
        (fresh is None and _get_kind(found) in ("number", "text")) or (found is None and isinstance(fresh, bool))
    ):
        raise ValueError(f"{where} is of type {type(found).__name__}, and here of type {type(fresh).__name__}")
    elif _get_kind(found) == "number" and (wrong := _describe_wrong_number(found, fresh)):
        raise ValueError(f"{where} is {wrong}")
    elif isinstance(found, list | tuple) and fresh:
        for index, value in enumerate(found):  # past the end of `fresh`, its last item is the sample
            _check_like(value, fresh[min(index, len(fresh) - 1)], f"{where}[{index}]")
    elif isinstance(found, dict) and fresh:
        for key, value in found.items():  # keys are numbers, as in milestones
            _check_like(key, next(iter(fresh)), f"a key of {where}")
            _check_like(value, next(iter(fresh.values())), f"{where}[{key}]")


def _describe_wrong_number(found: Any, fresh: Any) -> str:
    """Return what is wrong with a saved number, where a fresh one is `fresh`; empty if a step can take it."""
    if isinstance(fresh, bool) and found not in (0, 1):
        why = "which is neither on nor off"
    elif not _is_finite(found) and (fresh is None or _is_finite(fresh)):
        why = "which is no number that a step can take"
    else:
        return ""
    return f"{str(found.item() if isinstance(found, Tensor) else found)[:20]}, {why}"


def _is_finite(number: Any) -> bool:
    """Return whether a number, or each element of a tensor, is finite and fits a float. Meta tensors count as finite.

    >>> _is_finite(3), _is_finite(torch.tensor(0.5)), _is_finite(float("nan")), _is_finite(10**400)
    (True, True, False, False)
    """
    if isinstance(number, Tensor):
        return number.is_meta or bool(torch.isfinite(number).all())
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _get_kind(value: Any) -> str:
    """Return the kind of a value.

    Integers, floats, bools and one-element tensors are all numbers; tuples are lists.
    """
    match value:
        case bool() | int() | float() | Tensor():
            return "number" if not isinstance(value, Tensor) or value.numel() == 1 else "tensor"
        case str():
            return "text"
        case list() | tuple():
            return "list"
        case dict():
            return "dict"
    return type(value).__name__


# The state of an optimiser by weight name, independent of which rank updates which weight.
#
# `torch.optim` numbers the weights in the order in which it received them, and every rank has other weights.


@dataclass(frozen=True)
class WeightState:
    """The optimiser's state of one weight: `options` of its group (such as lr), `values` and keys of `tensors`.

    `options` and `values` are JSON data.
    """

    options: Mapping[str, Any]
    values: Mapping[str, Any]
    tensors: tuple[str, ...]


def collect_weight_states(
    optimiser: torch.optim.Optimizer, names: Mapping[int, str]
) -> tuple[dict[str, WeightState], dict[str, Tensor]]:
    """Return the state of each weight by name, and the tensors by `WEIGHT/KEY`. `names` maps ids of weights to names.

    Raises CheckpointError if the optimiser keeps state that belongs to no single weight, or that is no number or
    tensor.
    """
    kind = type(optimiser).__name__
    if strange := [key for key in optimiser.state if id(key) not in names]:
        raise CheckpointError(f"{kind} keeps {strange[0]!r}, which is of no weight. A checkpoint has state by weight.")
    states: dict[str, WeightState] = {}
    tensors: dict[str, Tensor] = {}
    for group in optimiser.param_groups:
        options = {
            key: encode_value(value, kind) for key, value in group.items() if key not in ("params", "param_names")
        }
        for weight in group["params"]:
            name, kept = names[id(weight)], optimiser.state.get(weight, {})
            held = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
            values = {key: encode_value(value, kind) for key, value in kept.items() if key not in held}
            states[name] = WeightState(options, values, tuple(held))
            tensors |= {f"{name}/{key}": tensor for key, tensor in held.items()}
    return states, tensors


def find_refused_options(optimiser: torch.optim.Optimizer, options: Mapping[str, Any]) -> str:
    """Return why the optimiser's class refuses the options of a group, as it would if a user gave them; or "".

    >>> find_refused_options(torch.optim.Adam([torch.zeros(1)]), {"lr": 0.1, "betas": (1.5, 0.9)})
    'Invalid beta parameter at index 0: 1.5'
    """
    # The valid range of an option is known to the class alone, whose constructor checks it: a step would only compute
    # something wrong. Choices of kernels are left out, as some exist on GPUs only.
    names = inspect.signature(type(optimiser)).parameters.keys() - {"params", "param_names", "fused", "foreach"}
    arguments = {name: copy.deepcopy(options[name]) for name in options.keys() & names}
    error = _find_failure(lambda: type(optimiser)([nn.Parameter(torch.zeros(2, 2))], **arguments))
    return "" if error is None else str(error) or type(error).__name__


def make_optimiser_state(
    optimiser: torch.optim.Optimizer,
    names: Mapping[int, str],
    states: Mapping[str, WeightState],
    tensor: Callable[[str], Tensor],
) -> dict[str, Any]:
    """Return the argument of `optimiser.load_state_dict`, for the optimiser's weights that `states` contains.

    `tensor` reads a tensor by its name; a tensor on the meta device stays there. Raises CheckpointError if weights of
    one group had different options.
    """
    # The optimiser's own state_dict() has the numbers of its weights; saved options and state are put in their places:
    #
    #   saved, by name     {"conv.weight": state, "fc.bias": state, "fc.weight": state}
    #   this rank holds    group 0: fc.weight, fc.bias
    #   result             group 0: params [0, 1], saved options;  state {0: of fc.weight, 1: of fc.bias}
    state_dict = optimiser.state_dict()
    for group, packed in zip(optimiser.param_groups, state_dict["param_groups"], strict=True):
        members = [names[id(weight)] for weight in group["params"]]
        saved = [name for name in members if name in states]
        if other := next((name for name in saved if states[name].options != states[saved[0]].options), None):
            raise CheckpointError(
                f"{saved[0]} and {other} were in groups of the optimiser with other options, and are in one group now. "
                "Make the optimiser with the groups that it had."
            )
        options = decode_value(states[saved[0]].options) if saved else {}
        known = options.keys() & packed.keys()  # schedulers add others, which no step reads
        kind = type(optimiser).__name__
        _check_like({key: options[key] for key in known}, {key: packed[key] for key in known}, kind)
        if not find_refused_options(optimiser, group) and (why := find_refused_options(optimiser, group | options)):
            raise ValueError(f"{kind} refuses the options of {saved[0] if saved else 'a group'}: {why}")
        packed.update(options)
        for index, name, weight in zip(packed["params"], members, group["params"], strict=True):
            if name not in states:
                continue
            kept = {key: decode_value(value) for key, value in states[name].values.items()}
            for key in states[name].tensors:
                read = kept[key] = tensor(f"{name}/{key}")
                if not read.is_meta:  # a copy: it is mapped from the file, which others may overwrite
                    like = weight if read.shape == weight.shape else read  # other memory layouts slow down steps
                    kept[key] = torch.empty_like(like, dtype=read.dtype, device="cpu", requires_grad=False).copy_(read)
            if kept:
                state_dict["state"][index] = kept
    return state_dict


# Check by a trial step without memory that training can continue from the state of an optimiser and a scheduler.
#
# Weights on PyTorch's meta device have shapes and dtypes, but no memory. The same holds for their gradients and for
# the optimiser's state. Scalar state, such as the step count of a weight, keeps its value.
#
#     trial step of                       if the step fails
#     1. the optimiser as it was made     a trial is impossible: nothing is checked
#     2. ... with the saved options       every step of the training would fail, too
#                                         (afterwards: its state shows what must have been saved)
#     3. ... and with the saved state     every step of the training would fail, too


def check_optimiser_step(optimiser: torch.optim.Optimizer, made: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Compare `made` with the state that a fresh `optimiser` builds, and try a step from it.

    `made` is the result of `make_optimiser_state`; `names` maps ids of weights to names. Raises ValueError if
    `load_state_dict` would accept the state but every step would fail.
    """
    weights = list_weights(optimiser)
    kept = {index: (names[id(weights[index])], held) for index, held in made["state"].items()}
    # Each trial uses its own copy, because a step changes the optimiser's state and its options. Many third-party
    # optimisers read values, which fails without memory.
    if _find_failure(_copy_to_meta(optimiser).step):
        return
    kind, after = type(optimiser).__name__, _copy_to_meta(optimiser, made)
    if error := _find_failure(after.step):
        raise ValueError(f"{kind} with these options cannot step: {type(error).__name__}: {error}") from error
    usual = dict(enumerate(after.state.get(weight, {}) for weight in list_weights(after)))
    # Hooks of a step may keep state of their own, and the copies have none.
    hooked = optimiser._optimizer_step_pre_hooks or optimiser._optimizer_step_post_hooks
    is_own = type(optimiser).__module__.startswith("torch.optim") and not hooked
    for index, (name, held) in kept.items():
        _check_weight_values(held, usual[index], name, is_own)
    # The state is put in place by hand: `load_state_dict` would move it to the device of the weights, which is "meta",
    # and a step could not read its own count then.
    again = _copy_to_meta(optimiser, made)
    moved = list_weights(again)
    for index, (_, held) in kept.items():
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
        if not _is_finite(group["lr"]):
            raise ValueError(f"{kind} steps from this state to a learning rate of {group['lr']}")
        usual = optimiser.param_groups[0]
        if not find_refused_options(trial, usual) and (why := find_refused_options(trial, group)):
            raise ValueError(f"{kind} steps from this state to options that {type(trial).__name__} refuses: {why}")


def _copy_to_meta(optimiser: torch.optim.Optimizer, made: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
    """Return a copy of `optimiser` on the meta device, with the options of `made`; trainable weights have gradients."""
    # Entries of `memo` replace tensors during the deep copy: no weight and no large state tensor is ever copied.
    # Zero-dimensional state keeps its value, because steps read it.
    memo: dict[int, Any] = {}
    for weight in list_weights(optimiser):
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        memo[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
    for kept in optimiser.state.values():
        memo |= {id(value): value.to("meta") for value in kept.values() if isinstance(value, Tensor) and value.dim()}
    copied = copy.deepcopy(optimiser, memo)
    for weight in list_weights(copied):
        weight.grad = torch.empty_like(weight) if weight.requires_grad else None
    if made is not None:
        _set_options(copied, made)
    return copied


def _set_options(optimiser: torch.optim.Optimizer, made: Mapping[str, Any]) -> None:
    """Copy the options of `made`, except those that choose kernels: some are for GPUs only; results are equal."""
    for group, options in zip(optimiser.param_groups, made["param_groups"], strict=True):
        group.update({key: copy.deepcopy(options[key]) for key in options.keys() - {"params", "param_names"}})
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
    """Check the state of one weight. A third-party optimiser, or a hook, may create some of it in a later step only."""
    for key, value in held.items():
        where = f"{name}/{key}"
        if key in usual:
            like = usual[key]
            _check_like(value, like, where)
            if isinstance(value, Tensor) and isinstance(like, Tensor):
                if value.shape != like.shape:
                    raise ValueError(f"{where} has the shape {tuple(value.shape)} instead of {tuple(like.shape)}")
                # The width of a dtype may differ, as with another precision; `load_state_dict` converts it.
                classes = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (value, like)]
                if classes[0] != classes[1]:
                    raise ValueError(f"{where} is of type {value.dtype}, and here of type {like.dtype}")
                if not value.dim() and not value.is_meta and not _is_finite(value):
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
