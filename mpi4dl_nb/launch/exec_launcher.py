"""Ranks outside of a notebook, which leave nothing behind either: no process, no folder, no shared memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from mpi4dl_nb.launch.allocation import read_allocation
from mpi4dl_nb.launch.mpi_environment import make_mpi_environment
from mpi4dl_nb.launch.pid_file import PidFile, remove_stale_clusters
from mpi4dl_nb.launch.reaper_process import PROGRAM
from mpi4dl_nb.launch.run_directory import RunDirectory

__all__ = ["exec_launcher"]


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
