"""Pickling of the notebook's functions and classes for ranks, and imports that follow the notebook's."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from threading import RLock
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.start import SAFE, order_search_path
from mpi4dl_nb.engines.errors import PlanError

# Pickling for ranks: functions and classes by name if ranks can import them, otherwise by value.

_registry = RLock()  # cloudpickle's list of modules is shared by all threads


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, modules: set[str]) -> None:
        super().__init__(file)
        self.modules = modules

    def reducer_override(self, obj: Any) -> Any:
        # Pickling a view would send the storage of its whole image to every rank: send a copy of the tile.
        if (
            type(obj) is Tensor
            and not obj.requires_grad
            and obj.layout is torch.strided
            and obj.untyped_storage().nbytes() > obj.nbytes
        ):
            return obj.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        # cloudpickle 3.1.3 leaves out the file, by which a traceback finds the lines of a cell.
        if isinstance(obj, CodeType):
            return _make_code, (obj.co_filename, self.dispatch_table[CodeType](obj)[1])
        # By these names the sender knows which modules ranks will import.
        if isinstance(obj, FunctionType | type):
            self.modules.add(obj.__module__)
        elif isinstance(obj, ModuleType):
            self.modules.add(obj.__name__)
        return super().reducer_override(obj)


def _make_code(file: str, arguments: Sequence[Any]) -> CodeType:
    return CodeType(*arguments).replace(co_filename=file)


def pack(value: Any, by_value: Collection[str] = (), modules: set[str] | None = None) -> bytes:
    """Pickle a value, by value for functions and classes of notebook cells and of the modules `by_value`.

    The names of modules in the value, and of the modules of its functions and classes, are added to `modules`.
    """
    with io.BytesIO() as file, _pickle_by_value(by_value):
        _Pickler(file, set() if modules is None else modules).dump(value)
        return file.getvalue()


@contextmanager
def _pickle_by_value(by_value: Collection[str]) -> Iterator[None]:
    """Within the context, cloudpickle sends the contents of these modules instead of their names."""
    if not by_value:
        yield
        return
    with _registry:
        # A module that the user has registered already stays registered afterwards.
        named = {module.__name__: module for module in map(sys.modules.__getitem__, by_value)}  # some have two names
        mine = [named[name] for name in named.keys() - cloudpickle.list_registry_pickle_by_value()]
        for module in mine:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in mine:
                cloudpickle.unregister_pickle_by_value(module)


# Synchronises imports of a rank's process with the notebook's: the search path, and modules that it has reloaded.


SourceVersion = tuple[int, int]
"""Of a source file: its modification time in ns, and its length."""


@dataclass(frozen=True)
class NotebookImports:
    """The notebook's search `paths`, all absolute, and the source versions of the modules that it has `reloaded`.

    `changed` are modules whose files differ from what the notebook has loaded.
    """

    paths: tuple[str, ...]
    reloaded: Mapping[str, SourceVersion] = field(default_factory=dict)
    changed: tuple[str, ...] = ()


class _ImportBlocker(MetaPathFinder):
    """The first finder on `sys.meta_path`, which blocks imports of code that differs from the notebook's.

    It maps the names of blocked modules to the reasons.
    """

    def __init__(self) -> None:
        self.changed: Mapping[str, str] = {}
        self.failed: dict[str, str] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        why = self.failed.get(name) or self.changed.get(name)
        if why and target is None:  # with a target this is an intended `importlib.reload`
            raise ImportError(why, name=name)


_refuser = _ImportBlocker()
_known: dict[str, SourceVersion] = {}
_paths: list[tuple[str, ...]] = []


def sync_imports(imports: NotebookImports) -> None:
    """Apply the notebook's latest imports. A module whose reload fails is blocked for code that imports it."""
    # The search path is set only when it changes: `invalidate_caches` makes the next imports read all folders again.
    if _paths != [imports.paths]:
        _paths[:] = [imports.paths]
        sys.path[:] = order_search_path(imports.paths)
        importlib.invalidate_caches()
        if os.environ.get(SAFE) == "rank":  # needed at start only: programs that users start must not inherit it
            del os.environ[SAFE]
    # First on the path, so that no other finder loads the module before it is refused.
    if _refuser not in sys.meta_path:
        sys.meta_path.insert(0, _refuser)
    _refuser.changed = {
        name: f"the file of {name} has changed since the notebook imported it; reload it there "
        f"(importlib.reload({name})), and call again"
        for name in imports.changed
    }
    for name, version in imports.reloaded.items():
        if _known.get(name) != version and name not in sys.modules:
            _refuser.failed.pop(name, None)
        elif _known.get(name) != version:
            try:
                importlib.invalidate_caches()
                importlib.reload(sys.modules[name])
            except Exception as error:
                # The half-executed module must not be used: the next import is refused with the reason, until the
                # notebook reloads a version that works.
                del sys.modules[name]
                why = f"{type(error).__name__}: {error}"
                _refuser.failed[name] = f"the notebook has reloaded {name}, but ranks cannot: {why}"
        _known[name] = version


def make_import_error(error: ImportError) -> PlanError:
    """Make the error for a module that ranks need for what they received, but cannot import."""
    return PlanError(
        f"The ranks cannot import {error.name or 'a module'}, which they need for what they were sent: {error}. They "
        "look where the notebook does (sys.path): is there a file of it, which all hosts see?"
    )
