"""Who computes when: ranks with processors of their own here, those that share cores in `cores.py`."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from engines.predict.actions import Work
from engines.predict.cores import RunQueue
from engines.predict.machine import Machine

__all__ = ["Nodes", "Own", "Processors"]


class Processors(Protocol):
    """Work under way. Times never go back."""

    def start(self, rank: int, work: Work, now: float) -> None:
        """A rank begins some work."""

    def taken(self, rank: int) -> bool:
        """Whether others have all that a rank could go on with."""

    def next_end(self) -> float:
        """When the next work is done, if no other begins before."""

    def ended(self, now: float) -> Sequence[int]:
        """Go on to `now`; the ranks whose work is done."""


class Own:
    """Every rank has its own."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def start(self, rank: int, work: Work, now: float) -> None:
        heapq.heappush(self._ends, (now + work.seconds, rank))

    def taken(self, rank: int) -> bool:
        return False

    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def ended(self, now: float) -> Sequence[int]:
        found = []
        while self._ends and self._ends[0][0] <= now:
            found.append(heapq.heappop(self._ends)[1])
        return found


class Nodes:
    """The ranks of each node share its cores. `threads` are those of each rank."""

    def __init__(self, machine: Machine, threads: Mapping[int, int]) -> None:
        self.machine = machine
        shared: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, count in threads.items():
            shared[machine.node(rank)][rank] = count
        self._hosts = {node: RunQueue(machine, own) for node, own in shared.items()}

    def start(self, rank: int, work: Work, now: float) -> None:
        self._hosts[self.machine.node(rank)].start(rank, work, now)

    def taken(self, rank: int) -> bool:
        return self._hosts[self.machine.node(rank)].taken(rank)

    def next_end(self) -> float:
        return min(host.next_end() for host in self._hosts.values())

    def ended(self, now: float) -> Sequence[int]:
        return [rank for host in self._hosts.values() for rank in host.ended(now)]
