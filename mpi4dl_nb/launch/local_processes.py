"""The processes of a cluster on this host: signals to its ranks, and which of its helpers was stopped by one."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import psutil

from mpi4dl_nb.launch.reaper_process import is_running

__all__ = ["LocalProcesses"]


class LocalProcesses:
    """`helpers` are pids by name: those through which the notebook and the ranks hear of each other.

    `ranks` are the pids of the ranks on this host, in their order; each is the child of its guard, which is a helper
    too.
    """

    def __init__(self, helpers: Mapping[str, int], ranks: Sequence[int]) -> None:
        self._helpers = {name: psutil.Process(pid) for name, pid in helpers.items()}
        self._ranks = [psutil.Process(pid) for pid in ranks]
        self._guards = [process.parent() for process in self._ranks]
        self._sent_kill: set[psutil.Process] = set()

    def send_signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal to ranks, directly: a helper might be stopped itself. One that has ended gets none."""
        for rank in ranks:
            if number == signal.SIGKILL:
                self._sent_kill.add(self._ranks[rank])
            with suppress(psutil.Error):
                self._ranks[rank].send_signal(number)

    def killed(self) -> list[int]:
        """The ranks that have ended after SIGKILL from here: their guards may be stopped, and not report it."""
        return [rank for rank, each in enumerate(self._ranks) if each in self._sent_kill and not is_running(each)]

    def is_stopped(self, helper: str) -> bool:
        """Whether a signal has stopped the helper of that name."""
        return _is_stopped(self._helpers[helper])

    def describe_stopped_helpers(self) -> str:
        """Say which helpers were stopped by a signal; nothing where all go on."""
        guards = [(f"the guard of rank {rank}", guard) for rank, guard in enumerate(self._guards) if guard]
        return " and ".join(
            f"{name} (process {process.pid}) was stopped by a signal"
            for name, process in [*self._helpers.items(), *guards]
            if _is_stopped(process)
        )

    def keep_ranks(self, ranks: Sequence[int]) -> None:
        """Number these ranks anew, in their order; the others are gone."""
        self._ranks, self._guards = ([each[rank] for rank in ranks] for each in (self._ranks, self._guards))


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False
