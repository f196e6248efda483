"""The processes of a cluster on this host: signals to its ranks, and detection of stopped helpers."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import psutil

from mpi4dl_nb.launch.reaper_process import is_running

__all__ = ["LocalProcesses"]


class LocalProcesses:
    """Processes of a cluster. `helpers` are pids by name of the processes that connect notebook and ranks.

    `ranks` are the pids of the ranks on this host, in order. Each is a child of its guard, which is a helper too.
    """

    def __init__(self, helpers: Mapping[str, int], ranks: Sequence[int]) -> None:
        self._helpers = {name: psutil.Process(pid) for name, pid in helpers.items()}
        self._ranks = [psutil.Process(pid) for pid in ranks]
        self._guards = [process.parent() for process in self._ranks]
        self._sent_kill: set[psutil.Process] = set()

    def send_signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal directly to ranks, since a helper might be stopped itself. Ended ranks are skipped."""
        for rank in ranks:
            if number == signal.SIGKILL:
                self._sent_kill.add(self._ranks[rank])
            with suppress(psutil.Error):
                self._ranks[rank].send_signal(number)

    # psutil compares a process's start time before it sends a signal, so a pid that is used again is never hit.
    def killed(self) -> list[int]:
        """Return the ranks that have ended after a SIGKILL from here: their guards may be stopped and not report it."""
        return [rank for rank, each in enumerate(self._ranks) if each in self._sent_kill and not is_running(each)]

    def is_stopped(self, helper: str) -> bool:
        """Return whether a signal has stopped the helper of that name."""
        return _is_stopped(self._helpers[helper])

    def describe_stopped_helpers(self) -> str:
        """Describe which helpers were stopped by a signal; empty if none was."""
        guards = [(f"the guard of rank {rank}", guard) for rank, guard in enumerate(self._guards) if guard]
        return " and ".join(
            f"{name} (process {process.pid}) was stopped by a signal"
            for name, process in [*self._helpers.items(), *guards]
            if _is_stopped(process)
        )

    def keep_ranks(self, ranks: Sequence[int]) -> None:
        """Keep only these ranks, renumbered in order."""
        self._ranks, self._guards = ([each[rank] for rank in ranks] for each in (self._ranks, self._guards))


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False
