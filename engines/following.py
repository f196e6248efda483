"""Has a rank's process import what the notebook would: its search path, and modules that it has reloaded."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from types import ModuleType

from engines.errors import PlanError
from engines.start import SAFE, standard_first

__all__ = ["Followed", "Version", "follow", "missing"]

Version = tuple[int, int]
"""Of a source file: when it was changed, in ns, and its length."""


@dataclass(frozen=True)
class Followed:
    """The notebook's `paths` for modules, all absolute, and the versions of modules that it has `reloaded`.

    The files of `changed` modules are not what the notebook has loaded any more.
    """

    paths: tuple[str, ...]
    reloaded: Mapping[str, Version] = field(default_factory=dict)
    changed: tuple[str, ...] = ()


class _Refuser(MetaPathFinder):
    """Asked first of all finders, it refuses to import what would not be the notebook's code."""

    changed: Collection[str] = ()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in self.changed and target is None:
            raise ImportError(
                f"the file of {name} has changed since the notebook imported it; reload it there "
                f"(importlib.reload({name})), and call again",
                name=name,
            )


_refuser = _Refuser()
_known: dict[str, Version] = {}
_paths: list[tuple[str, ...]] = []


def follow(told: Followed) -> None:
    """Raises PlanError where a module cannot be loaded again, with its name."""
    if _paths != [told.paths]:
        _paths[:] = [told.paths]
        sys.path[:] = standard_first(told.paths)
        importlib.invalidate_caches()
        if os.environ.get(SAFE) == "rank":  # set for the start alone, and not for the programs that users start
            del os.environ[SAFE]
    _refuser.changed = told.changed
    if told.changed and _refuser not in sys.meta_path:
        sys.meta_path.insert(0, _refuser)
    for name, version in told.reloaded.items():
        if name in sys.modules and _known.get(name) != version:
            _load_again(name)
        _known[name] = version


def _load_again(name: str) -> None:
    try:
        importlib.invalidate_caches()
        importlib.reload(sys.modules[name])
    except Exception as error:
        raise PlanError(
            f"The notebook has reloaded the module {name}, but ranks cannot: {type(error).__name__}: {error}. "
            "Restart them: cluster.restart()."
        ) from error


def missing(error: ImportError) -> PlanError:
    """What is said where ranks cannot import a module that they need for what they were sent."""
    why = str(error)
    return PlanError(
        f"The ranks cannot import {error.name or 'a module'}, which they need for what they were sent: {why}. They "
        "look where the notebook does (sys.path): is there a file of it, which all hosts see?"
    )
