"""A rank's program: the instructions that it runs in one training step, in order, and the messages that they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, TypeVar

from engines.comm.all_reduce_sizes import count_sends
from engines.formatting import format_html_table
from engines.program.instructions import (
    AllReduce,
    Compute,
    Exchange,
    FiniteCheckAllReduce,
    ModelInstruction,
    Phase,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from engines.spatial.tiles import Move, Tile

__all__ = [
    "ALIGNED_BYTES",
    "LEAST_BYTES",
    "CountLabels",
    "DirectionProgram",
    "Instruction",
    "Program",
    "ShardSpec",
    "Step",
    "Traffic",
    "compute_arena_bytes",
    "count_staged_bytes",
    "count_step_traffic",
    "count_traffic",
    "is_all_sent",
    "is_persistent",
    "is_tile_contiguous",
]

Kind = TypeVar("Kind", bound="Instruction")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, run in one phase for one micro-batch."""

    instruction: Instruction
    phase: Phase
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A rank's part of a micro-batch's input or prediction: `tile` of it, or all of it where that is None."""

    tile: Tile | None
    axes: tuple[int, int] | None

    def cut(self, whole: Any) -> Any:
        """Return this part of a micro-batch's tensor, a view."""
        if self.tile is not None and self.tile.images is not None:
            whole = whole.narrow(0, self.tile.images.start, len(self.tile.images))
        if self.tile is not None and self.axes is not None:
            for axis, span in zip(self.axes, (self.tile.rows, self.tile.cols), strict=True):
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
    def interiors(self) -> Mapping[str, Compute]:
        """The interior segments by the value that each begins and the next segment completes."""
        found = (item for item in self.forward if isinstance(item, Compute) and item.interior)
        return {name: segment for segment in found for name in segment.outputs}

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """The names of the forward instructions that read each value, in order."""
        found: dict[str, tuple[str, ...]] = {}
        for instruction in self.forward:
            names: tuple[str, ...]
            if isinstance(instruction, Compute):
                names = instruction.inputs
            elif isinstance(instruction, Exchange) and not instruction.begins:
                names = ()  # the first half has read the source
            else:
                names = (instruction.source,)
            found.update({name: (*found.get(name, ()), instruction.name) for name in names})
        return found


@dataclass(frozen=True, repr=False)
class Program:
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
        return {number: self.get_direction_program(number).input_shards for number in self.directions}

    def select_instructions(self, kind: type[Kind]) -> Iterable[Kind]:
        """Return the instructions of a kind, as often as they run."""
        return (step.instruction for step in self.steps if isinstance(step.instruction, kind))

    @property
    def facts(self) -> dict[str, str]:
        """A short summary of a training step on this rank: stages, instructions by kind, and messages sent."""
        done = Counter(step.instruction.kind for step in self.steps)
        sent = {kind: part for kind, part in count_traffic(self).items() if part.messages}
        stages = (
            f"{stage}{' (mirrored)' * way}"
            for way, held in self.direction_programs.items()
            for stage in sorted(held.stages)
        )
        return {
            "stages": ", ".join(stages),
            "micro-batches": f"{len(self.directions)} of {self.micro_batches}",
            "weights": f"{len(self.weights)} tensors",
            "instructions": ", ".join(f"{count:,} {kind}" for kind, count in done.items()),
            **{f"sends ({kind})": f"{part.messages:,} messages, {part.bytes:,} bytes" for kind, part in sent.items()},
        }

    def __repr__(self) -> str:
        facts = "; ".join(f"{name}: {fact}" for name, fact in self.facts.items())
        return f"<Program of rank {self.rank}: {facts}>"

    def _repr_html_(self) -> str:
        return format_html_table(f"Program of rank {self.rank}", self.facts)


@dataclass(frozen=True, slots=True)
class CountLabels:
    """The ranks in `group` count, over all labels of a step, what the loss of the whole batch is divided by.

    Each rank runs a small `program` over its own micro-batches; one all-reduce of `bytes` bytes then adds up the
    counts.
    """

    name: str
    program: Program
    bytes: int
    group: tuple[int, ...]
    differentiable: bool = False

    @property
    def kind(self) -> str:
        """The category shown in figures."""
        return "all-reduce" if len(self.group) > 1 else "compute"


Instruction = ModelInstruction | CountLabels | SumGradients | ReduceBatchStats | FiniteCheckAllReduce | Update


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
    """
    found: dict[str, Traffic] = {}
    for step in program.steps:
        kind = step.instruction.kind
        for part in count_step_traffic(step):
            found[kind] = found.get(kind, Traffic(0, 0)) + part
    return found


def count_step_traffic(step: Step) -> Iterable[Traffic]:
    """Yield what one step sends, if anything."""
    match step.instruction:
        case Exchange(begins=True) as exchange:
            moves = exchange.sends if step.phase is Phase.FORWARD else exchange.receives
            yield Traffic(len(moves), exchange.compute_bytes(moves))
        case CountLabels(program=program, bytes=count_bytes, group=group):
            yield from count_traffic(program).values()
            yield Traffic(*count_sends(count_bytes, len(group)))
        case SumGradients() if step.phase is Phase.UPDATE:
            return  # counted where it starts
        case AllReduce() | SumGradients() | ReduceBatchStats() | FiniteCheckAllReduce() as total:
            yield Traffic(*count_sends(total.bytes, len(total.group)))


# The memory of an exchange's messages: kept between steps, fresh, or the tensors themselves.


_KEPT_BYTES = 1 << 24  # larger messages are not kept between steps: copying dominates, not set-up
ALIGNED_BYTES = 64


def compute_staging_bytes(exchange: Exchange) -> int:
    """Return the memory in bytes for all messages of an exchange on one rank."""
    each = (exchange.compute_bytes([move]) for move in (*exchange.sends, *exchange.receives))
    return sum(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in each)


def is_persistent(exchange: Exchange) -> bool:
    """Return whether the messages are kept between steps.

    Those of a one-way exchange are not: nothing waits for its sends, so their buffers could not be reused safely.
    """
    return bool(exchange.sends and exchange.receives) and compute_staging_bytes(exchange) <= _KEPT_BYTES


def compute_arena_bytes(exchanges: Iterable[Exchange]) -> int:
    """Return the bytes of the arena shared by persistent exchanges: the largest, as only one runs at a time."""
    return max(map(compute_staging_bytes, filter(is_persistent, exchanges)), default=0)


def is_all_sent(exchange: Exchange) -> bool:
    """Return whether each pixel that this rank holds is sent to exactly one other rank, and none stays."""
    if not exchange.own or (exchange.window and exchange.own & exchange.window):
        return False
    disjoint = not any(one.tile & other.tile for one, other in combinations(exchange.sends, 2))
    return disjoint and exchange.compute_bytes(exchange.sends) == exchange.compute_bytes([Move(0, 0, exchange.own)])


def is_tile_contiguous(exchange: Exchange, tile: Tile, frame: Tile) -> bool:
    """Return whether the pixels of `tile` are contiguous in a tensor of those of `frame`, stored channels last."""
    part, whole = list(exchange.compute_shape(tile)), list(exchange.compute_shape(frame))
    if len(part) == 4:
        for shape in (part, whole):
            shape.append(shape.pop(1))  # (N, H, W, C), the order in memory
    cut = [index for index, (here, all_here) in enumerate(zip(part, whole, strict=True)) if here < all_here]
    # Contiguous if only the outermost axis longer than 1 is cut: all axes before the last cut one have length 1.
    #
    #   rows 0 and 1 of one image    (1, [2], 8, 16)   contiguous
    #   columns 0 and 1              (1, 8, [2], 16)   8 pieces
    #   rows 0 and 1 of two images   (2, [2], 8, 16)   2 pieces
    return all(size == 1 for size in part[: max(cut, default=0)])


def count_staged_bytes(exchange: Exchange, forward: bool) -> tuple[int, int]:
    """Return the bytes copied into messages and out of messages; messages directly between tensors copy none."""
    lent = _count_copied_bytes(exchange, exchange.sends, exchange.own)
    borrowed = _count_copied_bytes(exchange, exchange.receives, exchange.window)
    if forward:
        return lent, borrowed
    return borrowed, lent if is_all_sent(exchange) else exchange.compute_bytes(exchange.sends)


def _count_copied_bytes(exchange: Exchange, ends: Sequence[Move], frame: Tile | None) -> int:
    if frame is None or is_persistent(exchange):
        return exchange.compute_bytes(ends)
    return exchange.compute_bytes(move for move in ends if not is_tile_contiguous(exchange, move.tile, frame))


# The size from which on a tensor is offloaded.


LEAST_BYTES = 1 << 14
