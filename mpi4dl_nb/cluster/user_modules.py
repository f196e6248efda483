"""The user's modules: which of them ranks can import by name, and which must be sent by value.

A rank imports a module's file in its state at the first import, and keeps that module. The notebook may have loaded the
file before it changed, reloaded it since (`importlib.reload`, `%autoreload`), or set one of its constants. If the two
can differ, the functions and classes of the module are sent by value.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from struct import error as StructError
from struct import unpack
from types import FunctionType, ModuleType
from typing import Any

import psutil

from mpi4dl_nb.cluster.module_constants import parse_constants
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.server.notebook_imports import NotebookImports, SourceVersion, pack

_OURS = "mpi4dl_nb"
_HASHED, _MOST = 1, 0xFFFFFFFF  # of .pyc files: the flag of those without a time; fields have 32 bits
_ANOTHER: SourceVersion = (0, 0)  # differs from the version of every file


@dataclass
class _UserModule:
    """A user's module as the notebook holds it. `spec` is a different object after a reload.

    `version` identifies the source that the module was loaded from (None: unknown). `current`: the file has not changed
    since. `constants` are the values that the file assigns to names exactly once, at top level; the notebook may have
    set them since.
    """

    module: ModuleType
    spec: object
    file: str
    version: SourceVersion | None
    current: bool
    constants: Mapping[str, object]
    reloaded: bool = False

    @classmethod
    def of(cls, module: ModuleType, file: str, reloaded: bool = False) -> _UserModule:
        version = _find_loaded_version(file, reloaded)
        current = version not in (None, _ANOTHER)
        return cls(module, module.__spec__, file, version, current, parse_constants(file) if current else {}, reloaded)

    @property
    def is_as_its_file(self) -> bool:
        """Whether ranks that import the file get the same as the notebook has."""
        now = vars(self.module)
        with suppress(Exception):  # arrays within lists have no truth value
            same = (type(now.get(name)) is type(value) and now[name] == value for name, value in self.constants.items())
            return self.current and all(same)
        return False


# A module of the user, and how ranks get its functions:
#
#     its file is as the notebook has loaded it      by name: ranks import the file
#     reloaded since (importlib, %autoreload)        by name, unless the ranks have imported an older version
#     its file has changed, but it was not reloaded  by value: ranks would import newer code
#     one of its constants was set                   by value
#     it uses a module that is sent by value         by value: its imported copy would use the rank's own version


class UserModules:
    """Pickles the calls for one group of ranks, and holds what the ranks must `follow`, as of the last `pack`.

    `_sent` holds the versions of the modules that these ranks may have imported.
    """

    def __init__(self) -> None:
        self._known: dict[str, _UserModule] = {}
        self._checked: set[str] = set()
        self._sent: dict[str, SourceVersion | None] = {}
        self._reported: set[str] = set()
        self._refresh()
        self.follow = self._collect_imports()

    def _collect_imports(self) -> NotebookImports:
        """Return what ranks must apply to match the notebook: search path, reloads, changed files."""
        reloaded = {
            name: known.version
            for name, known in self._known.items()
            if known.reloaded and known.version not in (None, _ANOTHER) and name in sys.modules
        }
        changed = tuple(name for name, known in self._known.items() if known.version is not None and not known.current)
        paths = []
        for path in sys.path:
            with suppress(FileNotFoundError):  # "" where the working folder was deleted: nothing is there
                paths.append(os.path.abspath(path))  # noqa: PTH100 (keeps links)
        return NotebookImports(tuple(paths), reloaded, changed)

    def pack(self, values: Iterable[Any]) -> list[bytes]:
        """Pickle the values. Raises PlanError, with the name, if a module must be sent by value and cannot be."""
        self._refresh()
        by_value = self._find_by_value()
        used: set[str] = set()
        try:
            packed = [pack(value, by_value, used) for value in values]
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            if not by_value & used:
                raise
            names = ", ".join(sorted(by_value & used))
            raise PlanError(
                f"Ranks would not have the same code as the notebook in {names} (a file has changed since, or a "
                f"constant), and it cannot be sent as it is: {error}. Reload what has changed, and restart the ranks: "
                "cluster.restart()."
            ) from error
        for name in sorted((used & by_value) - self._reported):
            self._reported.add(name)
            print(
                f"The module {name}, or one that it uses, is not the one that the ranks have or would import: they "
                "are sent its functions and classes as this notebook has them.",
                file=sys.stderr,
                flush=True,
            )
        # Ranks keep what they import now, these modules and all that those use. If the notebook reloads one of them
        # later, it differs from theirs.
        imported = new = used & self._known.keys() - by_value
        while new:
            new = {dependency for name in new for dependency in self._find_used(name)} - imported
            imported |= new
        for name in imported:
            self._sent.setdefault(name, self._known[name].version)
        self.follow = self._collect_imports()
        return packed

    def _refresh(self) -> None:
        """Record new modules, and update those that were reloaded or whose files have changed."""
        new = sys.modules.keys() - self._checked
        self._checked |= new
        for name in new:
            module = sys.modules.get(name)
            if module is not None and (file := find_user_file(name, module)):
                self._known[name] = _UserModule.of(module, file)
        for name, known in self._known.items():
            module, version = sys.modules.get(name, known.module), _get_version(known.file)
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec is not known.spec:  # both compare equal
                self._known[name] = _UserModule.of(module, spec.origin, reloaded=True)
            elif version != known.version and version is not None and _find_autoreload_ns(name) == version[0]:
                known.version, known.reloaded, known.constants = version, True, {}
            else:
                known.current = known.version is not None and known.version == version

    def _find_by_value(self) -> set[str]:
        """Return the modules that differ, or may differ, and those that use them."""
        by_value = {
            name
            for name, known in self._known.items()
            if name in sys.modules
            and (
                not known.is_as_its_file
                or self._sent.get(name, known.version) != known.version
                or name.partition(".")[0] in sys.stdlib_module_names  # shadowed by the standard library
            )
        }
        # A module that holds a function of a changed module must be sent too: imported on a rank, it would refer to the
        # rank's own version. Repeat until no module is added.
        while more := {
            name for name in self._known.keys() - by_value if name in sys.modules and by_value & self._find_used(name)
        }:
            by_value |= more
        return by_value

    def _find_used(self, name: str) -> set[str]:
        """Return the modules in which the values of a module are defined."""
        modules = set()
        for value in list(vars(self._known[name].module).values()):
            value = value.func if isinstance(value, partial) else value
            if isinstance(value, ModuleType):
                modules.add(value.__name__)
            else:
                modules.add(value.__module__ if isinstance(value, FunctionType | type) else type(value).__module__)
        return self._known.keys() & modules


def find_user_file(name: str, module: object) -> str:
    """Return the file that a user's module was loaded from; empty for modules of Python, packages, and ours."""
    spec: Any = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if not isinstance(module, ModuleType) or not isinstance(origin, str) or not origin.endswith(".py"):
        return ""
    is_ours = spec.name.partition(".")[0] == _OURS  # whatever its name here: a module of ours may have an old one too
    return "" if name == "__main__" or is_ours or origin.startswith(_get_install_folders()) else origin


@cache
def _get_install_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {site.getusersitepackages(), *site.getsitepackages()}
    # A .pth file may have added the folders of another environment.
    folders |= {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    return tuple(folder + os.sep for folder in folders)


def _get_version(file: str) -> SourceVersion | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _find_loaded_version(file: str, reloaded: bool) -> SourceVersion | None:
    """Return the version of the file that a module was loaded from; None if the file may have changed since.

    Without a compiled file to compare with, a file older than this process is taken to be unchanged, and so is a module
    that was reloaded since the last check.
    """
    version, compiled = _get_version(file), _read_compiled_version(file)
    if version is None:
        return None
    if compiled is None:
        return version if reloaded or version[0] < psutil.Process().create_time() * 1e9 else None
    return version if compiled == (version[0] // 10**9 & _MOST, version[1] & _MOST) else _ANOTHER


def _read_compiled_version(file: str) -> SourceVersion | None:
    """Return the (mtime in s, size) of the source of Python's compiled file; None if there is none that holds them."""
    if sys.dont_write_bytecode:
        return None
    # The head of a .pyc file (PEP 552), little-endian:
    #
    #     magic number | flags | mtime of the source | size of the source      4 bytes each
    try:
        with Path(importlib.util.cache_from_source(file)).open("rb") as compiled:
            _, flags, changed_s, length = unpack("<4sIII", compiled.read(16))
    except (OSError, StructError, NotImplementedError):
        return None
    return None if flags & _HASHED else (changed_s, length)


def _find_autoreload_ns(name: str) -> int | None:
    """Return the mtime, in ns, of the file that IPython's %autoreload last loaded into a module; None if it has not."""
    if "IPython.extensions.autoreload" not in sys.modules or (shell := sys.modules["IPython"].get_ipython()) is None:
        return None
    reloader: Any = getattr(shell.magics_manager.registry.get("AutoreloadMagics"), "_reloader", None)
    if not getattr(reloader, "enabled", False):
        return None
    file, changed_s = reloader.filename_and_mtime(sys.modules.get(name))
    if file is None or reloader.modules_mtimes.get(name) != changed_s or reloader.failed.get(file) == changed_s:
        return None
    return os.stat(file).st_mtime_ns  # noqa: PTH116 (as autoreload does)
