"""Run a module as the program of a rank: `python -P .../engines/comm/start.py MODULE ARGUMENTS`.

`python -m MODULE` searches the working folder first, where a file may be called `random.py`. Here the search path is
the standard library, then the working folder and the folder of this package, then installed packages.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

__all__ = ["SAFE", "main", "make_command", "order_search_path"]

SAFE = "PYTHONSAFEPATH"
"""If this variable is set, Python does not search the working folder. The processes that a rank starts inherit it."""

_HOME = str(Path(__file__).parents[2])


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
    told = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100
    sys.path[:] = order_search_path([*filter(_is_standard, sys.path), *told, str(Path.cwd()), _HOME, *sys.path])
    os.environ.setdefault(SAFE, "rank")
    sys.argv[:] = [sys.argv[0], *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
