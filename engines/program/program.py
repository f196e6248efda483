"""A rank's program: the instructions that it runs in one training step, in order, and the messages that they send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Generic, TypeVar

from mpi4dl_nb.engines.comm.all_reduce_sizes import count_sends
from mpi4dl_nb.engines.formatting import FactTable, format_bytes
from mpi4dl_nb.engines.geometry.places import is_first
from mpi4dl_nb.engines.geometry.tiles import Axes, Tile
from mpi4dl_nb.engines.program.effects import Effects, Instruction, Kind, Phase, Reduction, select_kind
from mpi4dl_nb.engines.program.instructions import Compute, ModelInstruction

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, run in one phase for one micro-batch."""

    instruction: Instruction
    phase: Phase
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's part of a micro-batch's input or prediction: `tile` of it, along `axes`; without axes, all of it.

    `split_shape` is the one in which these axes are dimensions, if the value's own shape merges them with others.
    `lead` is a dimension, with how many of its first positions are no pixels: the first tile has them, too.
    """

    tile: Tile
    axes: Axes
    split_shape: tuple[int, ...] | None = None
    lead: tuple[int, int] | None = None

    def fill(self, whole: Any, part: Any) -> None:
        """Write a rank's part into the tensor of the whole micro-batch, in place."""
        if self.lead:
            dim, count = self.lead
            if is_first(self.tile):
                whole.narrow(dim, 0, count).copy_(part.narrow(dim, 0, count))
                part = part.narrow(dim, count, part.shape[dim] - count)
            whole = whole.narrow(dim, count, whole.shape[dim] - count)
        target = self.cut(whole if self.split_shape is None else whole.view(self.split_shape))
        target.copy_(part.reshape(target.shape))

    def cut(self, whole: Any) -> Any:
        """Return this part of a micro-batch's tensor, a view."""
        for axis, span in zip(self.axes, self.tile, strict=True):
            whole = whole.narrow(axis, span.start, len(span))
        return whole


@dataclass(frozen=True)
class DirectionProgram:
    """A rank's work for the micro-batches of one direction: the forward pass of each of its stages.

    `input_shards` are the parts of the inputs that it needs. `loss` and `prediction` are the names of these values
    where the rank has them, and `prediction_shard` is its part of the prediction. `seeds_loss` is true on the one rank
    whose loss starts the backward pass: the gradient of a loss that all tiles share must be counted once. Values in
    `kept_to_end` live to the end of the step.
    """

    stages: Mapping[int, tuple[ModelInstruction, ...]]
    input_shards: Mapping[str, ShardSpec]
    loss: str | None
    prediction: str | None
    seeds_loss: bool
    kept_to_end: frozenset[str]
    prediction_shard: ShardSpec | None = None

    @property
    def forward(self) -> tuple[ModelInstruction, ...]:
        """The instructions of the forward pass of one micro-batch."""
        return tuple(item for stage in sorted(self.stages) for item in self.stages[stage])

    @cached_property
    def effects(self) -> tuple[Effects, ...]:
        """What each instruction of the forward pass does, in order."""
        return tuple(item.get_effects(Phase.FORWARD) for item in self.forward)

    @property
    def forward_effects(self) -> Iterator[tuple[ModelInstruction, Effects]]:
        """The instructions of the forward pass of one micro-batch, each with what it does."""
        return zip(self.forward, self.effects, strict=True)

    @cached_property
    def interiors(self) -> Mapping[str, Compute]:
        """The interior segments by the value that each begins and the next segment completes."""
        interiors = (item for item in select_kind(self.forward, Compute) if item.interior)
        return {name: item for item in interiors for name in item.get_effects(Phase.FORWARD).makes}

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the forward instructions that read each value, in order."""
        readers: dict[str, tuple[str, ...]] = {}
        for item, effects in self.forward_effects:
            for name in effects.reads:
                readers[name] = (*readers.get(name, ()), item.name)
        return readers

    @cached_property
    def last_reads(self) -> Mapping[str, tuple[str, ...]]:
        """The values that an instruction, by name, is the last one to read in the forward pass."""
        last_reads: dict[str, tuple[str, ...]] = {}
        for name, readers in self.reads.items():
            if name not in self.kept_to_end:
                last_reads[readers[-1]] = (*last_reads.get(readers[-1], ()), name)
        return last_reads

    @cached_property
    def rooms(self) -> Mapping[str, ModelInstruction]:
        """The values that may be computed inside a window, with the exchange, their only reader, that makes it."""
        # relu ----> y ----copy----> window of y      becomes      relu ----> middle of the window, halo added around it
        #
        # A second reader would keep the whole window alive for as long as it needs y.
        return {
            name: item
            for item, effects in self.forward_effects
            if effects.messages and effects.messages.makes_room
            for name in effects.reads
            if len(self.reads[name]) == 1
        }

    @cached_property
    def recomputation_reads(self) -> frozenset[str]:
        """The values read by the segments that the backward pass computes again if their graphs are not kept."""
        segments = ((item, effects.reads) for item, effects in self.forward_effects if item.is_local)
        return frozenset(chain(*(reads for item, reads in segments if item.differentiable or item.interior)))

    @cached_property
    def collects(self) -> frozenset[str]:
        """The values to whose gradients a communication adds in the backward pass."""
        reads = (effects.reads for item, effects in self.forward_effects if item.differentiable and not item.is_local)
        return frozenset(chain(*reads))


class LiveValues(ABC, Generic[V]):
    """The values of one micro-batch that a rank holds now, and when each is freed.

    A `V` is a tensor where the program runs, and a block of memory in a forecast. `values` are those that the forward
    pass has still to read, `leaves` those that the backward pass needs.
    """

    #            from                               until
    #   values   the instruction that makes them    the last one that reads them in the forward pass
    #   leaves   the same                           backward of that instruction; without a gradient, the last read,
    #                                               unless the backward pass computes again a segment that reads it

    direction_program: DirectionProgram
    values: dict[str, V]
    leaves: dict[str, V]

    @property
    @abstractmethod
    def recomputes(self) -> bool:
        """Whether the backward pass computes each segment again, from the leaves that it reads."""

    @abstractmethod
    def needs_gradient(self, name: str) -> bool:
        """Return whether backward of the instruction that made a value reads the value's gradient."""

    def drop(self, held: dict[str, V], name: str) -> None:
        """Remove a value from `values` or `leaves`, if it is there."""
        held.pop(name, None)

    def release_read(self, instruction: Instruction) -> None:
        """Remove the values that no instruction of the forward pass reads after this one."""
        for name in self.direction_program.last_reads.get(instruction.name, ()):
            if name in self.values:
                # Autograd itself keeps what a graph saved. The leaf is needed only to collect a gradient, or to
                # recompute the segments that read it.
                way = self.direction_program
                recomputes = self.recomputes and name in way.recomputation_reads
                if not (recomputes or name in way.collects or self.needs_gradient(name)):
                    self.drop(self.leaves, name)
                self.drop(self.values, name)

    def release_leaf(self, name: str) -> None:
        """Remove a leaf after the last read of its gradient, unless it is kept to the end of the step."""
        if name not in self.direction_program.kept_to_end:
            self.drop(self.leaves, name)


@dataclass(frozen=True, repr=False)
class Program(FactTable):
    """Everything that one rank does in one training step, or for one prediction, in order.

    `direction_programs` are by direction. `directions` gives the direction of each of the rank's micro-batches;
    `micro_batches` is the number of micro-batches of a step on all ranks. `weights` and `buffers` are those the rank
    owns.
    """

    rank: int
    steps: tuple[Step, ...]
    direction_programs: Mapping[int, DirectionProgram]
    directions: Mapping[int, int]
    micro_batches: int
    weights: tuple[str, ...]
    buffers: tuple[str, ...]

    def get_direction_program(self, micro_batch: int) -> DirectionProgram:
        """Return the direction program that runs a micro-batch of this rank."""
        return self.direction_programs[self.directions[micro_batch]]

    @property
    def forward(self) -> tuple[ModelInstruction, ...]:
        """The instructions of the rank's forward passes, each once."""
        return tuple(item for way in self.direction_programs.values() for item in way.forward)

    @property
    def feeds(self) -> Mapping[int, Mapping[str, ShardSpec]]:
        """The parts of the inputs that the rank needs, by micro-batch and input name."""
        return {micro_batch: self.get_direction_program(micro_batch).input_shards for micro_batch in self.directions}

    def select_instructions(self, kind: type[Kind]) -> Iterable[Kind]:
        """Return the instructions of a kind, as often as they run."""
        return select_kind((step.instruction for step in self.steps), kind)

    @cached_property
    def effects(self) -> tuple[Effects, ...]:
        """What each step does, in order."""
        # The micro-batches of a direction share their instructions.
        known: dict[tuple[int, Phase], Effects] = {}
        for way in self.direction_programs.values():
            known |= {(id(item), Phase.FORWARD): effects for item, effects in way.forward_effects}
        for step in self.steps:
            key = id(step.instruction), step.phase
            if key not in known:
                known[key] = step.instruction.get_effects(step.phase)
        return tuple(known[id(step.instruction), step.phase] for step in self.steps)

    @property
    def caption(self) -> str:
        return f"Program of rank {self.rank}"

    @property
    def facts(self) -> dict[str, object]:
        """A short summary of a training step on this rank: stages, instructions by kind, and messages sent."""
        done = Counter(step.instruction.kind for step in self.steps)
        sent = {
            f"sends ({kind})": f"{part.messages:,} messages, {format_bytes(part.bytes)}"
            for kind, part in count_traffic(self).items()
            if part.messages
        }
        ways = self.direction_programs.items()
        stages = (f"{stage}{' (mirrored)' * way}" for way, held in ways for stage in sorted(held.stages))
        return {
            "stages": ", ".join(stages),
            "micro-batches": f"{len(self.directions)} of {self.micro_batches}",
            "weights": f"{len(self.weights)} tensors",
            "instructions": ", ".join(f"{count:,} {kind}" for kind, count in done.items()),
            **sent,
        }


@dataclass(frozen=True, slots=True)
class CountLabels(Instruction):
    """The ranks in `group` count, over all labels of a step, what the loss of the whole batch is divided by.

    Each rank runs a small `program` over its own micro-batches; one all-reduce of `bytes` bytes then adds up the
    counts.
    """

    name: str
    program: Program
    bytes: int
    group: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The category shown in figures."""
        return "all-reduce" if len(self.group) > 1 else "compute"

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the instruction does: its program, then the all-reduce."""
        return Effects(reductions=(Reduction(self.name, self.group, self.bytes),), inner=self.program.effects)


# The messages that a rank sends in one training step, counted from its program before anything runs.


@dataclass(frozen=True, slots=True)
class Traffic:
    """A number of messages that a rank sends, and their total bytes."""

    messages: int
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def count_traffic(program: Program) -> dict[str, Traffic]:
    """Return what the rank of this program sends in a training step, forward and backward, by kind of instruction.

    Kinds are `halo`, `stage` (from one stage to the next) and `all-reduce`, as in a timeline.

    >>> from mpi4dl_nb import Plan, Sizes, compile_plan, count_traffic, resnet20_v1
    >>> plan = Plan(split_size=2, spatial_size=0)
    >>> first, last = compile_plan(Sizes(resnet20_v1()).graph(plan, (2, 3, 32, 32)), plan)
    >>> count_traffic(first)["stage"].messages
    1
    """
    traffic: dict[str, Traffic] = {}
    for step, effects in zip(program.steps, program.effects, strict=True):
        kind = step.instruction.kind
        for part in count_sent(effects):
            traffic[kind] = traffic.get(kind, Traffic(0, 0)) + part
    return traffic


def count_sent(effects: Effects) -> Iterator[Traffic]:
    """Yield what an instruction sends, if anything."""
    for inner in effects.inner:
        yield from count_sent(inner)
    if (messages := effects.messages) and messages.posts:
        yield Traffic(len(messages.sends), sum(message.bytes for message in messages.sends))
    for total in effects.reductions:
        if total.starts:
            yield Traffic(*count_sends(total.bytes, len(total.group)))


# The size from which on a tensor is offloaded.


LEAST_BYTES = 1 << 14
