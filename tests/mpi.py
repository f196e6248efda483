"""How tests start ranks: the command, and the environment that must be there before it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["mpi_command", "mpi_environment"]


def mpi_command(ranks: int, *arguments: object) -> list[str]:
    """`python -m mpi4py *arguments` on that many ranks."""
    program = Path(sys.prefix, "bin", "mpiexec")
    return [
        str(each) for each in (program, "--with-ft", "ulfm", "-n", ranks, sys.executable, "-m", "mpi4py", *arguments)
    ]


def mpi_environment() -> dict[str, str]:
    """More ranks than cores, one thread each; the ranks can import `tests`."""
    found = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    found |= {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(Path(__file__).parents[1])}
    if os.geteuid() == 0:
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found
