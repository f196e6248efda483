"""`python -m mpi4dl_nb -n 5 verify ...`: run a command of the engines on several ranks of this machine.

This is `mpiexec -n 5 python -m mpi4py -m engines verify ...` with the options and environment that this machine's MPI
needs. However the command ends, it leaves nothing behind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from engines.cli.options import FlagParser, parse_positive
from engines.errors import PlanError, RankError
from mpi4dl_nb.launch.exec_launcher import exec_launcher, make_engine_command
from mpi4dl_nb.launch.startup_monitor import check_command

__all__ = ["main"]


def main(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the launcher. Exits with code 2 if there is none, or if ranks cannot start here."""
    flags = FlagParser(prog="python -m mpi4dl_nb", description=__doc__.splitlines()[0])
    flags.add_argument(
        "-n", type=parse_positive, default=1, dest="ranks", metavar="RANKS", help="how many (default: 1)"
    )
    flags.add_argument("command", nargs=argparse.REMAINDER, help="verify, train, predict, bench ..., with its flags")
    try:
        chosen = flags.parse_args(arguments)
        check_command(chosen.ranks)
        exec_launcher(make_engine_command(chosen.ranks, *chosen.command), chosen.ranks)
    except (PlanError, RankError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
