"""Ranks that share the cores of a host, as an operating system lets them: in turns, a slice of time each.

Ranks that come to a sum after each layer wait for the last of them, and three short pieces of work on two cores take as
long as four: with evenly divided cores (processor sharing) they would take three quarters of that.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.predict.actions import Work
from engines.predict.machine import Machine

__all__ = ["RunQueue"]

_NOTHING_S = 1e-12


@dataclass(eq=False, slots=True)
class _Task:
    """One thread of a rank's work; `slice_s` is left of its turn."""

    rank: int
    left_s: float
    crowded: float
    slice_s: float


class RunQueue:
    """Threads that have work wait in one queue for a core; whoever's slice is over goes to its end.

    A rank that goes on with other work at once keeps its cores. `threads` are those of each rank.
    """

    def __init__(self, machine: Machine, threads: Mapping[int, int]) -> None:
        self.machine, self.threads = machine, threads
        self.cores = machine.cores or len(threads)
        self._running: list[_Task] = []
        self._queue: deque[_Task] = deque()
        self._kept: dict[int, list[_Task]] = {}
        self._left: Counter[int] = Counter()
        self._now = 0.0

    def start(self, rank: int, work: Work, now: float) -> None:
        """Each of the rank's threads has so much work."""
        self._advance(now)
        kept = self._kept.pop(rank, [])
        self._left[rank] = min(self.threads[rank], self.cores)
        for number in range(self._left[rank]):
            if number < len(kept):
                kept[number].left_s, kept[number].crowded = work.seconds, work.crowded
                self._running.append(kept[number])
            else:
                self._queue.append(_Task(rank, work.seconds, work.crowded, self.machine.slice_s))

    def taken(self, rank: int) -> bool:
        """Whether other ranks have work for all cores."""
        return len({task.rank for task in (*self._running, *self._queue)} - {rank}) >= self.cores

    def next_end(self) -> float:
        """When the next work or slice is over."""
        self._kept.clear()
        while self._queue and len(self._running) < self.cores:
            self._running.append(self._queue.popleft())
        if not self._running:
            return math.inf
        busy = self._busy
        return self._now + min(self._turn_s(task) * self.machine.slowdown(busy, task.crowded) for task in self._running)

    def ended(self, now: float) -> Sequence[int]:
        """Go on to `now`; the ranks whose work is done."""
        self._advance(now)
        found = []
        for task in [task for task in self._running if self._turn_s(task) <= _NOTHING_S]:
            self._running.remove(task)
            if task.left_s > _NOTHING_S:
                task.slice_s = self.machine.slice_s
                self._queue.append(task)
                continue
            self._kept.setdefault(task.rank, []).append(task)
            self._left[task.rank] -= 1
            if not self._left[task.rank]:
                found.append(task.rank)
        return found

    def _turn_s(self, task: _Task) -> float:
        """Until it has to leave its core, if others want it."""
        return min(task.left_s, task.slice_s) if self._queue else task.left_s

    @property
    def _busy(self) -> int:
        """Ranks share what lies behind their caches; of a rank's threads `Machine.threaded` tells."""
        return len({task.rank for task in self._running})

    def _advance(self, now: float) -> None:
        busy = self._busy
        for task in self._running:
            done_s = (now - self._now) / self.machine.slowdown(busy, task.crowded)
            task.left_s -= done_s
            task.slice_s -= done_s
        self._now = now
