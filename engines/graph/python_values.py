"""The Python values that a model and a loss read, which a trace has taken once: a later change is found, and refused.

These are numbers, texts, flags and tensors in the attributes of modules, and in the closures and globals that their
code names, also in lists and dicts; and the model's buffers, except those that training changes.
"""

from __future__ import annotations

import dis
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.outside_state import Place
from mpi4dl_nb.engines.graph.owners import iterate_attributes

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, np.generic)
_OWN_NAMES = {*vars(nn.Module()), "training"}
"""Attributes of each module that are not the user's. `training` may change for a prediction in between."""

_MOST_ITEMS = 100
_LIBRARIES = ("torch", "torchvision", "numpy", "mpi4dl_nb")


class TracedValues:
    """The values that a model and its loss had when they were traced.

    Attributes that forward itself sets are left out: a run of the plain model changes them. So are the places
    `kept_outside`, in which the model's code keeps something from run to run. `updated` are the model's buffers that
    training changes, by name.
    """

    def __init__(
        self, model: nn.Module, loss: object, updated: Collection[str] = (), kept_outside: Collection[Place] = ()
    ) -> None:
        self.warns_of_weights = True  # until the trained ones have been given, which a user may load into the model
        self._versions = [(name, weight, _mark(weight)) for name, weight in model.named_parameters()]
        changing = {id(buffer) for name, buffer in model.named_buffers() if name in updated}
        self._model_buffers = [
            (module._buffers, name, f"{path}.{name}".lstrip("."), buffer, _mark(buffer), buffer.detach().clone())
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta and id(buffer) not in changing
        ]
        self.checks_buffers = True  # of the loss, until the trained ones have been given
        self._buffers = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in (loss.modules() if isinstance(loss, nn.Module) else ())
            for name, buffer in module._buffers.items()
        ]
        self._weights: list[tuple[str, Tensor, bool]] = []
        self._attributes: list[tuple[dict[str, Any], str, Any, str]] = []
        self._reads: list[_Read] = []
        for what, owner in (("model", model), ("loss", loss)):
            seen: set[int] = set()
            for module in owner.modules() if isinstance(owner, nn.Module) else ():
                self._reads += _read_function(type(module).forward, what, seen)
            if isinstance(owner, nn.Module):
                for module, name, value, path in iterate_plain_attributes(owner):
                    self._attributes.append((vars(module), name, value, f"{path} of the {what}"))
                self._reads += _read_containers(owner, what, seen)
                self._weights += [(f"{name} of the {what}", w, w.requires_grad) for name, w in owner.named_parameters()]
            else:
                self._reads += _read_function(owner, what, seen)
        kept = {(id(holder), key) for holder, key in kept_outside}
        self._reads = [read for read in self._reads if kept.isdisjoint(read.places)]

    def check(self) -> None:
        """Raise PlanError if a value is another than when it was traced; warn once of changed weights."""
        for holder, key, value, name in self._attributes:  # thousands, in each step
            if (now := holder.get(key)) is not value and (isinstance(now, Tensor) or now != value):
                raise _make_error(name, f" from {value!r} to {now!r}")
        for read in self._reads:
            if (changed := read.describe_change()) is not None:
                raise _make_error(read.name, changed)
        for name, weight, trained in self._weights:
            if weight.requires_grad != trained:
                raise _make_error(f"requires_grad of {name}", f" from {trained} to {weight.requires_grad}")
        self._check_model_buffers()
        for holder, name, buffer, values in self._buffers if self.checks_buffers else ():
            now = holder.get(name)
            same = now is buffer and (now is None or (not now.is_inference() and now._version == 0))
            if not same and (now is None or values is None or not torch.equal(now, values)):
                raise _make_error(f"{name} of the loss", "")
        changes = (name for name, weight, mark in self._versions if not _is_unwritten(weight, mark))
        if self.warns_of_weights and (changed := next(changes, "")):
            self.warns_of_weights = False
            warnings.warn(
                f"{changed} of the model has changed since this Training was made. Ranks go on with the weights that "
                "they have: make a new Training to start from others.",
                stacklevel=4,
            )

    def _check_model_buffers(self) -> None:
        for holder, key, name, buffer, mark, values in self._model_buffers:
            now = holder.get(key)
            if now is buffer and _is_unwritten(buffer, mark):
                continue
            # Values that stay are no change: a state_dict that is loaded writes to all tensors. The trained one, which
            # has been given then, is that of the ranks, in their precision.
            present = None if now is None else now.detach().to(values)
            kept = present is not None and (
                torch.equal(present, values)
                or (not self.warns_of_weights and torch.equal(present.to(torch.float32), values.to(torch.float32)))
            )
            if not kept:
                raise _make_error(f"{name} of the model", "")


def iterate_plain_attributes(owner: nn.Module) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """Yield, as `iterate_attributes`, the plain attributes of all modules, except those that forward sets."""
    for module, name, value, path in iterate_attributes(owner):
        kind: type = type(module)
        if name not in _OWN_NAMES and name not in _find_stored(kind) and _is_plain(value):
            yield module, name, value, path


def _read_containers(owner: nn.Module, what: str, seen: set[int]) -> Iterator[_Read]:
    """Yield the tensors of a module's attributes, and the present items of its lists and dicts.

    Those that forward sets or writes to are left out, as in `iterate_plain_attributes`.
    """
    for module, name, value, path in iterate_attributes(owner):
        kind: type = type(module)
        # A hook before forward may set it in each run, as that of torch.nn.utils.spectral_norm sets the weight.
        if name in _OWN_NAMES or _is_plain(value) or (isinstance(value, Tensor) and module._forward_pre_hooks):
            continue
        if name not in _find_stored(kind) | _find_filled(kind):
            yield from _read_value(vars(module), name, value, path, what, seen)


class _Read:
    """A value by its place: `place[key]`; a closure's cell has no key, and the place of an item is itself a `_Read`."""

    __slots__ = ("key", "mark", "name", "place", "value")

    def __init__(self, place: Any, key: Any, value: Any, name: str) -> None:
        self.place, self.key, self.value, self.name = place, key, value, name
        self.mark = _mark(value) if isinstance(value, Tensor) else 0

    @property
    def places(self) -> set[tuple[int, Any]]:
        """The place of the value and, of an item, also that of its list or dict, each by its id and key."""
        if isinstance(self.place, _Read):
            return {(id(self.place.value), self.key), (id(self.place.value), None)} | self.place.places
        return {(id(self.place), self.key)}

    def get(self) -> Any:
        """Return what stands at the place now: for an item, also where another list or dict stands there."""
        holder = self.place.get() if isinstance(self.place, _Read) else self.place
        return holder.cell_contents if isinstance(holder, CellType) else holder[self.key]

    def describe_change(self) -> str | None:
        """Return how the value has changed, None if it has not."""
        try:
            now = self.get()
        except (ValueError, LookupError, TypeError):
            return ""
        if isinstance(self.value, Tensor):
            return None if _is_unwritten(self.value, self.mark) and _is_same(now, self.value) else ""
        if now is self.value:
            return None
        if isinstance(now, Tensor):
            return ""
        return None if now == self.value else f" from {self.value!r} to {now!r}"


def _mark(tensor: Tensor) -> int | Tensor:
    """Return what tells whether a tensor is written to later: its number of writes, or a copy where none is counted."""
    return tensor.detach().clone() if tensor.is_inference() else tensor._version


def _is_unwritten(tensor: Tensor, mark: int | Tensor) -> bool:
    return torch.equal(tensor, mark) if isinstance(mark, Tensor) else tensor._version == mark


_get_kind = attrgetter("dtype", "device", "layout", "requires_grad")


def _is_same(now: object, then: Tensor) -> bool:
    """Return whether a value is a tensor, or an equal one in its place, such as one that a hook of forward sets."""
    if now is then or not isinstance(now, Tensor):
        return now is then
    return _get_kind(now) == _get_kind(then) and not then.is_meta and torch.equal(now, then)


def _make_error(name: str, change: str) -> PlanError:
    return PlanError(
        f"{name} has changed{change} since this Training was made. Ranks do not see this: they run what was traced "
        "then. Make a new Training to continue with it, or set it back."
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _read_value(place: Any, key: Any, value: Any, name: str, what: str, seen: set[int]) -> Iterator[_Read]:
    """Yield the values that one of a function's values stands for: itself, or its items, or what it reads."""
    if _is_plain(value) or isinstance(value, Tensor):
        yield _Read(place, key, value, f"{name} in the code of the {what}")
    elif isinstance(value, list | dict):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        if len(items) <= _MOST_ITEMS and all(_is_plain(item) for _, item in items):
            held = _Read(place, key, value, name)
            yield from (_Read(held, at, item, f"{name}[{at!r}] in the code of the {what}") for at, item in items)
    elif isinstance(value, FunctionType | MethodType | partial):
        yield from _read_function(value, what, seen)


def _read_function(function: Any, what: str, seen: set[int]) -> Iterator[_Read]:
    """Yield the values that a function reads: closures, globals, bound arguments, attributes of a callable object."""
    if id(function) in seen or isinstance(function, nn.Module | type):
        return
    seen.add(id(function))
    if isinstance(function, FunctionType):
        yield from _read_code(function, what, seen)
    elif isinstance(function, partial):
        for holder in (function.args, function.keywords):
            for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
                yield from _read_value(holder, key, value, f"argument {key}", what, seen)
        yield from _read_function(function.func, what, seen)
    else:
        owner = function.__self__ if isinstance(function, MethodType) else function
        held = {} if isinstance(owner, nn.Module) else getattr(owner, "__dict__", {})
        for name, value in list(held.items()):
            yield from _read_value(held, name, value, name, what, seen)
        method = getattr(function, "__func__", None) or type(function).__call__
        if isinstance(method, FunctionType):
            yield from _read_function(method, what, seen)


def _read_code(function: FunctionType, what: str, seen: set[int]) -> Iterator[_Read]:
    if (function.__module__ or "").split(".")[0] in _LIBRARIES:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            yield from _read_value(cell, None, cell.cell_contents, name, what, seen)
    held = function.__globals__
    for name in _find_globals(function.__code__):
        if name in held:
            yield from _read_value(held, name, held[name], name, what, seen)


_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_CHANGING = ("insert", "pop", "popitem", "clear", "update", "setdefault", "sort", "reverse", "remove")


@cache
def _find_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that some code reads, that of functions within it too."""
    here = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    within = (_find_globals(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    return tuple(dict.fromkeys(chain(here, *within)))


def _iterate_instructions(cls: type) -> Iterator[list[dis.Instruction]]:
    """Yield the instructions of forward, and of each method whose name it, or such a method, reads."""
    methods = ["forward"]
    for method in methods:  # grows meanwhile
        code = getattr(getattr(cls, method, None), "__code__", None)
        instructions = list(dis.get_instructions(code)) if code else []
        for instruction in instructions:
            if instruction.opname in _LOADS and instruction.argval not in methods:
                methods.append(instruction.argval)
        yield instructions


@cache
def _find_stored(cls: type) -> frozenset[str]:
    """Return the attributes that forward, or a method that it calls, sets."""
    return frozenset(step.argval for code in _iterate_instructions(cls) for step in code if step.opname == "STORE_ATTR")


@cache
def _find_filled(cls: type) -> frozenset[str]:
    """Return the attributes in lines of forward, or of a method that it calls, that write an item or in place."""
    attributes: set[str] = set()
    for code in _iterate_instructions(cls):
        placed = [(step, step.positions.lineno) for step in code if step.positions]
        writing = {line for step, line in placed if _is_write(step)}
        attributes |= {step.argval for step, line in placed if step.opname in _LOADS and line in writing}
    return frozenset(attributes)


def _is_write(step: dis.Instruction) -> bool:
    if step.opname not in _LOADS:
        return step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
    called = str(step.argval)
    return called in _CHANGING or (called.endswith("_") and not called.endswith("__"))
