"""Seconds of each step of a rank's program on a machine, and what it waits for: all that a simulation needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engines.offload.least import LEAST_BYTES
from engines.predict.actions import Action, Await, Fetch, Finish, Join, Post, Work
from engines.predict.classes import BY_ARITHMETIC
from engines.predict.machine import Machine
from engines.predict.sums import SumCost, members_of, sum_cost
from engines.predict.tallies import OpTally, RankTally, SegmentTally, WayTally
from engines.program.instructions import (
    Agree,
    AllReduce,
    Compute,
    CountLabels,
    Exchange,
    Phase,
    ShareStatistics,
    SumGradients,
    Update,
)
from engines.program.program import Program, Step
from engines.program.staging import staged
from engines.spatial.moves import Move

__all__ = ["Prices", "amount_of", "priced", "segment_work"]

_CACHE_BYTES = 1 << 24  # of one core's work no cache is larger


def priced(
    program: Program, tally: RankTally, machine: Machine | Prices, threads: int, again: bool, away: bool = False
) -> list[tuple[Action, ...]]:
    """What the rank does in each step of its program, in order.

    `again`: segments are computed again for backward; `away`: what is kept for it is put away, as fast as memory takes
    it, or from a device to its host and back.
    """
    return list(_Pricing(program, tally, Prices.of_machine(machine), threads, again, away).steps())


class Prices:
    """What segments and sums take on a machine; those that are alike are asked for once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[Hashable, Work] = {}
        self._sums: dict[tuple[tuple[int, ...], int], SumCost] = {}

    @classmethod
    def of_machine(cls, machine: Machine | Prices) -> Prices:
        """Those of a machine that nobody has asked for prices yet, or those that are known already."""
        return machine if isinstance(machine, Prices) else cls(machine)

    def of(self, segment: SegmentTally, threads: int, phase: Phase, again: bool) -> Work:
        """As `segment_work`."""
        key = segment.ops, segment.moves, segment.late, threads, phase, again
        if key not in self._known:
            self._known[key] = segment_work(segment, self.machine, threads, phase, again)
        return self._known[key]

    def sum(self, group: tuple[int, ...], count_bytes: int) -> SumCost:
        """As `sum_cost`, for the ranks of a group."""
        members = members_of(group, self.machine.node_ranks if self.machine.between else None)
        if (members, count_bytes) not in self._sums:
            self._sums[members, count_bytes] = sum_cost(self.machine, members, count_bytes)
        return self._sums[members, count_bytes]


def segment_work(segment: SegmentTally, machine: Machine, threads: int, phase: Phase, again: bool = False) -> Work:
    """One thread's, or some threads', work on a segment walked one way."""
    if phase is Phase.FORWARD:
        forward = sum((_forward(op, machine, threads) for op in segment.ops), Work(0.0))
        return forward.at_least(machine.least_s * len(segment.ops))
    if phase is Phase.WEIGHTS and not segment.late:
        return Work(0.0)
    way = phase if segment.late else Phase.BACKWARD
    back = sum((_back(op, machine, threads, way) for op in segment.ops), Work(0.0))
    if phase is not Phase.WEIGHTS:
        back = sum((_moved(size, machine, threads) for size in segment.moves), back)
    back = back.at_least(machine.least_s * sum(op.gradients > 0 for op in segment.ops))
    recomputed = again and phase is not Phase.WEIGHTS
    return back + segment_work(segment, machine, threads, Phase.FORWARD) if recomputed else back


def amount_of(op: OpTally) -> tuple[int, tuple[float, ...]]:
    """Units of work going forward, and the size that their speed depends on: see `Speed`."""
    if op.kind not in BY_ARITHMETIC:
        return op.bytes, (op.bytes,)
    dot, filters, *images = op.shape or (1, 1)
    return op.flops, (dot, filters, max(1.0, op.flops / (2 * dot * filters)), *images)


def _forward(op: OpTally, machine: Machine, threads: int) -> Work:
    amount, at = amount_of(op)
    return _kernel(machine, machine.call_s, threads, op.kind, amount, at)


def _moved(size: int, machine: Machine, threads: int) -> Work:
    """A gradient is added to another one, or copied."""
    return _kernel(machine, machine.call_s, threads, "pointwise", size, (size,))


def _back(op: OpTally, machine: Machine, threads: int, phase: Phase) -> Work:
    """All of a call's gradients, or its inputs' or weights' alone."""
    if not op.gradients:
        return Work(0.0)
    amount, at = amount_of(op)
    part = 0.0 if phase is Phase.WEIGHTS else 1.0
    if op.kind in BY_ARITHMETIC:
        inputs, weights = machine.apart(op.kind, at)
        both = op.gradients > 1  # else the weights' alone, as in a first layer
        parts = {Phase.INPUTS: inputs * both, Phase.WEIGHTS: weights}
        part = 2 * parts.get(phase, 1.0 if both else weights)
    return _kernel(machine, machine.back_call_s, threads, op.kind, amount * part, at, back=True) if part else Work(0.0)


def _kernel(
    machine: Machine, call_s: float, threads: int, kind: str, amount: float, at: Sequence[float], back: bool = False
) -> Work:
    seconds = machine.seconds(kind, amount, at, back)
    if threads > 1:
        seconds = machine.threaded(seconds, threads, machine.spread(kind, at))
    return Work(call_s + seconds, machine.crowded(kind, at))


@dataclass
class _Pricing:
    program: Program
    tally: RankTally
    prices: Prices
    threads: int
    again: bool
    away: bool

    def __post_init__(self) -> None:
        self.machine = self.prices.machine
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.awaited: Counter[tuple[int, int, int]] = Counter()
        self.sums: Counter[tuple[int, ...]] = Counter()

    def steps(self) -> Iterator[tuple[Action, ...]]:
        waited = False
        for step in self.program.steps:
            actions = (Work(self._overhead_s(step)), *self._of(step, waited))
            waited = any(isinstance(action, Await | Finish) for action in actions)
            yield actions

    def _overhead_s(self, step: Step) -> float:
        """What the instruction takes by itself, whatever its size."""
        machine = self.machine
        match step.instruction:
            case Exchange():
                return max(machine.instruction_s, machine.exchange_s)
            case AllReduce() | CountLabels() | ShareStatistics() | Agree() | SumGradients():
                return machine.sum_s or machine.instruction_s
        return machine.instruction_s

    def _of(self, step: Step, waited: bool) -> Iterable[Action]:
        """`waited`: the rank did so just before."""
        match step.instruction:
            case Compute() as segment:
                tally = self._way(step).segments[segment.name]
                work = self.prices.of(tally, self.threads, step.phase, self.again)
                if waited and work.seconds:
                    yield self._copied(self.machine.cold_copies * min(_CACHE_BYTES, sum(op.bytes for op in tally.ops)))
                yield work
                if self.away:
                    yield self._carried(sum(size for size in tally.fresh.values() if size >= LEAST_BYTES), step.phase)
            case Exchange() as exchange:
                yield from self._exchange(exchange, step)
            case CountLabels() as counting:  # what it computes is nothing beside a convolution
                for each in counting.program.of_kind(AllReduce):
                    yield from self._sum(each.group, each.bytes)
                yield from self._sum(counting.group, counting.bytes)
            case AllReduce() | ShareStatistics() | Agree() as total:
                yield from self._sum(total.group, total.bytes)
            case SumGradients() as bucket:
                yield from self._gradients(bucket, begins=step.phase is not Phase.UPDATE)
            case Update() as update:
                yield from self._update(update)

    def _way(self, step: Step) -> WayTally:
        return self.tally.ways[self.program.directions[step.micro_batch]]

    def _copied(self, count_bytes: float) -> Work:
        return Work(count_bytes / self.machine.copy_per_s, self.machine.crowded("copy", (2 * count_bytes,)))

    def _carried(self, count_bytes: float, phase: Phase) -> Work:
        """What is kept for backward is put away, and comes back where it cannot be read where it lies."""
        host_per_s = self.machine.host_per_s
        if host_per_s is None:
            return self._copied(count_bytes if phase is Phase.FORWARD else 0)
        return Work(count_bytes / min(host_per_s, self.machine.copy_per_s))

    def _exchange(self, exchange: Exchange, step: Step) -> Iterator[Action]:
        """Pack, send, wait for what is expected, unpack, where that is needed; so with the rank's own pixels.

        On a host whose cores the ranks share, whoever waits for a message fetches it, when it has the time for that.
        """
        forward = step.phase is Phase.FORWARD
        sends, receives = exchange.sends, exchange.receives
        if not forward:
            sends, receives = self._turned(receives), self._turned(sends)
        tag = exchange.tag + (not forward)
        packed, unpacked = staged(exchange, forward)
        yield self._copied(packed)
        for move in sends:
            yield Post(self._route(self.sent, (move.source, move.target, tag)), exchange.bytes_of([move]))
        for move in receives:
            route = self._route(self.awaited, (move.source, move.target, tag))
            yield Await(route)
            yield Fetch(route, exchange.bytes_of([move]))
        own = 0
        if exchange.window and exchange.own and not self._spared(exchange, step):
            own = exchange.bytes_of([Move(0, 0, exchange.own & exchange.window)])
        yield self._copied(unpacked + own)

    def _spared(self, exchange: Exchange, step: Step) -> bool:
        """Whether a rank's own pixels lie in the window already, or their gradients may stay in the window's."""
        if step.phase is Phase.FORWARD:
            return exchange.target in self._way(step).roomy
        return exchange.surrounds and len(self.program.way(step.micro_batch).reads[exchange.source]) == 1

    @staticmethod
    def _turned(moves: Sequence[Move]) -> tuple[Move, ...]:
        return tuple(Move(move.target, move.source, move.tile) for move in moves)

    @staticmethod
    def _route(counts: Counter[tuple[int, int, int]], place: tuple[int, int, int]) -> tuple[int, int, int, int]:
        counts[place] += 1
        return (*place, counts[place] - 1)

    def _sum(self, group: tuple[int, ...], count_bytes: int) -> Iterator[Action]:
        """Messages and additions; no rank goes on before all have come."""
        if len(group) < 2:
            return
        self.sums[group] += 1
        name = ("sum", group, self.sums[group])
        yield Join(name, group, count_bytes)
        yield Finish(name, group)
        yield Work(self.prices.sum(group, count_bytes).fetched_s)

    def _gradients(self, bucket: SumGradients, begins: bool) -> Iterator[Action]:
        name = ("gradients", bucket.name)
        if begins:
            yield self._copied(bucket.bytes)
            yield Join(name, bucket.group, bucket.bytes, behind=True)
        else:
            yield Finish(name, bucket.group)
            yield Work(self.prices.sum(bucket.group, bucket.bytes).fetched_s)
            yield self._copied(bucket.bytes)

    def _update(self, update: Update) -> Iterator[Action]:
        machine, trained = self.machine, self.tally.trained
        moved = 5 * sum(self.tally.weights[name] for name in trained)  # weight, gradient and momentum, read and written
        counted = len(update.statistics) * len(self.program.directions)
        moving_s = machine.seconds("pointwise", moved, (moved,))
        yield Work(machine.update_s + machine.weight_s * len(trained) + machine.statistic_s * counted + moving_s)
        for group in sorted({entry.mean_over for entry in update.statistics if entry.mean_over}):
            yield from self._sum(group, 16)
