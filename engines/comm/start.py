"""Run a module as the program of a rank: `python -P .../engines/comm/start.py MODULE ARGUMENTS`.

`python -m MODULE` searches the working folder first, where a file may be called `random.py`, or a folder `mpi4dl_nb`.
Here the search path is the standard library, then the working folder and the folder of this package, then installed
packages. Our own package is always the one that this file belongs to.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import stat
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

SAFE = "PYTHONSAFEPATH"
"""If this variable is set, Python does not search the working folder. The processes that a rank starts inherit it."""

USER_HOME, MPI_HOME = "MPI4DL_NB_USER_HOME", "MPI4DL_NB_MPI_HOME"
"""Variables for a rank: what HOME is for the user's code (empty: unset), and what it is for MPI."""

_OURS = "mpi4dl_nb"
_HOME = str(Path(__file__).parents[3])  # of the package: in a repository, engines is a link within it
_OF_NOTEBOOK = ("mpi4dl_nb.engines.comm.supervisor", "ipyparallel.engine")
"""The modules that run as ranks of a notebook, which sends its own search path before they import the user's code."""


class _Finder(MetaPathFinder):
    """Finds packages that a file or folder of the user's must not hide, whatever the search path.

    These are our own, which this file belongs to, and for a rank that is `starting` all others: IPython and ipyparallel
    put the working folder first, where there may be a `zmq.py` that the notebook's kernel has not imported.
    """

    def __init__(self, starting: bool) -> None:
        self.starting, self.here = starting, ("", str(Path.cwd()))

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == _OURS:
            return PathFinder.find_spec(name, [_HOME], target)
        # Once the notebook's search path has arrived (`sync_imports`), that one counts, and SAFE is unset.
        if path is None and self.starting and os.environ.get(SAFE) == "rank":
            return PathFinder.find_spec(name, [folder for folder in sys.path if folder not in self.here], target)
        return None


def make_command(module: str, *arguments: str) -> list[str]:
    """Return the command that starts a module in this way.

    >>> make_command("mpi4dl_nb.engines.comm.supervisor", "ls")[-2:]
    ['mpi4dl_nb.engines.comm.supervisor', 'ls']
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


# MPI's own HOME. MPI, PMIx and PRRTE read settings from there, which name libraries to load and programs to start. So
# it is the cluster's own folder, also where a user has no home: in /tmp anyone may write.
#
#     notebook (HOME=/home/me) ──> mpiexec (HOME=/tmp/mpi4dl_nb-ab12cd34) ──> rank: MPI_Init with the same HOME,
#                                                                             all else with HOME=/home/me


def make_home_variables(folder: str, known: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that give mpiexec a home, and the ranks that it starts (by `main`) the user's home again.

    >>> make_home_variables("/tmp/x", {"HOME": "/home/me"})
    {'HOME': '/tmp/x', 'MPI4DL_NB_USER_HOME': '/home/me'}
    """
    return {"HOME": folder, USER_HOME: known.get("HOME", "")}


def restore_home(known: Mapping[str, str]) -> dict[str, str]:
    """Return variables with the user's home again, and MPI's under another name.

    >>> restore_home({"HOME": "/tmp/x", "MPI4DL_NB_USER_HOME": "/home/me"})
    {'HOME': '/home/me', 'MPI4DL_NB_MPI_HOME': '/tmp/x'}
    """
    others = {name: value for name, value in known.items() if name not in ("HOME", USER_HOME)}
    users = {"HOME": known[USER_HOME]} if known[USER_HOME] else {}
    return {**others, **users, MPI_HOME: known["HOME"]}


@contextmanager
def use_mpi_home() -> Iterator[None]:
    """Within the context, which imports mpi4py.MPI and so initialises MPI, HOME is MPI's own."""
    before = os.environ.get("HOME")
    os.environ["HOME"] = os.environ.get(MPI_HOME, os.devnull)  # no cluster: a home without files
    try:
        yield
    finally:
        del os.environ["HOME"]
        if before is not None:
            os.environ["HOME"] = before


# Two programs of this file which run a command in a changed environment. The values of variables are not in the
# command, which all users of a machine can read.

_WITH_FILE, _IN_FOLDER = "--with-file", "--in-folder"


def add_variables(file: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one with the variables of a JSON file, in which null unsets a variable."""
    return make_command(_WITH_FILE, file, *command)


def enter_folder(name: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs another one with its HOME and TMPDIR in the private folder with a file `name`."""
    return make_command(_IN_FOLDER, name, *command)


def _run_with_file(file: str, *command: str) -> NoReturn:
    changed = {**os.environ, **json.loads(Path(file).read_text(encoding="utf-8"))}
    os.execvpe(command[0], command, {name: value for name, value in changed.items() if value is not None})


def _run_in_folder(name: str, *command: str) -> NoReturn:
    for file in Path(tempfile.gettempdir()).glob(f"mpi4dl_nb-*/{name}"):
        status = file.parent.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
            folder = str(file.parent)
            os.execvpe(command[0], command, {**os.environ, "HOME": folder, "TMPDIR": folder})
    sys.exit(f"mpi4dl_nb has no folder for {name} in {tempfile.gettempdir()}")


_PROGRAMS = {_WITH_FILE: _run_with_file, _IN_FOLDER: _run_in_folder}
_FIRST = dict.fromkeys(("mpi4py", "ipyparallel.engine"), "mpi4py.MPI")
"""The modules that use MPI, and what initialises it."""


_LIBRARIES = r"(IPython|ipykernel|ipyparallel|jupyter_client|jupyter_core|tornado|traitlets|zmq|asyncio)\b"


def silence_libraries() -> None:
    """Ignore warnings of the libraries that run a rank: with PYTHONWARNINGS=error, theirs would end it.

    Those of all other modules stay what the user has made of them.
    """
    if sys.warnoptions:
        warnings.filterwarnings("ignore", module=_LIBRARIES)


def main(module: str, *arguments: str) -> None:
    """Run a module as the main program."""
    if module in _PROGRAMS:
        _PROGRAMS[module](*arguments)
    if USER_HOME in os.environ:  # anew, since Python has searched its packages in that home
        os.execve(sys.executable, make_command(module, *arguments), restore_home(os.environ))
    # The folders of PYTHONPATH, which Python has put first, stay before the working folder. This package's folder comes
    # before the installed packages, so that ranks use the notebook's copy and no other.
    python_path = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]  # noqa: PTH100
    sys.path[:] = order_search_path([*filter(_is_standard, sys.path), *python_path, str(Path.cwd()), _HOME, *sys.path])
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder(module in _OF_NOTEBOOK))  # after built-in modules
    silence_libraries()
    os.environ.setdefault(SAFE, "rank")
    sys.argv[:] = [sys.argv[0], *arguments]
    if MPI_HOME in os.environ and (first := _FIRST.get(module)):
        with suppress(ImportError), use_mpi_home():  # the module itself says what is missing
            importlib.import_module(first)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
