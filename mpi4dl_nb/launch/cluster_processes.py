"""The processes of a cluster on this host: signals to its ranks, their work, and which of them a signal has stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil

from mpi4dl_nb.launch.reaper_process import is_running

_LOOK_S = 0.5  # the process tree is walked no more often than this: a walk costs some ms
_RANK = "OMPI_COMM_WORLD_RANK"
_SUPERVISOR, _NANNY = "the supervisor of rank {}", "the nanny of rank {}"
_NAMES = _SUPERVISOR, "rank {}", _NANNY  # by the distance from mpiexec


class ClusterProcesses:
    """The processes of a cluster on this host, while it starts and while it works.

    Helpers connect notebook and ranks. `ranks` are the pids of the ranks, in order, once they are known.
    """

    # helpers                 their descendants: named by how far they are below mpiexec
    #
    #   controller
    #   mpiexec ------------- supervisor of rank 0 --- rank 0 --- nanny of rank 0
    #                    `--- supervisor of rank 1 --- rank 1 --- nanny of rank 1

    def __init__(self) -> None:
        self._helpers: dict[str, psutil.Process] = {}
        self._ranks: list[psutil.Process] = []
        self._numbers: list[int] = []  # the ranks' numbers as MPI has started them
        self._sent_kill: set[psutil.Process] = set()
        self._looked_s, self._work_s = float("-inf"), 0.0
        self._stopped: list[tuple[str, int]] = []
        self._nannies: dict[psutil.Process, str] = {}  # those that were seen alive, by name
        self._ended: list[str] = []

    def add_helper(self, name: str, pid: int) -> None:
        """Add a helper, with the descendants that it has or will have."""
        with suppress(psutil.NoSuchProcess):  # it has ended already, which others notice
            self._helpers[name] = psutil.Process(pid)

    def set_ranks(self, pids: Sequence[int]) -> None:
        """Set the ranks that signals can be sent to."""
        self._ranks = [psutil.Process(pid) for pid in pids]
        self._numbers = list(range(len(pids)))

    def keep_ranks(self, ranks: Sequence[int]) -> None:
        """Keep only these ranks, renumbered in order."""
        self._ranks, self._numbers = ([column[rank] for rank in ranks] for column in (self._ranks, self._numbers))

    def send_signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal directly to ranks, since a helper might be stopped itself. Ended ranks are skipped."""
        for rank in ranks:
            if number == signal.SIGKILL:
                self._sent_kill.add(self._ranks[rank])
            with suppress(psutil.Error):
                self._ranks[rank].send_signal(number)

    # psutil compares a process's start time before it sends a signal, so a pid that is used again is never hit.
    def find_killed_ranks(self) -> list[int]:
        """Return the ranks that have ended after a SIGKILL from here: a stopped supervisor does not report it."""
        killed = {process for process in self._sent_kill if not is_running(process)}
        return [rank for rank, process in enumerate(self._ranks) if process in killed]

    def is_stopped(self, helper: str) -> bool:
        """Return whether a signal has stopped the helper of that name."""
        return _is_stopped(self._helpers[helper])

    def measure_work_s(self) -> float:
        """Return the processor time of all these processes and of their ended children, in seconds."""
        self._look()
        return self._work_s

    def find_stopped(self) -> list[tuple[str, int]]:
        """Return the name and the pid of each process that a signal has stopped, helpers first."""
        self._look()
        return self._stopped

    def describe_stopped_helpers(self) -> str:
        """Describe which helpers, supervisors included, were stopped by a signal; empty if none was."""
        known = {name: name for name in self._helpers}
        known |= {_SUPERVISOR.format(was): _SUPERVISOR.format(rank) for rank, was in enumerate(self._numbers)}
        stopped = ((known[name], pid) for name, pid in self.find_stopped() if name in known)
        return " and ".join(f"{name} (process {pid}) was stopped by a signal" for name, pid in stopped)

    def find_ended_nannies(self) -> list[str]:
        """Return the nannies that have ended although their ranks have not, which then do nothing or all too much."""
        self._look()
        return self._ended

    def _look(self) -> None:
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s, self._stopped, work_s = time.monotonic(), [], 0.0
        # Helpers have names; those of their descendants are to be found.
        family = list(self._helpers.items())
        for helper in self._helpers.values():
            with suppress(psutil.Error):
                family += [("", process) for process in helper.children(recursive=True)]
        for name, process in family:
            with suppress(psutil.Error):
                used = process.cpu_times()
                work_s += used.user + used.system + used.children_user + used.children_system
                if _is_stopped(process):
                    self._stopped.append((name or _name_process(process), process.pid))
                if not name and process not in self._nannies and "ipyparallel.engine.nanny" in process.cmdline():
                    self._nannies[process] = f"{_name_process(process)} (process {process.pid})"
        self._work_s = max(self._work_s, work_s)  # what an ended process had done stays done
        self._ended = [name for process, name in self._nannies.items() if not is_running(process)]


def _name_process(process: psutil.Process) -> str:
    """Return what a process below mpiexec is for, by the rank in its environment and its distance from mpiexec."""
    with suppress(psutil.Error, OSError):
        rank, distance, parent = process.environ().get(_RANK), 0, process.parent()
        while rank and parent is not None and parent.environ().get(_RANK) == rank:
            distance, parent = distance + 1, parent.parent()
        return _NAMES[min(distance, len(_NAMES) - 1)].format(rank) if rank else str(process.name())
    return "a process"


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False
