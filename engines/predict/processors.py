"""Who computes when: ranks with processors of their own, or some that share the cores of a host."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from engines.predict.machine import Machine

__all__ = ["Own", "Processors", "Shared"]


class Processors(Protocol):
    """Work under way. Times never go back."""

    def start(self, rank: int, seconds: float, now: float) -> None:
        """A rank begins work that takes so long by itself."""

    def next_end(self) -> float:
        """When the next work is done, if no other begins before."""

    def ended(self, now: float) -> Sequence[int]:
        """Go on to `now`; the ranks whose work is done."""


class Own:
    """Every rank has its own."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def start(self, rank: int, seconds: float, now: float) -> None:
        heapq.heappush(self._ends, (now + seconds, rank))

    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def ended(self, now: float) -> Sequence[int]:
        found = []
        while self._ends and self._ends[0][0] <= now:
            found.append(heapq.heappop(self._ends)[1])
        return found


class Shared:
    """All share the cores of one host, evenly, as threads of equal priority do."""

    def __init__(self, machine: Machine, threads: Mapping[int, int]) -> None:
        self.machine, self.threads = machine, threads
        self._left: dict[int, float] = {}
        self._now = 0.0

    @property
    def _slowdown(self) -> float:
        return self.machine.slowdown(len(self._left), sum(self.threads[rank] for rank in self._left))

    def start(self, rank: int, seconds: float, now: float) -> None:
        self._advance(now)
        self._left[rank] = seconds

    def next_end(self) -> float:
        return self._now + min(self._left.values()) * self._slowdown if self._left else math.inf

    def ended(self, now: float) -> Sequence[int]:
        least = min(self._left.values(), default=math.inf)
        last = bool(self._left) and now >= self.next_end()
        self._advance(now)
        done = [rank for rank, left in self._left.items() if left <= 0 or (last and left <= 1e-15 + 1e-12 * least)]
        for rank in done:
            del self._left[rank]
        return done

    def _advance(self, now: float) -> None:
        done = (now - self._now) / self._slowdown if self._left else 0.0
        for rank in self._left:
            self._left[rank] -= done
        self._now = now
