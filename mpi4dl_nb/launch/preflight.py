"""Checks before ranks start: an existing working folder, and a sufficient limit of open files."""

from __future__ import annotations

import resource

import psutil

from engines.errors import RankError
from engines.working_folder import is_deleted

__all__ = ["check_cluster", "check_command"]


def check_cluster(n: int) -> None:
    """Raise RankError, before anything starts, if a cluster of `n` ranks could not start or would crash.

    Measured: the notebook opens 30 more files, and the controller, which opens the most, 107 + 6 n.
    """
    _check_resources(n, max(psutil.Process().num_fds() + 64, 128 + 8 * n))


def check_command(n: int) -> None:
    """Check as for a cluster. Measured: mpiexec opens 20 + 3 n files, and a rank 40."""
    _check_resources(n, max(48, 32 + 4 * n))


def _check_resources(n: int, needed: int) -> None:
    if is_deleted():
        raise RankError(
            "The folder that this process works in was deleted: ranks cannot work there. Go to another one (os.chdir)."
        )
    # A library that gets no file (ZeroMQ, PMIx) ends its process, even the notebook. The limit of this process and its
    # children is raised as far as needed: desktop systems permit more than the 1024 files that they begin with.
    unlimited = resource.RLIM_INFINITY
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != unlimited and most < needed:
        raise RankError(
            f"A process may open {most} files here, but to start {n} ranks takes {needed}. Raise the limit "
            f"(ulimit -n {needed}, LimitNOFILE of a service), or start fewer ranks."
        )
    if now != unlimited and now < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))
