"""Run a module as the program of a rank: `python -P .../engines/comm/start.py MODULE ARGUMENTS`.

`python -m MODULE` searches the working folder first, where a file may be called `random.py`, or a folder `engines`.
Here the search path is the standard library, then the working folder and the folder of this package, then installed
packages. Our own packages are always those beside this file.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

SAFE = "PYTHONSAFEPATH"
"""If this variable is set, Python does not search the working folder. The processes that a rank starts inherit it."""

_HOME = str(Path(__file__).parents[2])
_OURS = ("engines", "mpi4dl_nb")
_OF_NOTEBOOK = ("engines.comm.supervisor", "ipyparallel.engine")
"""The modules that run as ranks of a notebook, which sends its own search path before they import the user's code."""


class _Finder(MetaPathFinder):
    """Finds packages that a file or folder of the user's must not hide, whatever the search path.

    These are our own, which are beside this file, and for a rank that is `starting` all others: IPython and ipyparallel
    put the working folder first, where there may be a `zmq.py` that the notebook's kernel has not imported.
    """

    def __init__(self, starting: bool) -> None:
        self.starting, self.here = starting, ("", str(Path.cwd()))

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in _OURS:
            return PathFinder.find_spec(name, [_HOME], target)
        # Once the notebook's search path has arrived (`sync_imports`), that one counts, and SAFE is unset.
        if path is None and self.starting and os.environ.get(SAFE) == "rank":
            return PathFinder.find_spec(name, [each for each in sys.path if each not in self.here], target)
        return None


def make_command(module: str, *arguments: str) -> list[str]:
    """Return the command that starts a module in this way.

    >>> make_command("engines.comm.supervisor", "ls")[-2:]
    ['engines.comm.supervisor', 'ls']
    """
    return [sys.executable, "-P", __file__, module, *arguments]


def order_search_path(paths: Iterable[str]) -> list[str]:
    """Return the standard library's folders, then the others in order, each once, and this package's folder.

    >>> ordered = order_search_path(["", "lib", *sys.path])
    >>> ordered.index("") > ordered.index(sysconfig.get_path("stdlib"))
    True
    """
    # A file `random.py` of the user's must not hide the standard library's, but may hide an installed package's:
    #
    #     standard library | PYTHONPATH, working folder | this package's folder | installed packages
    known = list(dict.fromkeys(paths))
    standard = [path for path in known if _is_standard(path)]
    return [*standard, *(path for path in known if path not in standard), *([_HOME] * (_HOME not in known))]


def _is_standard(path: str) -> bool:
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    folders |= {folder / "lib-dynload" for folder in folders}
    return Path(path) in folders or Path(path).name == f"python{sys.version_info[0]}{sys.version_info[1]}.zip"


def main(module: str, *arguments: str) -> None:
    """Run a module as the main program."""
    # The folders of PYTHONPATH, which Python has put first, stay before the working folder. This package's folder comes
    # before the installed packages, so that ranks use the notebook's copy and no other.
    from_environment = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100
    sys.path[:] = order_search_path(
        [*filter(_is_standard, sys.path), *from_environment, str(Path.cwd()), _HOME, *sys.path]
    )
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder(module in _OF_NOTEBOOK))  # after built-in modules
    os.environ.setdefault(SAFE, "rank")
    sys.argv[:] = [sys.argv[0], *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
