"""Schedules ranks that share the cores of a host like an operating system: in turns of one time slice.

Ranks that join an all-reduce after each layer wait for the last of them. Three short pieces of work on two cores then
take as long as four; with evenly divided cores (processor sharing) they would take three quarters of that.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpi4dl_nb.engines.predict.cost import ComputeWork
from mpi4dl_nb.engines.predict.machine import Machine

_NOTHING_S = 1e-12
_ROUNDING = 4 * sys.float_info.epsilon  # relative to the current time: a smaller step would not advance the clock
_TURNS = 2000  # most slices of one piece of work; slices of long work are longer than the machine's


@dataclass(eq=False, slots=True)
class _ThreadTask:
    """One thread of a rank's work; `slice_s` is the rest of its time slice in seconds."""

    rank: int
    left_s: float
    crowded: float
    slice_s: float


@dataclass(eq=False, slots=True)
class _SharedCore:
    """A core: the running task, the queue, the task that just ended, and the time until which the core only polls."""

    running: _ThreadTask | None = None
    queue: deque[_ThreadTask] = field(default_factory=deque)
    ended: _ThreadTask | None = None
    looks_until_s: float = -math.inf

    @property
    def load(self) -> int:
        return len(self.queue) + (self.running is not None) + (self.ended is not None)

    @property
    def ranks(self) -> set[int]:
        return {task.rank for task in (self.running, self.ended, *self.queue) if task}

    @property
    def turn_s(self) -> float:
        """The seconds of work until the running task must yield the core if others are queued, else until it ends."""
        if self.running is None:
            return math.inf
        return min(self.running.left_s, self.running.slice_s) if self.queue else self.running.left_s


class RunQueue:
    """Run queues of the cores of one host: a task whose time slice is over moves to the end of its core's queue.

    A rank that continues with other work at once keeps its cores. A rank that has waited returns to its previous core,
    or to an idle core. An idle core takes over work queued at another core, but only after `Machine.resume_s`, in which
    its last rank polls for messages. `threads` holds the thread count of each rank.
    """

    # The way of a thread through a core:
    #
    #   start() ──> queue ──> running ── time slice over ──> end of the queue
    #                            │
    #                            └── work done ──> ended ── start() at once ──> running   (the rank keeps its core)
    #                                                │
    #                                                └── else the rank waits: the core polls for it, and runs its queue
    #
    # A core that polls takes over nothing. Only when `looks_until_s` is over, an idle core takes from the longest queue
    # of the others, as the balancing of an operating system does after a while.

    def __init__(self, machine: Machine, threads: Mapping[int, int]) -> None:
        self.machine, self.threads = machine, threads
        self.cores = [_SharedCore() for _ in range(machine.cores or len(threads))]
        self._places: dict[int, list[_SharedCore]] = {}
        self._left: Counter[int] = Counter()
        self._now = 0.0

    def start(self, rank: int, work: ComputeWork, now: float) -> None:
        """Give each of the rank's threads this work."""
        self._advance(now)
        count = self._left[rank] = min(self.threads[rank], len(self.cores))
        places = []
        # Threads that have just ended go on with the new work, within their old time slices.
        for core in self.cores:
            if (task := core.ended) and task.rank == rank:
                task.left_s, task.crowded = work.seconds, work.crowded
                core.running, core.ended = task, None
                places.append(core)
        known = [core for core in self._places.get(rank, ()) if core not in places]
        while len(places) < count:
            core = self._choose_core(known.pop(0) if known else None, places)
            core.queue.append(_ThreadTask(rank, work.seconds, work.crowded, self._compute_slice_s(work.seconds)))
            places.append(core)
        self._places[rank] = places

    def is_saturated(self, rank: int) -> bool:
        """Return whether other ranks have work for all cores."""
        return len(set().union(*(core.ranks for core in self.cores)) - {rank}) >= len(self.cores)

    def find_next_end(self) -> float:
        """Return when the next work or time slice ends, or an idle core takes over queued work."""
        for core in self.cores:
            # The rank of an ended task could have called `start` since `advance_to`, and would have kept the core. It
            # has not, so it waits: it polls for `resume_s`, and queued tasks may run.
            if core.ended:
                core.ended, core.looks_until_s = None, self._now + self.machine.resume_s
            if core.running is None and core.queue:
                core.running = core.queue.popleft()
        waiting = any(core.queue for core in self.cores)
        then = min(self._take_over(core) for core in self.cores) if waiting else math.inf
        busy = self._busy
        for core in self.cores:
            if core.running:
                then = min(then, self._now + core.turn_s * self.machine.compute_slowdown(busy, core.running.crowded))
        return then

    def advance_to(self, now: float) -> Sequence[int]:
        """Advance the time to `now` and return the ranks whose work is done."""
        self._advance(now)
        ranks = []
        for core in self.cores:
            task = core.running
            if task is None or core.turn_s > self._nothing_s:
                continue
            core.running = None
            # Without others in the queue the slice would not have ended here: `turn_s` is then all of the work.
            if task.left_s > self._nothing_s:
                task.slice_s = self._compute_slice_s(task.left_s)
                core.queue.append(task)
                continue
            # A rank is done when its last thread is. The cores of the others do not wait for that: see `find_next_end`.
            core.ended = task
            self._left[task.rank] -= 1
            if not self._left[task.rank]:
                ranks.append(task.rank)
        return ranks

    def _choose_core(self, known: _SharedCore | None, used: Sequence[_SharedCore]) -> _SharedCore:
        """Return the core for a thread: the `known` core, unless that is in use and another core is free."""

        def get_penalty(core: _SharedCore) -> tuple[bool, bool, int]:
            # The rank's own core counts as free while it polls there; other cores only after their polling time.
            free = not core.load and (core is known or core.looks_until_s <= self._now)
            return not free, core is not known, core.load

        # Operating systems keep a thread where its caches are warm, unless it would have to wait there.
        if known is not None and not known.load:
            return known  # no core would be better
        taken = set(map(id, used))
        return min((core for core in self.cores if id(core) not in taken), key=get_penalty)

    def _take_over(self, core: _SharedCore) -> float:
        """Start the oldest task of the longest queue if the core is idle; return when it can later, or infinity."""
        if core.running:
            return math.inf
        other = max(self.cores, key=lambda candidate: len(candidate.queue))
        if not other.queue:
            return math.inf
        if core.looks_until_s > self._now + self._nothing_s:
            return core.looks_until_s
        core.running = other.queue.popleft()
        places = self._places[core.running.rank]
        places[places.index(other)] = core
        return math.inf

    def _compute_slice_s(self, left_s: float) -> float:
        return max(self.machine.slice_s, left_s / _TURNS)

    @property
    def _nothing_s(self) -> float:
        return max(_NOTHING_S, _ROUNDING * self._now)

    @property
    def _busy(self) -> int:
        """The number of ranks (not threads) that run: ranks compete for memory; `Speed.spread` covers threads."""
        return len({core.running.rank for core in self.cores if core.running})

    def _advance(self, now: float) -> None:
        # Who runs does not change between two calls, and neither does the slowdown.
        busy = self._busy
        for core in self.cores:
            if core.running:
                done_s = (now - self._now) / self.machine.compute_slowdown(busy, core.running.crowded)
                core.running.left_s -= done_s
                core.running.slice_s -= done_s
        self._now = now


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
        ranks = []
        while self._ends and self._ends[0][0] <= now:
            ranks.append(heapq.heappop(self._ends)[1])
        return ranks


class SharedCores:
    """The ranks of each node share its cores. `threads` holds the thread count of each rank."""

    def __init__(self, machine: Machine, threads: Mapping[int, int]) -> None:
        self.machine = machine
        shared: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, count in threads.items():
            shared[machine.get_node(rank)][rank] = count
        self._hosts = {node: RunQueue(machine, counts) for node, counts in shared.items()}

    def start(self, rank: int, work: ComputeWork, now: float) -> None:
        self._hosts[self.machine.get_node(rank)].start(rank, work, now)

    def is_saturated(self, rank: int) -> bool:
        return self._hosts[self.machine.get_node(rank)].is_saturated(rank)

    def find_next_end(self) -> float:
        return min(host.find_next_end() for host in self._hosts.values())

    def advance_to(self, now: float) -> Sequence[int]:
        return [rank for host in self._hosts.values() for rank in host.advance_to(now)]


Cores = DedicatedCores | SharedCores
