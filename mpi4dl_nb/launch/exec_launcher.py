"""Ranks outside of a notebook, which leave nothing behind either: no process, no folder, no shared memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from engines.comm.start import make_command
from mpi4dl_nb.launch.hosts import read_allocation
from mpi4dl_nb.launch.mpi_library import find_mpi_library, find_mpiexec, make_mpi_environment
from mpi4dl_nb.launch.reaper_process import PROGRAM
from mpi4dl_nb.launch.run_directory import PidFile, RunDirectory, remove_stale_clusters

__all__ = ["exec_launcher", "make_engine_command"]


def exec_launcher(command: Sequence[str], n: int) -> NoReturn:
    """Replace this process by one that runs a launcher of `n` ranks, cleans up after it, and exits with its code.

    That process takes 20 MB, while this one may have loaded torch. If it is killed together with the launcher, the next
    start finds its record, because a process keeps its pid across exec. Raises RankError if there is no room, and
    PlanError if a batch system's hosts cannot be parsed.
    """
    environment = {**os.environ, **make_mpi_environment(n)}
    if sys.platform != "linux":
        os.execve(command[0], command, environment)
    remove_stale_clusters()
    job = read_allocation()
    place = RunDirectory.make(n)
    # The process keeps its pid, but not its memory:
    #
    #     python -m mpi4dl_nb -n 2 ...             exec         reaper_process keep ...
    #     (pid 7, has imported torch perhaps)      ───>         (pid 7)
    #                                                            └── mpiexec
    #                                                                 ├── rank 0
    #                                                                 └── rank 1
    paths = [*place.folders, *filter(None, [PidFile.of(place).write()])]
    keeper = [*PROGRAM, "keep", place.name, *map(str, paths), "--", *command]
    is_alone = job is None or len(job.hosts) == 1
    os.execve(keeper[0], keeper, {**environment, **place.make_environment(is_alone)})


# Command line that runs a command of the engines on ranks of this machine, outside of a notebook.


def make_engine_command(n: int, *arguments: str) -> list[str]:
    """Return `mpiexec -n N python -m mpi4py -m engines ARGUMENTS`, unaffected by file names in the working folder.

    Raises RankError if there is no suitable MPI.
    """
    program = find_mpiexec()
    flags = find_mpi_library(program).flags
    return [program, *flags, "-n", str(n), *make_command("mpi4py", "-m", "engines", *arguments)]
