"""What optimisers and schedulers keep beside large tensors, as JSON and back."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from engines.errors import CheckpointError

__all__ = ["check_like", "check_state", "from_json", "is_finite", "to_json"]

_KIND = "python"  # the key that marks what JSON itself has no word for
_MOST = 1024  # elements of a tensor that is written as text


def to_json(value: Any, where: str) -> Any:
    """Numbers, texts, lists and dicts as they are; tuples, Counters, other dicts and small tensors marked.

    `where` says what it is, for the CheckpointError that is raised for anything else.

    >>> from_json(to_json({"betas": (0.9, 0.999), "milestones": Counter({3: 1})}, "Adam"))
    {'betas': (0.9, 0.999), 'milestones': Counter({3: 1})}
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_KIND: "float", "value": str(value)}
        case tuple():
            return {_KIND: "tuple", "value": [to_json(item, where) for item in value]}
        case list():
            return [to_json(item, where) for item in value]
        case Tensor() if value.numel() <= _MOST and not value.is_complex():
            return _tensor(value)
        case dict():
            return _dict(value, where)
    raise CheckpointError(
        f"{where} keeps a {type(value).__name__}, which a checkpoint does not hold: it has numbers, texts, lists and "
        "tensors only. Use one of torch.optim's own, or leave that out of its state_dict()."
    )


def _tensor(value: Tensor) -> dict[str, Any]:
    wide = value.detach().cpu().to(torch.float64 if value.is_floating_point() else value.dtype)
    listed = to_json(wide.tolist(), "a tensor")
    return {_KIND: "tensor", "dtype": str(value.dtype).removeprefix("torch."), "value": listed}


def _dict(value: dict[Any, Any], where: str) -> dict[str, Any]:
    if all(isinstance(key, str) for key in value) and _KIND not in value and not isinstance(value, Counter):
        return {key: to_json(item, where) for key, item in value.items()}
    pairs = [[to_json(key, where), to_json(item, where)] for key, item in value.items()]
    return {_KIND: "Counter" if isinstance(value, Counter) else "dict", "value": pairs}


def from_json(value: Any) -> Any:
    """What `to_json` was given. Raises ValueError or TypeError for what it never writes."""
    match value:
        case list():
            return [from_json(item) for item in value]
        case {"python": str(kind), "value": held}:
            return _marked(kind, held, value.get("dtype", ""))
        case dict():
            return {key: from_json(item) for key, item in value.items()}
    return value


def _marked(kind: str, held: Any, dtype: str) -> Any:
    match kind:
        case "float":
            return float(held)
        case "tuple":
            return tuple(from_json(item) for item in held)
        case "tensor":
            return torch.tensor(from_json(held), dtype=_dtype(dtype))
        case "dict" | "Counter":
            pairs = {from_json(key): from_json(item) for key, item in held}
            return Counter(pairs) if kind == "Counter" else pairs
    raise ValueError(f"{kind!r} is no kind of value")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensor")
    return found


def check_state(found: dict[str, Any], owner: Any) -> None:
    """Compare a scheduler's state in a checkpoint with that of a fresh one, the `owner`. Raises ValueError.

    A name that only the checkpoint has may be one that the scheduler sets later. It must not be that of a method, or
    of the optimiser, which `load_state_dict` would replace by it.
    """
    fresh, kind = owner.state_dict(), type(owner).__name__
    for name in found.keys() - fresh.keys():
        if hasattr(owner, name):
            raise ValueError(f"{kind} keeps no {name!r}: it would replace what {kind} needs")
    check_like({name: value for name, value in found.items() if name in fresh}, fresh, kind)


def check_like(found: Any, fresh: Any, where: str) -> None:
    """Compare a value of a checkpoint with the one of a fresh optimiser or scheduler: the same names, similar types.

    A fresh None may have become a number or a text, and a switch (a bool) may have been None, its default.
    Raises ValueError: a value of another type would be accepted and then fail in every step.
    """
    if isinstance(found, dict) and isinstance(fresh, dict) and all(isinstance(key, str) for key in fresh):
        if unknown := [key for key in found if key not in fresh]:
            raise ValueError(f"{where} has no {str(unknown[0])!r}")
        for key, value in found.items():
            check_like(value, fresh[key], f"{where}.{key}")
    elif _kind_of(found) != _kind_of(fresh) and not (
        (fresh is None and _kind_of(found) in ("number", "text")) or (found is None and isinstance(fresh, bool))
    ):
        raise ValueError(f"{where} is of type {type(found).__name__}, and here of type {type(fresh).__name__}")
    elif _kind_of(found) == "number" and not is_finite(found) and (fresh is None or is_finite(fresh)):
        said = found.item() if isinstance(found, Tensor) else found
        raise ValueError(f"{where} is {str(said)[:20]}, which is no number that a step can take")
    elif isinstance(found, list | tuple) and fresh:
        for index, value in enumerate(found):
            check_like(value, fresh[min(index, len(fresh) - 1)], f"{where}[{index}]")
    elif isinstance(found, dict) and fresh:
        for key, value in found.items():  # by number, such as milestones
            check_like(key, next(iter(fresh)), f"a key of {where}")
            check_like(value, next(iter(fresh.values())), f"{where}[{key}]")


def is_finite(number: Any) -> bool:
    """Whether a number, or a tensor of one element, is neither infinite nor NaN nor beyond all floats.

    >>> is_finite(3), is_finite(torch.tensor(0.5)), is_finite(float("nan")), is_finite(10**400)
    (True, True, False, False)
    """
    if isinstance(number, Tensor):
        return number.is_meta or bool(torch.isfinite(number).all())
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _kind_of(value: Any) -> str:
    """Numbers may be integers, floats, bools or tensors of one element; lists may be tuples."""
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
