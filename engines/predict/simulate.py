"""Discrete-event simulation of the programs of all ranks on a machine. The simulated programs are those that run."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.predict.cores import Cores, DedicatedCores, SharedCores
from mpi4dl_nb.engines.predict.cost import (
    Action,
    ComputeWork,
    CopyMessage,
    CostModel,
    JoinAllReduce,
    PostSend,
    WaitAllReduce,
    WaitMessage,
    build_step_actions,
)
from mpi4dl_nb.engines.predict.links import AllReduceCost, BackgroundAllReduce, LinkQueues
from mpi4dl_nb.engines.predict.machine import Link, Machine
from mpi4dl_nb.engines.predict.tallies import RankTally
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.program import Program, count_sent
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent


def simulate(
    programs: Sequence[Program],
    tallies: Sequence[RankTally],
    machine: Machine | CostModel,
    threads: Sequence[int],
    recompute: bool = False,
    copies: int = 1,
    offload: bool = False,
) -> Timeline:
    """Return the timeline of a training step on the machine, with all ranks starting at the same time.

    A rank runs its steps in order. Sends do not block; a rank that reads a message waits for it. An all-reduce
    completes once every rank of its group has joined. `threads` holds the thread count of each rank. `recompute`:
    segments are recomputed for backward. `offload`: the saved activations are offloaded. `engines/predict/links.py`
    describes how messages and all-reduces share the links between nodes.
    The programs may be those of the first replica alone; then `copies` consecutive replicas are simulated. Ranks that
    are not simulated behave like the simulated ones: an all-reduce waits only for its simulated ranks, but takes as
    long as for all of them. Raises PlanError if ranks would wait for ever.
    """
    prices = CostModel.from_machine(machine)
    # All replicas run the same programs: the costs of a rank's steps are computed once, and its copies share them.
    ranks = []
    for program, tally, count in zip(programs, tallies, threads, strict=True):
        actions = build_step_actions(program, tally, prices, count, recompute, offload)
        ranks.append((program, actions, [sum(part.bytes for part in count_sent(step)) for step in program.effects]))
    states = [_RankState(*rank, copy * len(programs), copy) for copy in range(copies) for rank in ranks]
    counts = {state.rank: count for state, count in zip(states, list(threads) * copies, strict=True)}
    cores = SharedCores(prices.machine, counts) if prices.machine.cores else DedicatedCores()
    return _Simulation(states, cores, prices, len(programs)).run()


@dataclass
class _RankState:
    """One rank and its position in its program.

    In a further replica, the program is that of the rank of the first replica whose number is smaller by `shift`.
    """

    program: Program
    actions: Sequence[tuple[Action, ...]]
    sent: Sequence[int]
    shift: int
    copy: int
    step: int = 0
    events: list[TimelineEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank = self.program.rank + self.shift
        self.random = Random(self.rank)  # seeded by rank, so that repeated simulations agree


@dataclass
class _AllReduceState:
    """An all-reduce in progress: its simulated ranks (`here`), how many have joined, completion, and waiting ranks."""

    cost: AllReduceCost
    here: Sequence[int]
    background: bool
    joined: int = 0
    passing: BackgroundAllReduce | None = None
    complete: bool = False
    waiting: list[int] = field(default_factory=list)


Route = tuple[int, int, int, int]


class _Simulation:
    """The event loop: advances every rank that can run, then moves time to the next end, arrival or all-reduce."""

    # A message between two nodes:
    #
    #   sender    PostSend                              the rank continues at once
    #                └─ link "out" ──> _pass_on
    #                                     └─ link "in" ──> arrived[route]
    #   receiver            WaitMessage . . . . . . . . . . . . └─> _end_wait
    #
    # Whichever comes first leaves a note for the other: a message in `arrived`, with the time at which it can be read,
    # a waiting rank in `expected`. Routes count the messages of one sender, receiver and tag, so that they match in
    # order, as they do in MPI.

    def __init__(self, states: Sequence[_RankState], cores: Cores, prices: CostModel, replica_ranks: int) -> None:
        self.states = {state.rank: state for state in states}
        self.cores, self.prices, self.replica_ranks = cores, prices, replica_ranks
        self.machine, self.links = prices.machine, LinkQueues(prices.machine)
        self.now = 0.0
        self.running = {state.rank: self._run_rank(state) for state in states}
        self.ready = deque(self.states)
        self.arrived: dict[Route, float] = {}
        self.expected: dict[Route, int] = {}
        self.sums: dict[Hashable, _AllReduceState] = {}
        self.later: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0

    def run(self) -> Timeline:
        # Time stands still while ranks run, and moves when none is ready:
        #
        #   ready ranks run, until each computes or waits ──> now = the earliest end of work, or event
        #        ^                                                     │
        #        └──────── ranks whose work or wait is over <──────────┘
        while True:
            # Run all ready ranks before time advances: their sends and joins may schedule earlier events.
            while self.ready:
                next(self.running[self.ready.popleft()], None)
            then = min(self.cores.find_next_end(), self.later[0][0] if self.later else math.inf)
            if then == math.inf:
                break
            self.now = max(self.now, then)
            # The cores advance first, so that the events at `now` see the state of the cores at that time.
            self.ready.extend(self.cores.advance_to(self.now))
            while self.later and self.later[0][0] <= self.now:
                heapq.heappop(self.later)[2]()
        # Nothing more will happen: a rank that is not at its end waits for a message or all-reduce that never comes.
        if stuck := [state for state in self.states.values() if state.step < len(state.actions)]:
            state = stuck[0]
            step = state.program.steps[state.step]
            ranks = ", ".join(str(blocked.rank) for blocked in stuck)
            raise PlanError(
                f"The programs would wait for ever: ranks {ranks} wait, rank {state.rank} in step {state.step} "
                f"({step.instruction.name}, {step.phase.value}) for what no rank sends. Compile all ranks' programs "
                "from one plan, and give all of them."
            )
        return Timeline.of(state.events for state in self.states.values())

    def _schedule(self, then: float, event: Callable[[], None]) -> None:
        self.count += 1  # ties in time are broken by the order of scheduling, which keeps the simulation deterministic
        heapq.heappush(self.later, (then, self.count, event))

    def _end_wait(self, rank: int) -> None:
        """Resume a rank whose wait is over, or delay it by `resume_s` because others occupy all cores."""
        if self.machine.resume_s and self.cores.is_saturated(rank):
            self._schedule(self.now + self.machine.resume_s, partial(self.ready.append, rank))
        else:
            self.ready.append(rank)

    def _run_rank(self, state: _RankState) -> Iterator[None]:
        """Run the program of a rank; each `yield` is a computation or a wait, after which the rank is resumed."""
        began_s = self.now
        for actions, step, sent in zip(state.actions, state.program.steps, state.sent, strict=True):
            waited_s = 0.0
            for action in actions:
                if not self._run_action(state, action):
                    since_s = self.now
                    yield
                    if not isinstance(action, ComputeWork | CopyMessage):
                        waited_s += self.now - since_s
            # In a timeline of several replicas, each has micro-batches of its own; they meet in the update.
            if state.copy and step.phase is not Phase.UPDATE:
                step = replace(step, micro_batch=step.micro_batch + state.copy * len(state.program.directions))
            state.events.append(TimelineEvent.of(state.rank, step, began_s, self.now, sent, waited_s))
            state.step += 1
            began_s = self.now

    def _run_action(self, state: _RankState, action: Action) -> bool:
        """Run one action and return whether the rank can continue at once; otherwise an event resumes it."""
        match action:
            case ComputeWork():
                return self._start_work(state, action)
            case PostSend(route, count):
                self._post_send(_shift_route(route, state.shift), count)
                return True
            case WaitMessage(route):
                route = _shift_route(route, state.shift)
                then = self.arrived.pop(route, None)
                if then is None:
                    self.expected[route] = state.rank
                elif then > self.now:
                    self._schedule(then, partial(self._end_wait, state.rank))
                return then is not None and then <= self.now
            case CopyMessage(route, count):
                here = self.machine.needs_core_copy(*_shift_route(route, state.shift)[:2])
                return not here or self._start_work(state, ComputeWork(count / self.machine.bytes_per_s))
            case JoinAllReduce():
                self._join_all_reduce(self._get_all_reduce(state, action))
                return True
            case WaitAllReduce():
                total = self._get_all_reduce(state, action)
                if not total.complete:
                    total.waiting.append(state.rank)
                return total.complete

    def _start_work(self, state: _RankState, work: ComputeWork) -> bool:
        if work.seconds > 0:
            jitter = self.machine.jitter
            # An exponential share with mean 1 keeps the mean duration, but of several ranks the slowest counts.
            drawn = work.scale(1 - jitter + jitter * state.random.expovariate(1.0)) if jitter else work
            self.cores.start(state.rank, drawn, self.now)
        return work.seconds <= 0

    def _post_send(self, route: Route, count: int) -> None:
        link = self.links.find_link(route[0], route[1])
        # A send never blocks. How long the message is under way depends on links that other messages use, too, so that
        # its arrival is an event of its own.
        if link is None:
            # The receiver's core copies the bytes (`CopyMessage`) where ranks share a host; then only the latency
            # counts here.
            travels = 0 if self.machine.needs_core_copy(route[0], route[1]) else count
            self._record_arrival(route, self.now + (self.machine.latency_s + travels / self.machine.bytes_per_s))
        else:
            # Cut-through: the second link sees the beginning of the message as soon as the first link starts to send
            # it.
            start_s = self.links.schedule_message(route[0], "out", count / link.bytes_per_s, self.now)
            self._schedule(start_s, partial(self._pass_on, route, link, count))

    def _pass_on(self, route: Route, link: Link, count: int) -> None:
        """Send a message from another node through the link of its receiver's node."""
        seconds = count / link.bytes_per_s
        start_s = self.links.schedule_message(route[1], "in", seconds, self.now)
        self._record_arrival(route, start_s + seconds + link.latency_s)

    def _record_arrival(self, route: Route, then: float) -> None:
        if route in self.expected:
            self._schedule(then, partial(self._end_wait, self.expected.pop(route)))
        else:
            self.arrived[route] = then

    def _get_all_reduce(self, state: _RankState, action: JoinAllReduce | WaitAllReduce) -> _AllReduceState:
        """Return the state of an all-reduce, creating it for the first rank that joins.

        A group within one replica has one state for each copy; a group over all replicas has one state.
        """
        in_replica = len(action.group) <= self.replica_ranks and max(action.group) < self.replica_ranks
        name = (state.copy if in_replica else 0, action.name)
        if isinstance(action, JoinAllReduce) and name not in self.sums:
            group = tuple(rank + state.shift for rank in action.group) if in_replica else action.group
            # Ranks that are not simulated never join, so completion depends on the simulated prefix of the sorted group
            # alone.
            here = group if in_replica else group[: bisect_left(group, len(self.states))]
            cost = self.prices.get_all_reduce_cost(group, action.bytes)
            self.sums[name] = _AllReduceState(cost, here, action.background)
        return self.sums[name]

    def _join_all_reduce(self, total: _AllReduceState) -> None:
        total.joined += 1
        if total.joined < len(total.here):
            return
        cost = total.cost
        if total.background:
            total.passing = self.links.schedule_background(total.here, cost, self.now)
            self._schedule(total.passing.end_s + cost.latency_s, partial(self._end_all_reduce, total))
        else:
            # All ranks wait for it, so that it takes its turn on the links like any message. Within a node, all-reduces
            # of different groups do not meet.
            start_s = self.links.schedule_all_reduce(total.here, cost.carried_s, self.now) if cost.crosses else self.now
            self._schedule(start_s + cost.carried_s + cost.latency_s, partial(self._end_all_reduce, total))

    def _end_all_reduce(self, total: _AllReduceState) -> None:
        # Foreground traffic that used the links in the meantime has delayed a background all-reduce: look again later.
        more_s = self.links.update_delay(total.passing) if total.passing else 0.0
        if more_s > 0:
            self._schedule(self.now + more_s, partial(self._end_all_reduce, total))
        else:
            total.complete = True
            for rank in total.waiting:
                self._schedule(self.now, partial(self._end_wait, rank))


def _shift_route(route: Route, shift: int) -> Route:
    return (route[0] + shift, route[1] + shift, route[2], route[3]) if shift else route
