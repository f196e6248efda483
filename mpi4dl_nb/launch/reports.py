"""What the guards of the ranks tell, out of all that mpiexec writes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from engines.guard import MARK
from engines.whereabouts import Whereabouts

__all__ = ["Ended", "Reports", "Still"]

_STOPPED = "it was stopped by a signal"
_STATES = {"R": "it computes", "D": "it waits for a file", "T": _STOPPED}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank's process has ended, by a signal (`code` < 0) or by itself, and where it was then.

    >>> print(Ended(-9, Whereabouts("stage 0, tile 1: update", 0.0, 7)))
    its process was killed by SIGKILL (the system does so where memory runs out) in stage 0, tile 1: update, step 7
    """

    code: int | None
    last: Whereabouts | None = None

    def __str__(self) -> str:
        return f"its process {self._how}" + (f" in {self.last}" if self.last else "")

    @property
    def _how(self) -> str:
        if self.code is None:
            return "has ended"
        if self.code >= 0:
            return f"has left with exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
        why = {"SIGKILL": " (the system does so where memory runs out)", "SIGSEGV": " (a fault in compiled code)"}
        return f"was killed by {name}{why.get(name, '')}"


@dataclass(frozen=True, slots=True)
class Still:
    """A rank that has not gone on since `at.since_s`, idle where that has no text; `why` as far as the system tells."""

    at: Whereabouts
    why: str = ""

    @property
    def stopped(self) -> bool:
        """Whether the system lets it go on."""
        return self.why == _STOPPED

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do, for all that it knows."""
        return not self.at.text

    @property
    def for_s(self) -> float:
        """How long by now."""
        return time.monotonic() - self.at.since_s


class Reports:
    """Of all ranks. `ended` and `still` are by number of the rank when MPI started."""

    def __init__(self) -> None:
        self.ended: dict[int, Ended] = {}
        self.still: dict[int, Still] = {}

    def take(self, line: bytes) -> None:
        """A line that mpiexec has written: of a guard, or of anybody."""
        _, mark, told = line.partition(MARK.encode())
        if mark:
            with suppress(ValueError, TypeError, LookupError, RecursionError):  # others have written into it
                self._take(json.loads(told))

    def _take(self, facts: Mapping[str, Any]) -> None:
        rank, event = facts["rank"], facts["event"]
        self.still.pop(rank, None)
        if event == "still":
            self.still[rank] = Still(_place(facts), _STATES.get(facts["state"], ""))
        if event == "ended":
            self.ended[rank] = Ended(facts["code"], _place(facts) if facts["text"] else None)


def _place(facts: Mapping[str, Any]) -> Whereabouts:
    """On this host's clock: those of several may differ."""
    since_s = time.monotonic() - facts["for_s"]
    return Whereabouts(facts["text"], since_s, facts.get("step", 0), facts.get("waits", False))
