"""`mpi4dl-nb -n 5 verify ...`, or `python -m mpi4dl_nb`: run a command of the engines on several ranks of this machine.

This is `mpiexec -n 5 python -m mpi4py -m mpi4dl_nb.engines verify ...` with the options and environment that this
machine's MPI needs. However the command ends, it leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mpi4dl_nb.engines.cli.options import FlagParser, parse_positive
from mpi4dl_nb.engines.comm.start import add_variables, order_search_path
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.launch.hosts import read_allocation
from mpi4dl_nb.launch.mpi_library import make_engine_command, make_mpi_environment
from mpi4dl_nb.launch.reaper_process import PROGRAM
from mpi4dl_nb.launch.run_directory import PidFile, RunDirectory, remove_stale_clusters
from mpi4dl_nb.launch.startup_monitor import check_command


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by the launcher of `arguments`, by default those of this process.

    Exits with code 2 if there is no launcher, or if ranks cannot start here.
    """
    flags = FlagParser(prog="mpi4dl-nb", description=__doc__.splitlines()[0])
    ranks, commands = "number of ranks (default: 1)", "verify, train, predict, bench, page ..., with its flags"
    flags.add_argument("-n", type=parse_positive, default=1, dest="ranks", metavar="RANKS", help=ranks)
    flags.add_argument("command", nargs=argparse.REMAINDER, help=commands)
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["page"]:  # no ranks: this process makes it
            from mpi4dl_nb.page_command import save_requested_page

            sys.path[:] = order_search_path([str(Path.cwd()), *sys.path])  # as for ranks: the user's modules are there
            print(save_requested_page(arguments[1:]))
            sys.exit(0)
        chosen = flags.parse_args(arguments)
        check_command(chosen.ranks)
        exec_launcher(make_engine_command(chosen.ranks, *chosen.command), chosen.ranks)
    except Mpi4dlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


def exec_launcher(command: Sequence[str], n: int) -> NoReturn:
    """Replace this process by one that runs a launcher of `n` ranks, cleans up after it, and exits with its code.

    That process takes 20 MB, while this one may have loaded torch. If it is killed together with the launcher, the next
    start finds its record, because a process keeps its pid across exec. Raises RankError if there is no room, and
    PlanError if a batch system's hosts cannot be parsed.
    """
    if sys.platform != "linux":
        os.execve(command[0], command, {**os.environ, **make_mpi_environment(n)})
    remove_stale_clusters()
    job = read_allocation()
    directory = RunDirectory.make(n)
    # The process keeps its pid, but not its memory:
    #
    #     python -m mpi4dl_nb -n 2 ...             exec         reaper_process keep ...
    #     (pid 7, has imported torch perhaps)      ───>         (pid 7)
    #                                                            └── mpiexec
    #                                                                 ├── rank 0
    #                                                                 └── rank 1
    paths = [*directory.folders, *filter(None, [PidFile.of(directory).write()])]
    # By a file: the launcher has another HOME than its keeper, which is the user's Python.
    variables = directory.home / "variables.json"
    variables.write_text(json.dumps(make_mpi_environment(n, str(directory.home))), encoding="utf-8")
    launcher = add_variables(str(variables), command)
    keeper = [*PROGRAM, "keep", directory.name, *map(str, paths), "--", *launcher]
    is_alone = job is None or len(job.hosts) == 1
    os.execve(keeper[0], keeper, {**os.environ, **directory.make_environment(is_alone)})


if __name__ == "__main__":
    main()
