"""Choose a backend that the machine can support: one MPI process per rank, or threads of the notebook's kernel."""

from __future__ import annotations

import warnings

from engines.comm.cgroup_limits import get_memory_bytes
from engines.errors import RankError
from engines.formatting import format_bytes
from mpi4dl_nb.launch.mpi_environment import find_mpiexec

__all__ = ["choose_backend"]

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
