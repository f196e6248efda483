"""Reports of the ranks' supervisors, filtered from the output of mpiexec."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Lock
from typing import Any

from mpi4dl_nb.engines.comm.status_board import RankStatus
from mpi4dl_nb.engines.comm.supervisor import MARK

_STOPPED = "it was stopped by a signal"
_SILENT_S = 3.0  # supervisors report every second
_PAUSE_S = 1.0  # normally this is polled many times a second
# PMIx, through which a rank hears of mpiexec, ends its process with an error code of its own.
_CODES = {195: " (its connection to mpiexec, or to mpiexec's daemon on its host, was lost)"}
_STATES = {"R": "it computes", "D": "it waits for a file", "T": _STOPPED}


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process ended: by a signal (`code` < 0) or by itself, and its last status.

    `helper`: the process whose end took the rank with it, whatever the rank's own code is.

    >>> print(RankExit(-9, RankStatus("stage 0, tile 1: update", 0.0, 7)))
    its process was killed by SIGKILL (by the system, if memory ran out) in stage 0, tile 1: update, step 7
    """

    code: int | None
    last: RankStatus | None = None
    helper: str = ""

    def __str__(self) -> str:
        if self.helper:
            how = f"has ended with {self.helper}"
        elif self.code is None:
            how = "has ended"
        elif self.code >= 0:
            how = f"has left with exit code {self.code}" + _CODES.get(self.code, "")
        else:
            name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
            why = {"SIGKILL": " (by the system, if memory ran out)", "SIGSEGV": " (a fault in compiled code)"}
            how = f"was killed by {name}{why.get(name, '')}"
        return f"its process {how}" + (f" in {self.last}" if self.last else "")


@dataclass(frozen=True, slots=True)
class StalledRank:
    """A rank without progress since `at.since_s`, idle if the text of `at` is empty; `why` as far as the system tells.

    `silent`: no report has arrived since then, so it is unknown whether the rank makes progress.
    """

    at: RankStatus
    why: str = ""
    silent: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped by a signal."""
        return self.why == _STOPPED

    @property
    def idle(self) -> bool:
        """Whether the rank, by its own report, has nothing to do."""
        return not self.at.text and not self.silent

    @property
    def for_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.at.since_s

    def with_delay(self, seconds: float) -> StalledRank:
        """Return a copy that began `seconds` later, but not in the future."""
        return replace(self, at=replace(self.at, since_s=min(time.monotonic(), self.at.since_s + seconds)))


class SupervisorReports:
    """The reports of all supervisors. `ended` and `find_stalled_ranks()` use the ranks as MPI started.

    Once `has_helper_ended()` is true, all ranks are being ended, and their ends say nothing about the cause.
    """

    def __init__(self, has_helper_ended: Callable[[], object] = bool) -> None:
        self._has_helper_ended = has_helper_ended
        self.ended: dict[int, RankExit] = {}
        self._still: dict[int, StalledRank] = {}
        self._reported_s: dict[int, float] = {}
        self._polled_s = time.monotonic()
        self._cut_off_s: float | None = None
        self._lock = Lock()  # lines arrive in another thread

    def find_stalled_ranks(self, is_cut_off: bool = False) -> dict[int, StalledRank]:
        """Return the ranks without progress, and those that have work but whose supervisors have fallen silent.

        `is_cut_off`: no reply of a rank can arrive, whatever the rank does; meanwhile, each rank counts as idle.
        Periods without polling do not count: this process may have been suspended, and has not yet read the reports
        that arrived in between.
        """
        with self._lock:
            now_s = time.monotonic()
            if (pause_s := now_s - self._polled_s) > _PAUSE_S:
                self._reported_s = {rank: min(now_s, at_s + pause_s) for rank, at_s in self._reported_s.items()}
                self._still = {rank: still.with_delay(pause_s) for rank, still in self._still.items()}
                self._cut_off_s = None
            self._polled_s = now_s
            self._cut_off_s = (self._cut_off_s or now_s) if is_cut_off else None
            # What is known of a rank, and what it counts as:
            #
            #     last report             supervisor since     counts as
            #     "stalled in halo 3"     received             stalled in halo 3
            #     "stalled in halo 3"     silent for 3 s       silent: it may have gone on unseen
            #     "stalled, no work"      need not report      idle
            silent = {
                rank: StalledRank(RankStatus("", reported_s), silent=True)
                for rank, reported_s in self._reported_s.items()
                if now_s - reported_s >= _SILENT_S
            }
            idle = {rank: still for rank, still in self._still.items() if still.idle}
            stalled = {**self._still, **silent, **idle}
            if self._cut_off_s is None:
                return stalled
            cut_off = StalledRank(RankStatus("", self._cut_off_s))
            return {
                rank: max(stalled.get(rank, cut_off), cut_off, key=attrgetter("for_s")) for rank in self._reported_s
            }

    def parse_line(self, line: bytes) -> None:
        """Parse a line of mpiexec's output, which may be a supervisor's report or anything else."""
        _, mark, text = line.partition(MARK.encode())
        if mark:
            with suppress(ValueError, TypeError, LookupError, RecursionError):  # garbled by other output
                facts = json.loads(text)
                with self._lock:
                    self._record_event(facts)

    def _record_event(self, facts: Mapping[str, Any]) -> None:
        # A supervisor writes "still" when its rank stalls, "moves" when it goes on, "ended" once, and "watches" every
        # second while the rank has work.
        rank, event = facts["rank"], facts["event"]
        self._reported_s[rank] = time.monotonic()
        if event == "watches":
            return
        self._still.pop(rank, None)
        if event == "still":
            self._still[rank] = StalledRank(_parse_status(facts), _STATES.get(facts["state"], ""))
        if event == "ended":
            del self._reported_s[rank]
            if not self._has_helper_ended():
                self.ended[rank] = RankExit(facts["code"], _parse_status(facts) if facts["text"] else None)


def _parse_status(facts: Mapping[str, Any]) -> RankStatus:
    """Convert a report to this host's clock: clocks of different hosts may differ."""
    since_s = time.monotonic() - facts["for_s"]
    return RankStatus(facts["text"], since_s, facts.get("step", 0), facts.get("waits", False))
