"""The engines' old name: before version 0.1 `mpi4dl_nb.engines` was installed as a package `engines` of its own.

Pickles of that time still load once this package is imported, and a command still takes `engines.models:UNet`. Whoever
has another package of this name gets that one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_OLD, _NEW = "engines", "mpi4dl_nb.engines"
_FILE = Path(__file__).with_name("engines") / "__init__.py"


class _OldNames(MetaPathFinder, Loader):
    """Gives the modules of `mpi4dl_nb.engines` their old names too: the same modules, not copies."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _OLD:
            return None if self._is_foreign() else ModuleSpec(name, self, is_package=True)
        if name.startswith(f"{_OLD}.") and sys.modules.get(_OLD) is sys.modules.get(_NEW):
            return ModuleSpec(name, self)
        return None

    def _is_foreign(self) -> bool:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(_OLD, None)):
                # In a repository, the folder itself is found by this name.
                return spec.origin is None or Path(spec.origin).resolve() != _FILE.resolve()
        return False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.replace(_OLD, _NEW, 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module, which has run under its new name, its own specification again: Python has replaced it."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _OldNames())
