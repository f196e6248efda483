"""Python state outside of a traced model: what a trace changes there is put back, so that no tensor of it stays.

A trace runs the model's code on tensors without memory. Libraries keep tensors between two runs: in a
`functools.lru_cache`, in a dict or list of a module, in a class, a global, a closure, or an object that all models
share. The model itself is copied before it runs; these are not.

    _POSITIONS = {}                                      # reached by its name in the code of forward

    def forward(self, x):
        if x.shape not in _POSITIONS:
            _POSITIONS[x.shape] = torch.arange(...)      # in a trace: a tensor without memory, for all later runs
"""

from __future__ import annotations

import builtins
import functools
import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "mpi4dl_nb", "mpi4py"} - {"__main__"}
"""Packages whose code keeps no tensors of a model."""

_KEEPERS = {"torch", "_thread", "threading", "collections", "weakref", "types"}
"""Of these, the packages whose objects may keep what is put into them."""

_LEAVES: tuple[type, ...] = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, range, slice)
_LEAVES += (torch.dtype, torch.device, torch.Size, BuiltinFunctionType, CodeType, torch.UntypedStorage, torch.Generator)

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST_ITEMS, _MOST_OBJECTS, _DEPTH = 10_000, 12_000, 6
_ABSENT = object()

Place = tuple[Any, Any]
"""A dict, a class, a list, a set or the cell of a closure, and the key or attribute in it; None if it has no keys."""


class OutsideState:
    """The state that the code of a model or loss can reach by names, attributes and closures, as it is now.

    `restore` puts it back, and `restored` are the places where it did.
    """

    def __init__(self, *owners: object) -> None:
        self.restored: list[Place] = []
        self._seen: dict[int, Any] = {}  # holds the objects, so that no other one gets their ids
        self._dicts: list[tuple[Any, Mapping[Any, Any]]] = []  # a dict, or a class by its attributes
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._lists: list[tuple[Any, list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._caches: dict[Any, int] = {}  # the misses of each lru_cache
        # A method counts as called if its name stands in some code that is reached.
        self._names = {"forward"}
        self._methods: dict[str, list[Any]] = {}
        self._waiting: deque[Any] = deque(owners)
        # The nearest first: a large library leads from anything to everything.
        while self._waiting and len(self._seen) < _MOST_OBJECTS:
            with suppress(Exception):  # an object may do anything when it is looked at
                self._visit(self._waiting.popleft())

    def restore(self) -> None:
        """Put everything back if a tensor was stored; if not, leave it, such as a counter, as it is now."""
        for cache, misses in self._caches.items():
            if cache.cache_info().misses != misses and holds_tensor(gc.get_referents(cache)):
                cache.cache_clear()
                self._caches[cache] = 0  # the next run begins to count anew
        changes = list(self._find_changes())
        if not any(holds_tensor(now) for _, _, _, now in changes):
            return
        for holder, key, before, now in changes:
            if not isinstance(now, ModuleType):  # an import within forward is not made again
                with suppress(Exception):  # a place that takes no assignment has not been changed by one
                    _put_back(holder, key, before)
                    self.restored.append((holder, key))

    def _find_changes(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield (holder, key, value before, value now) of all places with another value."""
        for holder, before in self._dicts:
            now = dict(vars(holder)) if isinstance(holder, type) else holder
            if len(now) != len(before) or not all(map(is_, dict.values(now), before.values())):
                yield from _compare(holder, before, now, [*before, *(key for key in list(now) if key not in before)])
        for namespace, before in self._globals.values():
            yield from _compare(namespace, before, namespace, before)
        for holder, items in self._lists:
            if len(holder) != len(items) or not all(map(is_, holder, items)):
                yield holder, None, items, list(holder)
        for cell, before in self._cells:
            if (now := _read_cell(cell)) is not before:
                yield cell, None, before, now

    # ---- the walk

    def _visit(self, value: Any) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, dict):
            # Not by the methods of a subclass, which may make what is asked for.
            items = dict(zip(dict.keys(value), dict.values(value), strict=True))
            self._visit_items(self._dicts, value, items, items.values())
        elif isinstance(value, list | set | deque):
            self._visit_items(self._lists, value, list(value), value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches[value] = value.cache_info().misses
            self._waiting.append(value.__wrapped__)
        elif (inner := _unwrap(value)) is not None:
            self._waiting += inner
        elif not isinstance(value, ModuleType):  # the names in a module are looked up by the code that reads them
            self._visit_object(value)

    def _visit_items(self, known: list[Any], holder: Any, copy: Any, items: Iterable[Any]) -> None:
        if len(holder) <= _MOST_ITEMS:
            known.append((holder, copy))
            self._waiting += items

    def _visit_object(self, value: Any) -> None:
        kind: Any = type(value)
        root = kind.__module__.partition(".")[0]
        if root in _LIBRARIES - _KEEPERS and not isinstance(value, torch.nn.Module):
            return
        with suppress(AttributeError):  # not by vars, for which an object may have a __getattr__
            self._waiting.append(kind.__getattribute__(value, "__dict__"))
        if not isinstance(value, Tensor):
            self._waiting.append(kind)

    def _visit_class(self, cls: type) -> None:
        if _is_library(cls.__module__):
            return
        held = dict(vars(cls))
        self._dicts.append((cls, held))
        self._waiting += cls.__bases__
        for name, attribute in held.items():
            if isinstance(attribute, FunctionType) and name not in self._names and not name.startswith("__"):
                self._methods.setdefault(name, []).append(attribute)
            else:
                self._waiting.append(attribute)

    def _visit_function(self, function: FunctionType) -> None:
        if _is_library(function.__module__):
            return
        for cell in function.__closure__ or ():
            self._cells.append((cell, _read_cell(cell)))
            self._waiting.append(_read_cell(cell))
        self._waiting += [vars(function), function.__defaults__, function.__kwdefaults__]
        names, space = _find_names(function.__code__), function.__globals__
        for name in names - self._names:
            self._waiting += self._methods.pop(name, ())
        self._names |= names
        self._read_names(space, names)
        # A name may also be that of a module that is imported within the function.
        package = str(space.get("__package__") or "")
        for name in names:
            for module in (sys.modules.get(name), sys.modules.get(f"{package}.{name}")):
                if isinstance(module, ModuleType) and not _is_library(module.__name__):
                    self._read_names(vars(module), names)

    def _read_names(self, space: dict[str, Any], names: frozenset[str]) -> None:
        """Note the values of the names in the namespace of a module, and visit them."""
        before = self._globals.setdefault(id(space), (space, {}))[1]
        for name in names:
            # A name that is nowhere yet may become a global of this module.
            if name in before or (name not in space and name in vars(builtins)):
                continue
            before[name] = value = space.get(name, _ABSENT)
            if not isinstance(value, ModuleType):
                self._waiting.append(value)
            elif not _is_library(value.__name__):
                self._read_names(vars(value), names)


def _unwrap(value: Any) -> list[Any] | None:
    """Return what a tuple, a bound or partial function, or a property holds, which itself does not change."""
    if isinstance(value, tuple):
        return [*value[:_MOST_ITEMS]]
    if isinstance(value, MethodType | staticmethod | classmethod):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, property):
        return [value.fget]
    return [value.func] if isinstance(value, functools.cached_property) else None


def _is_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


@functools.cache
def _find_names(code: CodeType) -> frozenset[str]:
    """Return all names in some code: globals, attributes, and modules that it imports; and those of code within it."""
    within = (_find_names(inner) for inner in code.co_consts if isinstance(inner, CodeType))
    return frozenset(code.co_names).union(*within)


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _ABSENT


def _compare(holder: Any, before: Mapping[Any, Any], now: dict[Any, Any], keys: Iterable[Any]) -> Iterator[Any]:
    for key in keys:
        was, present = before.get(key, _ABSENT), dict.get(now, key, _ABSENT)
        if was is not present:
            yield holder, key, was, present


def _put_back(holder: Any, key: Any, before: Any) -> None:
    if isinstance(holder, CellType | type):
        name = "cell_contents" if isinstance(holder, CellType) else key
        delattr(holder, name) if before is _ABSENT else setattr(holder, name, before)
    elif isinstance(holder, dict):
        if before is _ABSENT:
            holder.pop(key, None)
        else:
            holder[key] = before
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(before)


def holds_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or a container or an object with one, a few levels deep."""
    level, seen = [value], set[int]()
    for _ in range(_DEPTH):
        if any(isinstance(referent, (Tensor, *_SYMBOLS)) for referent in level):
            return True
        level = [referent for referent in level if not isinstance(referent, (*_LEAVES, type, ModuleType, FunctionType))]
        level = [referent for referent in level if id(referent) not in seen]
        seen.update(map(id, level))
        level = gc.get_referents(*level)
    return any(isinstance(referent, (Tensor, *_SYMBOLS)) for referent in level)


_CURRENT: ContextVar[OutsideState | None] = ContextVar("_CURRENT", default=None)


@contextmanager
def restore_outside_state(*owners: object) -> Iterator[OutsideState]:
    """Within the context, the code of a model or loss may run on tensors without memory; at its end no place has one.

    A context within another one, for the same model, restores the state that the outer one has found.
    """
    state = _CURRENT.get() or OutsideState(*owners)
    token = _CURRENT.set(state)
    try:
        yield state
    finally:
        _CURRENT.reset(token)
        state.restore()
