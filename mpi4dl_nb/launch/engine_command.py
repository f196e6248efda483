"""What starts a command of the engines on ranks of this machine, outside of a notebook."""

from __future__ import annotations

from engines.start import command
from mpi4dl_nb.launch.environment import mpiexec
from mpi4dl_nb.launch.library import library

__all__ = ["engine_command"]


def engine_command(n: int, *arguments: str) -> list[str]:
    """`mpiexec -n N python -m mpi4py -m engines ARGUMENTS`, whatever files of the working folder are called.

    Raises RankError where there is no MPI that can.
    """
    program = mpiexec()
    flags = library(program).flags
    return [program, *flags, "-n", str(n), *command("mpi4py", "-m", "engines", *arguments)]
