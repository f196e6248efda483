"""Which backend a machine can carry: a process for each rank over MPI, or threads of the notebook's kernel."""

from __future__ import annotations

import warnings

from engines.comm.container import memory_bytes
from engines.errors import RankError
from engines.spoken import spoken_bytes
from mpi4dl_nb.launch.environment import mpiexec

__all__ = ["chosen_backend"]

RANK_BYTES = 600 << 20
"""What a process that has imported torch holds, and a small training beside it."""


def chosen_backend(wish: str, n: int, has_hosts: bool = False) -> str:
    """`auto`: `mpi` where there are hosts, or an mpiexec and memory for `n` processes; else, told, `loopback`."""
    if wish != "auto":
        return wish
    if has_hosts:
        return "mpi"
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
