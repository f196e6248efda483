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
    _check_folder()
    _raise_file_limit(n, max(psutil.Process().num_fds() + 64, 128 + 8 * n))


def check_command(n: int) -> None:
    """Check as for a cluster. Measured: mpiexec opens 20 + 3 n files, and a rank 40."""
    _check_folder()
    _raise_file_limit(n, max(48, 32 + 4 * n))


def _check_folder() -> None:
    if is_deleted():
        raise RankError(
            "The folder that this process works in was deleted: ranks cannot work there. Go to another one (os.chdir)."
        )


def _raise_file_limit(n: int, needed: int) -> None:
    """Raise the limit of open files for this process and its children, if it is too low and as far as permitted.

    A library that gets no file (ZeroMQ, PMIx) ends its process, even the notebook.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _to_float(most) < needed:
        raise RankError(
            f"A process may open {most} files here, but to start {n} ranks takes {needed}. Raise the limit "
            f"(ulimit -n {needed}, LimitNOFILE of a service), or start fewer ranks."
        )
    if _to_float(now) < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _to_float(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
