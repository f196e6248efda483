"""Schedules computation on cores: ranks with their own processors here, ranks that share cores in `run_queue.py`."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from engines.predict.actions import ComputeWork
from engines.predict.machine import Machine
from engines.predict.run_queue import RunQueue

__all__ = ["DedicatedCores", "SharedCores"]


# Both kinds of cores are used alike, by `simulate`. Times never decrease:
#
#   start(rank, work, now)        start work on a rank
#   is_saturated(rank)            whether other ranks occupy all cores on which the rank could continue
#   find_next_end()               when the next work is done, if no other work starts before
#   advance_to(now)               advance the time, and return the ranks whose work is done


class DedicatedCores:
    """Every rank has its own processor."""

    # Work in progress cannot be slowed down by that of others, so that its end is known at its start: a heap of ends.

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def start(self, rank: int, work: ComputeWork, now: float) -> None:
        heapq.heappush(self._ends, (now + work.seconds, rank))

    def is_saturated(self, rank: int) -> bool:
        return False

    def find_next_end(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def advance_to(self, now: float) -> Sequence[int]:
        found = []
        while self._ends and self._ends[0][0] <= now:
            found.append(heapq.heappop(self._ends)[1])
        return found


class SharedCores:
    """The ranks of each node share its cores. `threads` holds the thread count of each rank."""

    def __init__(self, machine: Machine, threads: Mapping[int, int]) -> None:
        self.machine = machine
        shared: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, count in threads.items():
            shared[machine.get_node(rank)][rank] = count
        self._hosts = {node: RunQueue(machine, own) for node, own in shared.items()}

    def start(self, rank: int, work: ComputeWork, now: float) -> None:
        self._hosts[self.machine.get_node(rank)].start(rank, work, now)

    def is_saturated(self, rank: int) -> bool:
        return self._hosts[self.machine.get_node(rank)].is_saturated(rank)

    def find_next_end(self) -> float:
        return min(host.find_next_end() for host in self._hosts.values())

    def advance_to(self, now: float) -> Sequence[int]:
        return [rank for host in self._hosts.values() for rank in host.advance_to(now)]
