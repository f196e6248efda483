"""Command line that runs a command of the engines on ranks of this machine, outside of a notebook."""

from __future__ import annotations

from engines.start import make_command
from mpi4dl_nb.launch.mpi_environment import find_mpiexec
from mpi4dl_nb.launch.mpi_library import find_mpi_library

__all__ = ["make_engine_command"]


def make_engine_command(n: int, *arguments: str) -> list[str]:
    """Return `mpiexec -n N python -m mpi4py -m engines ARGUMENTS`, unaffected by file names in the working folder.

    Raises RankError if there is no suitable MPI.
    """
    program = find_mpiexec()
    flags = find_mpi_library(program).flags
    return [program, *flags, "-n", str(n), *make_command("mpi4py", "-m", "engines", *arguments)]
