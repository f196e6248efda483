"""Simulates the memory of a rank's program, with tensors held and released as in `engines/program/micro_batch.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from mpi4dl_nb.engines.comm.all_reduce_sizes import compute_workspace_bytes
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.tallies import Block, DirectionTally, RankTally, SegmentTally
from mpi4dl_nb.engines.program.effects import Effects, Instruction, Messages, Phase
from mpi4dl_nb.engines.program.program import LEAST_BYTES, DirectionProgram, LiveValues, Program, Step

# Tracks memory: the blocks that are held, how often, and their bytes.


class MemoryTracker:
    """Reference-counted memory blocks by key, each counted once while it is held; `now` are the bytes by kind.

    >>> ledger = MemoryTracker()
    >>> ledger.hold("x", {"activations": 8}), ledger.hold("x"), ledger.release("x"), ledger.total
    (None, None, None, 8)
    >>> ledger.release("x"), ledger.total, ledger.peak
    (None, 0, 8)
    """

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peak_step = 0
        self.step = 0
        self._held: dict[Hashable, tuple[int, Mapping[str, int]]] = {}

    def hold(self, key: Hashable, parts: Mapping[str, int] | None = None) -> None:
        """Add one reference to a block; `parts` are its bytes by kind, used if the block is new."""
        count, there = self._held.get(key, (0, parts or {}))
        self._held[key] = count + 1, there
        if not count:
            self._add(there, 1)

    def release(self, key: Hashable) -> None:
        """Remove one reference; the last one frees the block."""
        count, parts = self._held.pop(key)
        if count > 1:
            self._held[key] = count - 1, parts
        else:
            self._add(parts, -1)

    @property
    def held(self) -> dict[Hashable, Mapping[str, int]]:
        """The bytes by kind of each block that is held now."""
        return {key: parts for key, (_, parts) in self._held.items()}

    def add_transient(self, **kinds: int) -> None:
        """Count bytes that are in use for a moment only: they can raise the peak, but are not held."""
        if self.total + sum(kinds.values()) > self.peak:
            self.peak = self.total + sum(kinds.values())
            self.at_peak = dict(self.now + Counter(kinds))
            self.peak_step = self.step

    def _add(self, parts: Mapping[str, int], sign: int) -> None:
        for kind, size in parts.items():
            self.now[kind] += sign * size
            self.total += sign * size
        if self.total > self.peak:
            self.add_transient()


@dataclass
class GradientTracker:
    """The gradients during backward through a segment; `arrived` are the values that have one, initially the outputs.

    The gradients of the outputs are held by the caller. `parts` are values whose gradient is a part of that of a larger
    value. `moved` are the bytes read and written by additions of gradients.
    """

    ledger: MemoryTracker
    arrived: set[str]
    lies_in: dict[str, Block] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    moved: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, name: str, size: int, passed_from: Sequence[str]) -> None:
        """Add a gradient to a value: in new memory, or in the memory of a result's gradient that is passed on."""
        # "given": the gradient of an output of the segment, whose memory the caller holds. "new": a block of this
        # backward. A gradient that is passed on keeps the name of the block in which it lies.
        self.count += 1
        known = (source for source in passed_from if source in self.arrived)
        passed = next((self.lies_in.get(source, Block(source, "given")) for source in known), None)
        key = passed or Block(f"{self.count}", "new")
        self.ledger.hold(key, None if passed else {"gradient": size})
        if there := self.lies_in.get(name):
            self.moved.append(3 * size)
            # A second gradient: autograd adds in place if the first one has memory of its own, so the new block is
            # freed. If both are passed on, `hold_passed` counts the memory of the sum.
            if passed or there.role != "given":
                self.ledger.release(key)
                return
            self.ledger.release(there)  # another value's memory: the sum needs memory of its own
        self.lies_in[name], self.sizes[name] = key, size
        self.arrived.add(name)

    def release(self, names: Sequence[str]) -> None:
        """Release the gradients of these values after their use."""
        for name in names:
            if name in self.lies_in:
                self.ledger.release(self.lies_in.pop(name))
                self.sizes.pop(name)

    @property
    def passed(self) -> list[str]:
        """The values whose gradient is that of an output of the segment, and not memory of their own."""
        return [name for name, key in self.lies_in.items() if key.role == "given"]

    def hold_passed(self) -> None:
        """Hold a copy of each passed gradient: a segment's inputs and weights keep theirs, in memory of their own."""
        for name in self.passed:
            self.ledger.hold(Block(name, "own"), {"gradient": self.sizes[name]})


def simulate_memory(
    program: Program, tally: RankTally, plan: Plan, states: int, ledger: MemoryTracker | None = None
) -> tuple[MemoryTracker, list[int]]:
    """Return the memory tracker after a training step, and the bytes held after each step of the program.

    The training step is not the first one, so buffers that persist are allocated. The tracker is `ledger`, or a new
    one.
    """
    ledger = ledger or MemoryTracker()
    # What exists throughout the step: weights and optimiser states, inputs, and buffers that are allocated only once.
    trained = sum(tally.weights[name] for name in tally.trained)
    owned = sum(tally.weights.values()) + sum(tally.buffers.values())
    ledger.hold("owned", {"weights": owned, "optimiser": states * trained})
    for micro_batch, direction in program.directions.items():
        ledger.hold(("inputs", micro_batch), {"inputs": sum(tally.ways[direction].inputs.values())})
    reductions = chain(*(effects.reductions for effects in program.effects))
    background = {item.name: item for item in reductions if item.starts and not item.waits}.values()
    lent = sum(compute_workspace_bytes(reduction.bytes, len(reduction.group)) for reduction in background)
    # Exchanges share one arena, as only one of them runs at a time.
    arena = max((effects.messages.arena for effects in program.effects if effects.messages), default=0)
    ledger.hold("messages", {"messages": lent + arena})
    ledger.hold("sums", {"gradients": sum(reduction.bytes for reduction in background)})

    trained_now: set[str] = set()  # the weights that have gradients
    walkers = {}
    for micro_batch, direction in program.directions.items():
        way = program.get_direction_program(micro_batch)
        walkers[micro_batch] = _MicroBatchMemory(micro_batch, way, tally.ways[direction], ledger, plan, trained_now)
    after = []
    leaving: list[Hashable] = []
    for index, (step, effects) in enumerate(zip(program.steps, program.effects, strict=True)):
        ledger.step = index
        # The buffer of a send-only exchange is freed one instruction later: the send is still in progress until then.
        left, leaving = leaving, []
        if step.instruction.per_micro_batch:
            leaving = walkers[step.micro_batch].run_step(step, effects)
        elif step.phase is Phase.UPDATE:
            # At its beginning the all-reduce copies the gradients of the bucket into memory that is kept. At its end,
            # in the update, that memory replaces the gradients.
            for name in trained_now.intersection(effects.reads):
                trained_now.remove(name)
                ledger.release(("gradient", name))
        for key in left:
            ledger.release(key)
        after.append(ledger.total)
    return ledger, after


@dataclass
class _MicroBatchMemory(LiveValues[Block]):
    """The memory of one micro-batch: values and leaves by their blocks, and graphs for backward."""

    # Each output of a segment is detached; the leaf that results is the input of the next segment. A block can thus be
    # held for three reasons at once, and is freed with the last of them:
    #
    #            values               leaves (if backward needs them)    graphs
    #   from     its instruction      its instruction                    a segment that saves it
    #   until    its last reader      backward of its writer             backward of that segment

    number: int
    direction_program: DirectionProgram
    tally: DirectionTally
    ledger: MemoryTracker
    plan: Plan
    trained_now: set[str]
    values: dict[str, Block] = field(default_factory=dict)
    leaves: dict[str, Block] = field(default_factory=dict)
    grads: dict[str, Block] = field(default_factory=dict)
    graphs: dict[str, list[Hashable]] = field(default_factory=dict)
    leaving: list[Hashable] = field(default_factory=list)
    offloaded: dict[Hashable, int] = field(default_factory=dict)

    def run_step(self, step: Step, effects: Effects) -> list[Hashable]:
        """Run one instruction and return the keys of send buffers that are released after the next instruction."""
        item, forward = step.instruction, step.phase is Phase.FORWARD
        self.leaving = []
        if effects.messages:
            self._hold_messages(item, effects.messages, forward, effects.temporary)
        if item.is_local:
            self._compute(item, effects) if forward else self._compute_back(item, step.phase)
        if forward:
            for name in effects.makes:
                key = self.tally.lies_in[name]
                for held in (self.values, self.leaves):
                    held[name] = key
                    self._hold_key(key)
            self._hold_strips(effects)
            self.release_read(item)
        elif not item.is_local:
            for name in effects.makes:
                if name in self.tally.needs_gradient:
                    self._hold_gradient(name, self.tally.bytes[self.tally.lies_in[name]])
            for name in effects.reads:
                self._release_leaf(name)
        return self.leaving

    def _hold_key(self, key: Block) -> None:
        borrowed = self.tally.halo_bytes.get(key, 0)
        self._hold_block((self.number, key), activations=self.tally.bytes.get(key, 0) - borrowed, halos=borrowed)

    def _hold_block(self, key: Hashable, **kinds: int) -> None:
        """Hold a block that backward needs; an offloaded block is in memory only during the step that makes it."""
        offload = self.plan.offload_activations and sum(kinds.values()) >= LEAST_BYTES
        if offload and key not in self.offloaded:
            self.offloaded[key] = sum(kinds.values())
            self.ledger.add_transient(**kinds)
        # An offloaded block is held with no bytes, so that hold and release stay paired.
        self.ledger.hold(key, {} if offload else kinds)

    def _get_offloaded_bytes(self, key: Block) -> int:
        """Return the bytes of an offloaded block that is loaded again for a segment's backward."""
        return self.offloaded.get((self.number, key), 0)

    def _count_offloaded_inputs(self, names: Iterable[str]) -> int:
        """Return the bytes of the offloaded inputs that are loaded again for a segment."""
        return sum(map(self._get_offloaded_bytes, {self.tally.lies_in.get(name, Block(name)) for name in names}))

    def drop(self, held: dict[str, Block], name: str) -> None:
        if name in held:
            self.ledger.release((self.number, held.pop(name)))

    def needs_gradient(self, name: str) -> bool:
        return name in self.tally.needs_gradient

    @property
    def recomputes(self) -> bool:
        return self.plan.checkpoint_activations

    def _compute(self, item: Instruction, effects: Effects) -> None:
        segment = self.tally.segments[item.name]
        # `inside` is the peak within the segment. What outlives the segment is held from here on.
        self.ledger.add_transient(passing=segment.inside + self._count_offloaded_inputs(effects.reads))
        # With checkpointing, nothing of the segment stays but its outputs: backward computes it again from its inputs.
        if item.differentiable and not self.recomputes:
            self.graphs[item.name] = [(self.number, key) for key in segment.keeps]
            for key in segment.keeps:
                if key in self.tally.bytes:
                    self._hold_key(key)
                else:
                    self._hold_block((self.number, key), activations=segment.fresh.get(key, 0))

    def _hold_recomputed(self, item: Instruction, segment: SegmentTally) -> None:
        """Hold the recomputed graph of a segment, from INPUTS to WEIGHTS.

        What the graph has saved of outputs is new memory, and nothing is offloaded.
        """
        read = [key for key in segment.keeps if key not in segment.fresh]
        recomputed = {(self.number, key._replace(is_recomputed=True)): size for key, size in segment.fresh.items()}
        self.graphs[item.name] = [*((self.number, key) for key in read), *recomputed]
        for key in read:
            self._hold_key(key)
        for block, size in recomputed.items():
            self.ledger.hold(block, {"activations": size})

    def _compute_back(self, item: Instruction, phase: Phase) -> None:
        segment = self.tally.segments[item.name]
        if phase is Phase.WEIGHTS and not (segment.late and item.name in self.graphs):
            return
        way = item.get_effects(Phase.FORWARD)
        recomputes = self.recomputes and item.name not in self.graphs
        recomputed = sum(segment.fresh.values()) + self._count_offloaded_inputs(way.reads) if recomputes else 0
        # With checkpointing, recomputed activations count here; without it, offloaded ones that are loaded again.
        back = sum(map(self._get_offloaded_bytes, segment.keeps)) if item.name in self.graphs else 0
        self.ledger.add_transient(passing=segment.inside if recomputes else 0)
        # Backward needs the graphs of the outputs, and no outputs that these have not saved.
        for name in way.makes:
            self.release_leaf(name)
        keeps_graph = phase is Phase.INPUTS and segment.late
        inside = segment.back_inside_with_graph if keeps_graph else segment.back_inside
        self.ledger.add_transient(passing=recomputed + back + inside)
        if phase is not Phase.WEIGHTS:
            for name, size in segment.grads.items():
                self._hold_gradient(name, size)
        # The gradients of weights follow in the WEIGHTS phase, which reads the graph and its outputs' gradients.
        if keeps_graph:
            if recomputes:
                self._hold_recomputed(item, segment)
        else:
            self._end_backward(item, segment)

    def _end_backward(self, item: Instruction, segment: SegmentTally) -> None:
        for name in item.get_effects(Phase.FORWARD).makes:
            self._release_leaf(name)
        for block in self.graphs.pop(item.name, ()):
            self.ledger.release(block)
        # Until here, gradients of weights are part of the peak of backward (`back_inside`). Now they are held, from the
        # first micro-batch on; further ones are added to them.
        for name, size in segment.trains.items():
            if name not in self.trained_now:
                self.trained_now.add(name)
                self.ledger.hold(("gradient", name), {"gradients": size})

    def _hold_gradient(self, name: str, size: int) -> None:
        if name not in self.grads:
            self.grads[name] = Block(name, "gradient")
            self.ledger.hold((self.number, self.grads[name]), {"passing": size})

    def _release_leaf(self, name: str) -> None:
        """Release a leaf and its gradient after their last use."""
        self.release_leaf(name)
        if name in self.grads:
            self.ledger.release((self.number, self.grads.pop(name)))

    def _hold_strips(self, effects: Effects) -> None:
        """Hold what an exchange in two halves makes, from the first one on, until the second one has made it."""
        messages = effects.messages
        if messages is None or messages.posts == messages.waits:
            return
        for name in effects.specs:
            key = self.tally.lies_in[name]
            self._hold_key(key) if messages.posts else self.ledger.release((self.number, key))

    def _hold_messages(self, item: Instruction, messages: Messages, forward: bool, temporary: int) -> None:
        # The buffers of two-way exchanges are kept between steps, in an arena that `simulate_memory` holds throughout.
        if not messages.arena:
            self.ledger.add_transient(messages=messages.packed + messages.unpacked, passing=temporary)
        # The source tensor of a send is held, too; in backward it is a gradient without other use.
        if messages.lasting:
            self.leaving.append((self.number, item.name, forward))
            self.ledger.hold(self.leaving[-1], {"messages": messages.lasting})
