"""The state of optimisers and schedulers as JSON and tensors, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.errors import CheckpointError

__all__ = [
    "WeightState",
    "check_like",
    "check_scheduler_state",
    "collect_weight_states",
    "decode_value",
    "encode_value",
    "is_finite",
    "make_optimiser_state",
]


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
    check_like({name: value for name, value in found.items() if name in fresh}, fresh, kind)


def check_like(found: Any, fresh: Any, where: str) -> None:
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
            check_like(value, fresh[key], f"{where}.{key}")
    elif _get_kind(found) != _get_kind(fresh) and not (
        (fresh is None and _get_kind(found) in ("number", "text")) or (found is None and isinstance(fresh, bool))
    ):
        raise ValueError(f"{where} is of type {type(found).__name__}, and here of type {type(fresh).__name__}")
    elif _get_kind(found) == "number" and not is_finite(found) and (fresh is None or is_finite(fresh)):
        said = found.item() if isinstance(found, Tensor) else found
        raise ValueError(f"{where} is {str(said)[:20]}, which is no number that a step can take")
    elif isinstance(found, list | tuple) and fresh:
        for index, value in enumerate(found):  # past the end of `fresh`, its last item is the sample
            check_like(value, fresh[min(index, len(fresh) - 1)], f"{where}[{index}]")
    elif isinstance(found, dict) and fresh:
        for key, value in found.items():  # keys are numbers, as in milestones
            check_like(key, next(iter(fresh)), f"a key of {where}")
            check_like(value, next(iter(fresh.values())), f"{where}[{key}]")


def is_finite(number: Any) -> bool:
    """Return whether a number, or each element of a tensor, is finite and fits a float. Meta tensors count as finite.

    >>> is_finite(3), is_finite(torch.tensor(0.5)), is_finite(float("nan")), is_finite(10**400)
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
    made = optimiser.state_dict()
    for group, packed in zip(optimiser.param_groups, made["param_groups"], strict=True):
        said = [names[id(weight)] for weight in group["params"]]
        saved = [name for name in said if name in states]
        if other := next((name for name in saved if states[name].options != states[saved[0]].options), None):
            raise CheckpointError(
                f"{saved[0]} and {other} were in groups of the optimiser with other options, and are in one group now. "
                "Make the optimiser with the groups that it had."
            )
        options = decode_value(states[saved[0]].options) if saved else {}
        known = options.keys() & packed.keys()  # schedulers add others, which no step reads
        kind = type(optimiser).__name__
        check_like({key: options[key] for key in known}, {key: packed[key] for key in known}, kind)
        packed.update(options)
        for index, name, weight in zip(packed["params"], said, group["params"], strict=True):
            if name not in states:
                continue
            kept = {key: decode_value(value) for key, value in states[name].values.items()}
            for key in states[name].tensors:
                read = kept[key] = tensor(f"{name}/{key}")
                if not read.is_meta:  # a copy: it is mapped from the file, which others may overwrite
                    like = weight if read.shape == weight.shape else read  # other memory layouts slow down steps
                    kept[key] = torch.empty_like(like, dtype=read.dtype, device="cpu", requires_grad=False).copy_(read)
            if kept:
                made["state"][index] = kept
    return made
