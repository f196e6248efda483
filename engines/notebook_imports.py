"""Has a rank's process import what the notebook would: its search path, and modules that it has reloaded."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from types import ModuleType

from engines.errors import PlanError
from engines.start import SAFE, order_search_path

__all__ = ["NotebookImports", "SourceVersion", "make_import_error", "sync_imports"]

SourceVersion = tuple[int, int]
"""Of a source file: when it was changed, in ns, and its length."""


@dataclass(frozen=True)
class NotebookImports:
    """The notebook's `paths` for modules, all absolute, and the versions of modules that it has `reloaded`.

    The files of `changed` modules are not what the notebook has loaded any more.
    """

    paths: tuple[str, ...]
    reloaded: Mapping[str, SourceVersion] = field(default_factory=dict)
    changed: tuple[str, ...] = ()


_CHANGED = (
    "the file of {0} has changed since the notebook imported it; reload it there (importlib.reload({0})), "
    "and call again"
)


class _ImportBlocker(MetaPathFinder):
    """Asked first of all finders, it refuses to import what would not be the notebook's code: by name, why."""

    def __init__(self) -> None:
        self.changed: Mapping[str, str] = {}
        self.failed: dict[str, str] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        why = self.failed.get(name) or self.changed.get(name)
        if why and target is None:  # else it is loaded again, on purpose
            raise ImportError(why, name=name)


_refuser = _ImportBlocker()
_known: dict[str, SourceVersion] = {}
_paths: list[tuple[str, ...]] = []


def sync_imports(told: NotebookImports) -> None:
    """From now on what was told last holds. A module that cannot be loaded again is refused to whoever needs it."""
    if _paths != [told.paths]:
        _paths[:] = [told.paths]
        sys.path[:] = order_search_path(told.paths)
        importlib.invalidate_caches()
        if os.environ.get(SAFE) == "rank":  # set for the start alone, and not for the programs that users start
            del os.environ[SAFE]
    if _refuser not in sys.meta_path:
        sys.meta_path.insert(0, _refuser)
    _refuser.changed = {name: _CHANGED.format(name) for name in told.changed}
    for name, version in told.reloaded.items():
        if name in sys.modules and _known.get(name) != version:
            _reload_module(name)
        elif _known.get(name) != version:
            _refuser.failed.pop(name, None)
        _known[name] = version


def _reload_module(name: str) -> None:
    try:
        importlib.invalidate_caches()
        importlib.reload(sys.modules[name])
    except Exception as error:
        del sys.modules[name]
        _refuser.failed[name] = f"the notebook has reloaded {name}, but ranks cannot: {type(error).__name__}: {error}"


def make_import_error(error: ImportError) -> PlanError:
    """What is said where ranks cannot import a module that they need for what they were sent."""
    why = str(error)
    return PlanError(
        f"The ranks cannot import {error.name or 'a module'}, which they need for what they were sent: {why}. They "
        "look where the notebook does (sys.path): is there a file of it, which all hosts see?"
    )
