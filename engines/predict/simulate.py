"""Runs the programs of all ranks against a machine, event by event: the same programs that the ranks run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines.errors import PlanError
from engines.predict.cost import Action, Await, Finish, Join, Post, Work, priced
from engines.predict.machine import Machine
from engines.predict.processors import Own, Processors, Shared
from engines.predict.tallies import RankTally
from engines.program.program import Program
from engines.program.timeline import Event, Timeline
from engines.program.traffic import sent

__all__ = ["simulate"]


def simulate(
    programs: Sequence[Program],
    tallies: Sequence[RankTally],
    machine: Machine,
    threads: Sequence[int],
    again: bool = False,
) -> Timeline:
    """The timeline of a training step as the machine would do it, all ranks beginning at once.

    A rank does its steps in order; messages leave without being waited for, and whoever reads one waits for it; a sum
    is complete when all have come. `threads` are those of each rank, `again` says that segments are computed again for
    backward. Raises PlanError where ranks would wait for ever.
    """
    lanes = [
        _Lane(program, priced(program, tally, machine, count, again))
        for program, tally, count in zip(programs, tallies, threads, strict=True)
    ]
    shared = Shared(machine, {lane.program.rank: count for lane, count in zip(lanes, threads, strict=True)})
    return _Simulation(lanes, shared if machine.cores else Own()).run()


@dataclass
class _Lane:
    """One rank's place in its program."""

    program: Program
    actions: Sequence[tuple[Action, ...]]
    step: int = 0
    action: int = 0
    began_s: float = 0.0
    waits_from_s: float | None = None
    waited_s: float = 0.0
    events: list[Event] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.step == len(self.actions)

    def go_on(self, now: float) -> None:
        """Waiting, if it waited, is over."""
        if self.waits_from_s is not None:
            self.waited_s += now - self.waits_from_s
            self.waits_from_s = None

    def end_step(self, now: float) -> None:
        step = self.program.steps[self.step]
        count = sum(part.bytes for part in sent(step))
        self.events.append(Event.of(self.program.rank, step, self.began_s, now, count, self.waited_s))
        self.step, self.action, self.began_s, self.waited_s = self.step + 1, 0, now, 0.0


@dataclass
class _Sum:
    """Who has come to a sum; when it is complete, once all have."""

    come: int = 0
    complete_s: float | None = None
    waiting: list[int] = field(default_factory=list)


class _Simulation:
    """Ranks that can go on do so; then time passes to the next end of work, arrival or sum."""

    def __init__(self, lanes: Sequence[_Lane], processors: Processors) -> None:
        self.lanes = {lane.program.rank: lane for lane in lanes}
        self.processors = processors
        self.now = 0.0
        self.ready = list(self.lanes)
        self.arrived: dict[tuple[int, ...], float] = {}
        self.expected: dict[tuple[int, ...], int] = {}
        self.sums: dict[tuple[object, ...], _Sum] = {}
        self.wakes: list[tuple[float, int]] = []

    def run(self) -> Timeline:
        while True:
            while self.ready:
                self._go_on(self.lanes[self.ready.pop()])
            then = min(self.processors.next_end(), self.wakes[0][0] if self.wakes else float("inf"))
            if then == float("inf"):
                break
            self.now = max(self.now, then)
            self.ready += self.processors.ended(self.now)
            while self.wakes and self.wakes[0][0] <= self.now:
                self.ready.append(heapq.heappop(self.wakes)[1])
        self._check_done()
        return Timeline.of(lane.events for lane in self.lanes.values())

    def _go_on(self, lane: _Lane) -> None:
        """Do what can be done now, until the rank works or waits."""
        lane.go_on(self.now)
        while not lane.done:
            actions = lane.actions[lane.step]
            while lane.action < len(actions):
                action = actions[lane.action]
                lane.action += 1
                if not self._do(lane.program.rank, action):
                    lane.waits_from_s = None if isinstance(action, Work) else self.now
                    return
            lane.end_step(self.now)

    def _do(self, rank: int, action: Action) -> bool:
        """Whether the rank can go on at once; otherwise it will be told when."""
        match action:
            case Work(seconds):
                if seconds > 0:
                    self.processors.start(rank, seconds, self.now)
                return seconds <= 0
            case Post(route, seconds):
                self._post(route, self.now + seconds)
                return True
            case Await(route):
                if route not in self.arrived:
                    self.expected[route] = rank
                    return False
                return self._until(rank, self.arrived.pop(route))
            case Join(name, group, seconds):
                self._join(self.sums.setdefault(name, _Sum()), group, seconds)
                return True
            case Finish(name):
                return self._finish(rank, self.sums.setdefault(name, _Sum()))

    def _until(self, rank: int, then: float) -> bool:
        if then <= self.now:
            return True
        heapq.heappush(self.wakes, (then, rank))
        return False

    def _post(self, route: tuple[int, int, int, int], arrives_s: float) -> None:
        if route in self.expected:
            heapq.heappush(self.wakes, (arrives_s, self.expected.pop(route)))
        else:
            self.arrived[route] = arrives_s

    def _join(self, total: _Sum, group: int, seconds: float) -> None:
        total.come += 1
        if total.come == group:
            total.complete_s = self.now + seconds
            for rank in total.waiting:
                heapq.heappush(self.wakes, (total.complete_s, rank))

    def _finish(self, rank: int, total: _Sum) -> bool:
        if total.complete_s is None:
            total.waiting.append(rank)
            return False
        return self._until(rank, total.complete_s)

    def _check_done(self) -> None:
        stuck = [lane for lane in self.lanes.values() if not lane.done]
        if stuck:
            lane = stuck[0]
            step = lane.program.steps[lane.step]
            ranks = ", ".join(str(each.program.rank) for each in stuck)
            raise PlanError(
                f"The programs would wait for ever: ranks {ranks} wait, rank {lane.program.rank} in step {lane.step} "
                f"({step.instruction.name}, {step.phase.value}) for what no rank sends. Compile all ranks' programs "
                "from one plan, and give all of them."
            )
