"""Reports of the ranks' supervisor processes (guards), filtered from the output of mpiexec."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from engines.status_board import RankStatus
from engines.supervisor import MARK

__all__ = ["GuardReports", "RankExit", "StalledRank"]

_STOPPED = "it was stopped by a signal"
_SILENT_S = 3.0  # guards report every second
_PAUSE_S = 1.0  # normally this is polled many times a second
_STATES = {"R": "it computes", "D": "it waits for a file", "T": _STOPPED}


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process ended: by a signal (`code` < 0) or by itself, and its last status.

    `helper`: the process whose end took the rank with it, whatever the rank's own code is.

    >>> print(RankExit(-9, RankStatus("stage 0, tile 1: update", 0.0, 7)))
    its process was killed by SIGKILL (the system does so where memory runs out) in stage 0, tile 1: update, step 7
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
            how = f"has left with exit code {self.code}"
        else:
            name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
            why = {"SIGKILL": " (the system does so where memory runs out)", "SIGSEGV": " (a fault in compiled code)"}
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


class GuardReports:
    """The reports of all guards. `ended` and `find_stalled_ranks()` use the ranks as MPI started."""

    def __init__(self) -> None:
        self.ended: dict[int, RankExit] = {}
        self._still: dict[int, StalledRank] = {}
        self._heard_s: dict[int, float] = {}
        self._asked_s = time.monotonic()
        self._cut_off_s: float | None = None
        self._lock = Lock()  # lines arrive in another thread

    def find_stalled_ranks(self, is_cut_off: bool = False) -> dict[int, StalledRank]:
        """Return the ranks without progress, and those that have work but whose guards have fallen silent.

        `is_cut_off`: no reply of a rank can arrive, whatever the rank does; meanwhile, each rank counts as idle.
        Periods without polling do not count: this process may have been suspended, and has not yet read the reports
        that arrived in between.
        """
        with self._lock:
            now_s = time.monotonic()
            if (pause_s := now_s - self._asked_s) > _PAUSE_S:
                self._heard_s = {rank: min(now_s, heard_s + pause_s) for rank, heard_s in self._heard_s.items()}
                self._still = {rank: still.with_delay(pause_s) for rank, still in self._still.items()}
                self._cut_off_s = None
            self._asked_s = now_s
            self._cut_off_s = (self._cut_off_s or now_s) if is_cut_off else None
            # What is known of a rank, and what it counts as:
            #
            #     last report             guard since then     counts as
            #     "stalled in halo 3"     heard                stalled in halo 3
            #     "stalled in halo 3"     silent for 3 s       silent: it may have gone on unseen
            #     "stalled, no work"      need not report      idle
            silent = {
                rank: StalledRank(RankStatus("", heard_s), silent=True)
                for rank, heard_s in self._heard_s.items()
                if now_s - heard_s >= _SILENT_S
            }
            idle = {rank: still for rank, still in self._still.items() if still.idle}
            found = {**self._still, **silent, **idle}
            if self._cut_off_s is None:
                return found
            cut_off = StalledRank(RankStatus("", self._cut_off_s))
            return {rank: max(found.get(rank, cut_off), cut_off, key=lambda each: each.for_s) for rank in self._heard_s}

    def parse_line(self, line: bytes) -> None:
        """Parse a line of mpiexec's output, which may be a guard's report or anything else."""
        _, mark, told = line.partition(MARK.encode())
        if mark:
            with suppress(ValueError, TypeError, LookupError, RecursionError):  # garbled by other output
                facts = json.loads(told)
                with self._lock:
                    self._record_event(facts)

    def _record_event(self, facts: Mapping[str, Any]) -> None:
        # A guard writes "still" when its rank stalls, "moves" when it goes on, "ended" once, and "watches" every second
        # while the rank has work.
        rank, event = facts["rank"], facts["event"]
        self._heard_s[rank] = time.monotonic()
        if event == "watches":
            return
        self._still.pop(rank, None)
        if event == "still":
            self._still[rank] = StalledRank(_parse_status(facts), _STATES.get(facts["state"], ""))
        if event == "ended":
            del self._heard_s[rank]
            self.ended[rank] = RankExit(facts["code"], _parse_status(facts) if facts["text"] else None)


def _parse_status(facts: Mapping[str, Any]) -> RankStatus:
    """Convert a report to this host's clock: clocks of different hosts may differ."""
    since_s = time.monotonic() - facts["for_s"]
    return RankStatus(facts["text"], since_s, facts.get("step", 0), facts.get("waits", False))
