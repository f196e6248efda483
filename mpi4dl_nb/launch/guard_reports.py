"""What the guards of the ranks tell, out of all that mpiexec writes."""

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
_SILENT_S = 3.0  # guards are heard every second
_PAUSE_S = 1.0  # whoever asks does so many times a second
_STATES = {"R": "it computes", "D": "it waits for a file", "T": _STOPPED}


@dataclass(frozen=True, slots=True)
class RankExit:
    """How a rank's process has ended, by a signal (`code` < 0) or by itself, and where it was then.

    `helper`: the process whose end took the rank with it, whatever the rank's own code says.

    >>> print(RankExit(-9, Whereabouts("stage 0, tile 1: update", 0.0, 7)))
    its process was killed by SIGKILL (the system does so where memory runs out) in stage 0, tile 1: update, step 7
    """

    code: int | None
    last: RankStatus | None = None
    helper: str = ""

    def __str__(self) -> str:
        return f"its process {self._how}" + (f" in {self.last}" if self.last else "")

    @property
    def _how(self) -> str:
        if self.helper:
            return f"has ended with {self.helper}"
        if self.code is None:
            return "has ended"
        if self.code >= 0:
            return f"has left with exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
        why = {"SIGKILL": " (the system does so where memory runs out)", "SIGSEGV": " (a fault in compiled code)"}
        return f"was killed by {name}{why.get(name, '')}"


@dataclass(frozen=True, slots=True)
class StalledRank:
    """A rank that has not gone on since `at.since_s`, idle where that has no text; `why` as far as the system tells.

    `silent`: nothing has been heard of it since then, so that nobody knows whether it goes on.
    """

    at: RankStatus
    why: str = ""
    silent: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the system lets it go on."""
        return self.why == _STOPPED

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do, for all that it knows."""
        return not self.at.text and not self.silent

    @property
    def for_s(self) -> float:
        """How long by now."""
        return time.monotonic() - self.at.since_s

    def with_delay(self, seconds: float) -> StalledRank:
        """The same, as if it had begun so much later, but not after now."""
        return replace(self, at=replace(self.at, since_s=min(time.monotonic(), self.at.since_s + seconds)))


class GuardReports:
    """Of all ranks. `ended` and `still()` are by number of the rank when MPI started."""

    def __init__(self) -> None:
        self.ended: dict[int, RankExit] = {}
        self._still: dict[int, StalledRank] = {}
        self._heard_s: dict[int, float] = {}
        self._asked_s = time.monotonic()
        self._cut_off_s: float | None = None
        self._lock = Lock()  # lines come in a thread

    def find_stalled_ranks(self, is_cut_off: bool = False) -> dict[int, StalledRank]:
        """The ranks that do not go on, and those that have work but whose guards say nothing any more.

        `is_cut_off`: no answer of a rank can arrive, whatever it does; while that lasts, each counts as idle. A time
        in which nobody asked does not count: this process may have been stopped, and has not read yet what came
        meanwhile.
        """
        with self._lock:
            now_s = time.monotonic()
            if (pause_s := now_s - self._asked_s) > _PAUSE_S:
                self._heard_s = {rank: min(now_s, heard_s + pause_s) for rank, heard_s in self._heard_s.items()}
                self._still = {rank: still.with_delay(pause_s) for rank, still in self._still.items()}
                self._cut_off_s = None
            self._asked_s = now_s
            self._cut_off_s = (self._cut_off_s or now_s) if is_cut_off else None
            return self._find_stalled(now_s)

    def _find_stalled(self, now_s: float) -> dict[int, StalledRank]:
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
        """A line that mpiexec has written: of a guard, or of anybody."""
        _, mark, told = line.partition(MARK.encode())
        if mark:
            with suppress(ValueError, TypeError, LookupError, RecursionError):  # others have written into it
                facts = json.loads(told)
                with self._lock:
                    self._record_event(facts)

    def _record_event(self, facts: Mapping[str, Any]) -> None:
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
    """On this host's clock: those of several may differ."""
    since_s = time.monotonic() - facts["for_s"]
    return RankStatus(facts["text"], since_s, facts.get("step", 0), facts.get("waits", False))
