"""Which backend a machine can carry: a process for each rank over MPI, or threads of the notebook's kernel."""

from __future__ import annotations

import warnings
from pathlib import Path

import psutil

from engines.errors import RankError
from engines.spoken import spoken_bytes
from mpi4dl_nb.launch.environment import mpiexec

__all__ = ["chosen_backend", "memory_bytes"]

RANK_BYTES = 400 << 20
"""What a process that has imported torch holds before it trains."""

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of a container: control groups of version 2, and 1


def chosen_backend(wish: str, n: int) -> str:
    """`auto`: `mpi` where there is an mpiexec, and memory for `n` processes; else `loopback`, with a warning."""
    if wish != "auto":
        return wish
    try:
        mpiexec()
    except RankError as error:
        why = str(error).partition(".")[0]
    else:
        if (have := memory_bytes()) >= (n + 1) * RANK_BYTES:
            return "mpi"
        why = f"{n} processes and this one need {spoken_bytes((n + 1) * RANK_BYTES)} of memory, of {spoken_bytes(have)}"
    warnings.warn(f"{why}: the ranks are threads of this kernel (loopback).", RuntimeWarning, stacklevel=3)
    return "loopback"


def memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of this machine, or of the container that this process is in."""
    told = (path.read_text().strip() for name in _LIMITS if (path := groups / name).exists())
    return min([psutil.virtual_memory().total, *(int(text) for text in told if text.isdecimal())])
