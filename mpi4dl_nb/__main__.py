"""`python -m mpi4dl_nb -n 5 verify ...`: a command of the engines on so many ranks of this machine.

It is `mpiexec -n 5 python -m mpi4py -m engines verify ...`, with what this machine's MPI has to be told before.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from engines.errors import RankError
from engines.options import positive
from mpi4dl_nb.launch.engine_command import engine_command
from mpi4dl_nb.launch.environment import mpi_environment

__all__ = ["main"]


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the launcher; where there is none, exits with code 2."""
    flags = argparse.ArgumentParser(prog="python -m mpi4dl_nb", description=__doc__.splitlines()[0])
    flags.add_argument("-n", type=positive, default=1, dest="ranks", metavar="RANKS", help="how many (default: 1)")
    flags.add_argument("command", nargs=argparse.REMAINDER, help="verify, train, predict, bench ..., with its flags")
    chosen = flags.parse_args(arguments)
    try:
        command = engine_command(chosen.ranks, *chosen.command)
    except RankError as error:
        flags.error(str(error))
    os.execve(command[0], command, os.environ | mpi_environment(chosen.ranks))


if __name__ == "__main__":
    main(sys.argv[1:])
