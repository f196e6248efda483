"""Seconds of each step of a rank's program on a machine, and what it waits for: all that a simulation needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engines.comm.sums import sent_by_each
from engines.predict.classes import BY_ARITHMETIC
from engines.predict.machine import Machine
from engines.predict.tallies import OpTally, RankTally, SegmentTally, WayTally
from engines.program.instructions import (
    Agree,
    AllReduce,
    Compute,
    Exchange,
    Phase,
    ShareStatistics,
    SumGradients,
    Update,
)
from engines.program.program import Program, Step
from engines.spatial.moves import Move

__all__ = ["Action", "Await", "Finish", "Join", "Post", "Work", "amount_of", "priced", "segment_seconds"]


@dataclass(frozen=True, slots=True)
class Work:
    """The rank computes for so long, if it has its cores for itself."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Post:
    """A message leaves; nobody here waits for it. `route` is (source, target, tag, how many went there before)."""

    route: tuple[int, int, int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for a message."""

    route: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Join:
    """Take part in a sum, which is complete `seconds` after the last of `group` has come."""

    name: tuple[object, ...]
    group: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until a sum is complete that this rank has taken part in."""

    name: tuple[object, ...]


Action = Work | Post | Await | Join | Finish


def priced(program: Program, tally: RankTally, machine: Machine, threads: int, again: bool) -> list[tuple[Action, ...]]:
    """What the rank does in each step of its program, in order. `again`: segments are computed again for backward."""
    return list(_Pricing(program, tally, machine, threads, again).steps())


def segment_seconds(segment: SegmentTally, machine: Machine, threads: int, phase: Phase, again: bool = False) -> float:
    """One thread's, or some threads', time for a segment walked one way."""
    if phase is Phase.FORWARD:
        return sum(_forward(op, machine, threads) for op in segment.ops)
    part = 1.0
    if segment.late and phase in (Phase.INPUTS, Phase.WEIGHTS):
        part = 0.5
    elif phase is Phase.WEIGHTS:
        return 0.0
    back = part * sum(_back(op, machine, threads) for op in segment.ops)
    recomputed = again and phase is not Phase.WEIGHTS
    return back + (segment_seconds(segment, machine, threads, Phase.FORWARD) if recomputed else 0.0)


def amount_of(op: OpTally) -> tuple[int, tuple[float, ...]]:
    """Units of work going forward, and the size that their speed depends on: see `Speed`."""
    if op.kind not in BY_ARITHMETIC:
        return op.bytes, (op.bytes,)
    dot, filters = op.shape if op.shape else (1, 1)
    return op.flops, (dot, filters, max(1.0, op.flops / (2 * dot * filters)))


def _forward(op: OpTally, machine: Machine, threads: int) -> float:
    amount, at = amount_of(op)
    return machine.call_s + machine.seconds(op.kind, amount, at) / machine.threaded(threads)


def _back(op: OpTally, machine: Machine, threads: int) -> float:
    if not op.gradients:
        return 0.0
    amount, at = amount_of(op)
    if op.kind in BY_ARITHMETIC:
        amount *= min(2, op.gradients)
    return machine.back_call_s + machine.seconds(op.kind, amount, at, back=True) / machine.threaded(threads)


@dataclass
class _Pricing:
    program: Program
    tally: RankTally
    machine: Machine
    threads: int
    again: bool

    def __post_init__(self) -> None:
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.awaited: Counter[tuple[int, int, int]] = Counter()
        self.sums: Counter[tuple[int, ...]] = Counter()

    def steps(self) -> Iterator[tuple[Action, ...]]:
        for step in self.program.steps:
            yield (Work(self.machine.instruction_s), *self._of(step))

    def _of(self, step: Step) -> Iterable[Action]:
        match step.instruction:
            case Compute() as segment:
                tally = self._way(step).segments[segment.name]
                yield Work(segment_seconds(tally, self.machine, self.threads, step.phase, self.again))
            case Exchange() as exchange:
                yield from self._exchange(exchange, step)
            case AllReduce() as total:
                yield from self._sum(total.group, total.spec.bytes)
            case ShareStatistics() | Agree() as total:
                yield from self._sum(total.group, total.bytes)
            case SumGradients() as bucket:
                yield from self._gradients(bucket, begins=step.phase is not Phase.UPDATE)
            case Update() as update:
                yield from self._update(update)

    def _way(self, step: Step) -> WayTally:
        return self.tally.ways[self.program.directions[step.micro_batch]]

    def _copied(self, count_bytes: float) -> Work:
        return Work(count_bytes / self.machine.copy_per_s)

    def _exchange(self, exchange: Exchange, step: Step) -> Iterator[Action]:
        """Pack, send, wait for what is expected, unpack; the rank's own pixels are copied where they have no room."""
        forward = step.phase is Phase.FORWARD
        sends, receives = exchange.sends, exchange.receives
        if not forward:
            sends, receives = self._turned(receives), self._turned(sends)
        tag = exchange.tag + (not forward)
        yield self._copied(exchange.bytes_of(sends))
        for move in sends:
            seconds = self.machine.latency_s + exchange.bytes_of([move]) / self.machine.bytes_per_s
            yield Post(self._route(self.sent, (move.source, move.target, tag)), seconds)
        for move in receives:
            yield Await(self._route(self.awaited, (move.source, move.target, tag)))
        own = 0
        if forward and exchange.window and exchange.own and exchange.target not in self._way(step).roomy:
            own = exchange.bytes_of([Move(0, 0, exchange.own & exchange.window)])
        yield self._copied(exchange.bytes_of(receives) + own)

    @staticmethod
    def _turned(moves: Sequence[Move]) -> tuple[Move, ...]:
        return tuple(Move(move.target, move.source, move.tile) for move in moves)

    @staticmethod
    def _route(counts: Counter[tuple[int, int, int]], place: tuple[int, int, int]) -> tuple[int, int, int, int]:
        counts[place] += 1
        return (*place, counts[place] - 1)

    def _seconds_of_sum(self, count_bytes: int, ranks: int) -> float:
        messages, sent = sent_by_each(count_bytes, ranks)
        rounds = 2 if messages > ranks - 1 else 1
        return rounds * self.machine.latency_s + sent / self.machine.bytes_per_s

    def _sum(self, group: tuple[int, ...], count_bytes: int) -> Iterator[Action]:
        """Messages and additions; no rank goes on before all have come."""
        if len(group) < 2:
            return
        self.sums[group] += 1
        name = ("sum", group, self.sums[group])
        yield Join(name, len(group), self._seconds_of_sum(count_bytes, len(group)))
        yield Finish(name)

    def _gradients(self, bucket: SumGradients, begins: bool) -> Iterator[Action]:
        name = ("gradients", bucket.name)
        if begins:
            yield self._copied(bucket.bytes)
            yield Join(name, len(bucket.group), self._seconds_of_sum(bucket.bytes, len(bucket.group)))
        else:
            yield Finish(name)
            yield self._copied(bucket.bytes)

    def _update(self, update: Update) -> Iterator[Action]:
        machine, trained = self.machine, self.tally.trained
        moved = 5 * sum(self.tally.weights[name] for name in trained)  # weight, gradient and momentum, read and written
        counted = len(update.statistics) * len(self.program.directions)
        yield Work(machine.weight_s * len(trained) + machine.statistic_s * counted + moved / machine.copy_per_s)
        for group in sorted({entry.mean_over for entry in update.statistics if entry.mean_over}):
            yield from self._sum(group, 16)
