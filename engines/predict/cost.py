"""Costs of each step of a rank's program on a machine: the actions, with their seconds and waits, for the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from mpi4dl_nb.engines.predict.links import AllReduceCost, count_members, estimate_all_reduce
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import adapt_to_precision
from mpi4dl_nb.engines.predict.tallies import ATTENTION, BY_ARITHMETIC, DirectionTally, OpTally, RankTally, SegmentTally
from mpi4dl_nb.engines.program.effects import Effects, Messages, Phase, Reduction
from mpi4dl_nb.engines.program.program import LEAST_BYTES, Program, Step

_CACHE_BYTES = 1 << 24  # no cache of one core is larger

# The actions of a rank in a simulated step: compute, send, wait for a message, or join an all-reduce.


@dataclass(frozen=True, slots=True)
class ComputeWork:
    """Computation that takes `seconds` if no other rank is busy.

    With all cores busy it takes `crowded` times as long.

    >>> ComputeWork(1.0, 2.0) + ComputeWork(3.0, 1.0)
    ComputeWork(seconds=4.0, crowded=1.25)
    """

    seconds: float
    crowded: float = 1.0

    def __add__(self, other: ComputeWork) -> ComputeWork:
        """Return the work of both in sequence."""
        seconds = self.seconds + other.seconds
        together = self.seconds * self.crowded + other.seconds * other.crowded
        return ComputeWork(seconds, together / seconds) if seconds else self

    def scale(self, factor: float) -> ComputeWork:
        """Return the work multiplied by `factor`."""
        return ComputeWork(self.seconds * factor, self.crowded)

    def with_minimum(self, seconds: float) -> ComputeWork:
        """Return the work, extended to at least `seconds`."""
        return self if self.seconds >= seconds else ComputeWork(seconds, self.crowded)


@dataclass(frozen=True, slots=True)
class PostSend:
    """Post a non-blocking send. `route` is (source, target, tag, number of earlier messages on these three)."""

    route: tuple[int, int, int, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class WaitMessage:
    """Wait for a message."""

    route: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class CopyMessage:
    """Copy a received message, where no link has carried it."""

    route: tuple[int, int, int, int]
    bytes: int


@dataclass(frozen=True, slots=True)
class JoinAllReduce:
    """Join an all-reduce of `bytes`, which starts when the last rank of `group` has joined.

    In the `background` of its ranks' work, messages that ranks wait for have priority over it on the links.
    """

    name: Hashable
    group: tuple[int, ...]
    bytes: int
    background: bool = False


@dataclass(frozen=True, slots=True)
class WaitAllReduce:
    """Wait until an all-reduce that this rank has joined is complete."""

    name: Hashable
    group: tuple[int, ...]


Action = ComputeWork | PostSend | WaitMessage | CopyMessage | JoinAllReduce | WaitAllReduce


def build_step_actions(
    program: Program, tally: RankTally, machine: Machine | CostModel, threads: int, recompute: bool, offload: bool
) -> list[tuple[Action, ...]]:
    """Return the actions of the rank in each step of its program, in order.

    `recompute`: segments are recomputed for backward. `offload`: saved activations are offloaded, at the rate of
    memory, or from a device to its host and back.
    """
    prices = CostModel.from_machine(machine)
    return list(_ActionBuilder(program, tally, prices, threads, recompute, offload).build_steps())


class CostModel:
    """The costs of segments and all-reduces on a machine, cached for those that are alike."""

    # A search prices thousands of plans that differ little. The keys hold all that a cost depends on, and no name, so
    # that equal layers of one network share an entry, and equal stages of different plans do.

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[Hashable, ComputeWork] = {}
        self._estimate_sum = cache(partial(estimate_all_reduce, machine))
        self._others: dict[str, CostModel] = {}

    @classmethod
    def from_machine(cls, machine: Machine | CostModel) -> CostModel:
        """Return a new cost model of a machine, or the argument itself if it is a cost model, with its cache."""
        return machine if isinstance(machine, CostModel) else cls(machine)

    def adapt_to_precision(self, precision: str) -> CostModel:
        """Return the cost model of the same machine as it computes in a precision; itself if that is not known."""
        machine = adapt_to_precision(self.machine, precision)
        if machine is self.machine:
            return self
        return self._others.setdefault(machine.name, CostModel(machine))

    def get_segment_work(self, segment: SegmentTally, threads: int, phase: Phase, recompute: bool) -> ComputeWork:
        """Return the cached result of `estimate_segment_work`."""
        key = segment.ops, segment.moves, segment.late, threads, phase, recompute
        if key not in self._known:
            self._known[key] = estimate_segment_work(segment, self.machine, threads, phase, recompute)
        return self._known[key]

    def get_all_reduce_cost(self, group: tuple[int, ...], tensor_bytes: int) -> AllReduceCost:
        """Return the cached result of `estimate_all_reduce` for the ranks of a group."""
        members = count_members(group, self.machine.node_ranks if self.machine.between else None)
        return self._estimate_sum(members, tensor_bytes)


def estimate_segment_work(
    segment: SegmentTally, machine: Machine, threads: int, phase: Phase, recompute: bool = False
) -> ComputeWork:
    """Return the work of one phase of a segment on one or several threads."""
    # Phases, and what they compute in a segment with (`late`) and without matrices among its weights:
    #
    #              BACKWARD            INPUTS              WEIGHTS
    #   late       all gradients       of inputs           of weights
    #   not late   all gradients       all gradients       nothing
    #
    # INPUTS and WEIGHTS are the two halves of backward in a zero-bubble schedule. What is recomputed for the first half
    # is kept for the second.
    if phase is Phase.FORWARD:
        kernels = (_estimate_kernel(machine, machine.call_s, threads, op.kind, *count_work(op)) for op in segment.ops)
        # A device cannot finish kernels faster than its host launches them.
        return sum(kernels, ComputeWork(0.0)).with_minimum(machine.least_s * len(segment.ops))
    if phase is Phase.WEIGHTS and not segment.late:
        return ComputeWork(0.0)
    way = phase if segment.late else Phase.BACKWARD
    back = sum((_estimate_backward(op, machine, threads, way) for op in segment.ops), ComputeWork(0.0))
    if phase is not Phase.WEIGHTS:
        # A gradient that is added to another one, or copied.
        for size in segment.moves:
            back += _estimate_kernel(machine, machine.call_s, threads, "pointwise", size, (size,))
    back = back.with_minimum(machine.least_s * sum(op.gradients > 0 for op in segment.ops))
    recomputed = recompute and phase is not Phase.WEIGHTS
    return back + estimate_segment_work(segment, machine, threads, Phase.FORWARD) if recomputed else back


def count_work(op: OpTally) -> tuple[int, tuple[float, ...]]:
    """Return the units of work of a call in forward, and the size that its speed depends on: see `Speed`."""
    if op.kind not in BY_ARITHMETIC:
        return op.bytes, (op.bytes,)
    if op.kind in ATTENTION:
        return op.flops, op.shape
    dot, filters, *images = op.shape or (1, 1)
    return op.flops, (dot, filters, max(1.0, op.flops / (2 * dot * filters)), *images)


def _estimate_backward(op: OpTally, machine: Machine, threads: int, phase: Phase) -> ComputeWork:
    """Return the work of all gradients of a call, or of those of its inputs or weights alone."""
    if not op.gradients:
        return ComputeWork(0.0)
    amount, at = count_work(op)
    # Kernels other than convolutions and products count as backward of the inputs, in zero-bubble schedules too.
    part = 0.0 if phase is Phase.WEIGHTS else 1.0
    if op.kind in BY_ARITHMETIC:
        inputs, weights = machine.estimate_gradient_parts(op.kind, at)
        both = op.gradients > 1  # else only the weights need gradients, as in a first layer
        parts = {Phase.INPUTS: inputs * both, Phase.WEIGHTS: weights}
        # `inputs` and `weights` are fractions of a backward that computes both, which counts as two forward passes.
        part = 2 * parts.get(phase, 1.0 if both else weights)
    if not part:
        return ComputeWork(0.0)
    return _estimate_kernel(machine, machine.back_call_s, threads, op.kind, amount * part, at, back=True)


def _estimate_kernel(
    machine: Machine, call_s: float, threads: int, kind: str, amount: float, at: Sequence[float], back: bool = False
) -> ComputeWork:
    seconds = machine.estimate_seconds(kind, amount, at, back)
    if threads > 1:
        seconds = machine.compute_threaded_seconds(seconds, threads, machine.estimate_spread(kind, at))
    return ComputeWork(call_s + seconds, machine.estimate_crowding(kind, at))


@dataclass
class _ActionBuilder:
    program: Program
    tally: RankTally
    prices: CostModel
    threads: int
    recompute: bool
    offload: bool

    def __post_init__(self) -> None:
        self.machine = self.prices.machine
        self.sent: Counter[tuple[int, int, int]] = Counter()
        self.awaited: Counter[tuple[int, int, int]] = Counter()
        self.sums: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def build_steps(self) -> Iterator[tuple[Action, ...]]:
        waited = False
        for step, effects in zip(self.program.steps, self.program.effects, strict=True):
            overhead_s = self.machine.instruction_s
            if effects.messages:
                overhead_s = max(overhead_s, self.machine.exchange_s)
            elif effects.reductions:
                overhead_s = self.machine.sum_s or overhead_s
            actions = (ComputeWork(overhead_s), *self._build_actions(step, effects, waited))
            waited = any(isinstance(action, WaitMessage | WaitAllReduce) for action in actions)
            yield actions

    def _build_actions(self, step: Step, effects: Effects, waited: bool) -> Iterator[Action]:
        """Yield the actions of a step; `waited` says whether the rank waited in the step before."""
        if step.instruction.is_local:
            tally = self._get_direction_tally(step).segments[step.instruction.name]
            work = self.prices.get_segment_work(tally, self.threads, step.phase, self.recompute)
            # After a wait the caches are cold: the segment's data, up to the size of a cache, is charged as copies.
            if waited and work.seconds:
                cold_bytes = min(_CACHE_BYTES, sum(op.bytes for op in tally.ops))
                yield self._estimate_copy(self.machine.cold_copies * cold_bytes)
            yield work
            if self.offload:
                # Saved activations are offloaded, and loaded again for backward.
                offloaded_bytes = sum(size for size in tally.fresh.values() if size >= LEAST_BYTES)
                if self.machine.host_per_s is not None:
                    yield ComputeWork(offloaded_bytes / min(self.machine.host_per_s, self.machine.copy_per_s))
                else:  # without a device, backward reads them in place: only forward copies
                    yield self._estimate_copy(offloaded_bytes if step.phase is Phase.FORWARD else 0)
        elif step.instruction.local_ops:
            tally = self._get_direction_tally(step).segments[step.instruction.name]
            yield self.prices.get_segment_work(tally, self.threads, step.phase, recompute=False)
        for inner in effects.inner:  # whose own computation is negligible beside a convolution
            yield from self._build_actions(step, inner, waited=False)
        if effects.messages:
            yield from self._build_messages(effects, effects.messages, step)
        if effects.updates is not None:
            machine, trained = self.machine, self.tally.trained
            # Weight, gradient and momentum, read and written.
            moved = 5 * sum(self.tally.weights[name] for name in trained)
            counted = effects.updates * len(self.program.directions)
            overhead_s = machine.update_s + machine.weight_s * len(trained) + machine.statistic_s * counted
            yield ComputeWork(overhead_s + machine.estimate_seconds("pointwise", moved, (moved,)))
        for total in effects.reductions:
            yield from self._build_all_reduce(total)

    def _get_direction_tally(self, step: Step) -> DirectionTally:
        return self.tally.ways[self.program.directions[step.micro_batch]]

    def _estimate_copy(self, tensor_bytes: float) -> ComputeWork:
        crowded = self.machine.estimate_crowding("copy", (2 * tensor_bytes,))
        return ComputeWork(tensor_bytes / self.machine.copy_per_s, crowded)

    def _build_messages(self, effects: Effects, messages: Messages, step: Step) -> Iterator[Action]:
        """Yield the actions of an exchange: pack, send, wait for each message, and unpack.

        Packing and unpacking are charged only for bytes that are copied, among them the rank's own pixels. On a host
        whose cores the ranks share, the receiver copies each message.
        """

        def make_route(counts: Counter[tuple[int, int, int]], source: int, target: int) -> tuple[int, int, int, int]:
            key = source, target, messages.tag
            counts[key] += 1
            return *key, counts[key] - 1

        rank = self.program.rank
        if messages.posts:
            yield self._estimate_copy(messages.packed)
            # All sends are posted before the first wait; otherwise two ranks that exchange halos would wait for each
            # other.
            for message in messages.sends:
                yield PostSend(make_route(self.sent, rank, message.peer), message.bytes)
        if messages.waits:
            for message in messages.receives:
                route = make_route(self.awaited, message.peer, rank)
                yield WaitMessage(route)
                yield CopyMessage(route, message.bytes)
            # The rank's own pixels are not copied where they are in place: they were computed inside the window, or are
            # gradients that may stay in that of the window, since no other reader adds to them.
            if step.phase is Phase.FORWARD:
                in_place = not self._get_direction_tally(step).roomy.isdisjoint(effects.makes)
            else:
                reads = self.program.get_direction_program(step.micro_batch).reads
                in_place = messages.in_place and all(len(reads[name]) == 1 for name in effects.makes)
            yield self._estimate_copy(messages.unpacked + (0 if in_place else messages.own))

    def _build_all_reduce(self, total: Reduction) -> Iterator[Action]:
        """Yield the actions of an all-reduce. No rank continues behind the wait before all have joined."""
        if len(total.group) < 2:
            return
        in_background = not (total.starts and total.waits)
        # All-reduces of one name are matched by their order, which is the same on all ranks of the group.
        key = total.name, total.group
        if total.starts:
            self.sums[key] += 1
            if in_background:
                yield self._estimate_copy(total.bytes)
            yield JoinAllReduce((*key, self.sums[key]), total.group, total.bytes, in_background)
        if total.waits:
            yield WaitAllReduce((*key, self.sums[key]), total.group)
            yield ComputeWork(self.prices.get_all_reduce_cost(total.group, total.bytes).fetched_s)
            if in_background:
                yield self._estimate_copy(total.bytes)
