"""Runs a module as the program of a rank: `python -P .../engines/start.py MODULE ARGUMENTS`.

`python -m MODULE` looks into the working folder first, and a file there may be called `random.py`. Here the standard
library comes first, then the working folder and the folder of this package, then what is installed.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

__all__ = ["SAFE", "make_command", "order_search_path"]

SAFE = "PYTHONSAFEPATH"
"""With this variable set Python does not look into the working folder. The processes that a rank starts inherit it."""

_HOME = str(Path(__file__).parents[1])


def make_command(module: str, *arguments: str) -> list[str]:
    """What starts a module so.

    >>> make_command("engines.supervisor", "ls")[-2:]
    ['engines.supervisor', 'ls']
    """
    return [sys.executable, "-P", __file__, module, *arguments]


def order_search_path(paths: Iterable[str]) -> list[str]:
    """The folders of the standard library, then the others in their order, each once, that of this package among them.

    >>> ordered = order_search_path(["", "lib", *sys.path])
    >>> ordered.index("") > ordered.index(sysconfig.get_path("stdlib"))
    True
    """
    known = list(dict.fromkeys(paths))
    standard = [path for path in known if _is_standard(path)]
    return [*standard, *(path for path in known if path not in standard), *([_HOME] * (_HOME not in known))]


def _is_standard(path: str) -> bool:
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    folders |= {folder / "lib-dynload" for folder in folders}
    return Path(path) in folders or Path(path).name == f"python{sys.version_info[0]}{sys.version_info[1]}.zip"


def _main(module: str, *arguments: str) -> None:
    # Only with its own folder before what is installed is this package the one that the notebook has, not another copy.
    sys.path[:] = order_search_path(
        [*filter(_is_standard, sys.path), *_get_pythonpath(), str(Path.cwd()), _HOME, *sys.path]
    )
    os.environ.setdefault(SAFE, "rank")
    sys.argv[:] = [sys.argv[0], *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _get_pythonpath() -> list[str]:
    """The folders of PYTHONPATH, which Python has put first."""
    return [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100


if __name__ == "__main__":
    _main(*sys.argv[1:])
