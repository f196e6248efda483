"""A rank's program: what it does of which stage, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from engines.html_table import format_html_table
from engines.program.instructions import Compute, ExchangeHalf, Instruction, ModelInstruction, Phase
from engines.program.traffic import count_traffic
from engines.spatial.tiles import Tile

__all__ = ["DirectionProgram", "Program", "ShardSpec", "Step"]

Kind = TypeVar("Kind", bound=Instruction)


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction, walked one way, for one micro-batch."""

    instruction: Instruction
    phase: Phase
    micro_batch: int = 0


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The part of a micro-batch's input, or prediction, that a rank has: `tile` of it, or all where that is None."""

    tile: Tile | None
    axes: tuple[int, int] | None


@dataclass(frozen=True)
class DirectionProgram:
    """What a rank does for the micro-batches of one direction: the forward pass of each of its stages.

    `feeds` are the parts of the inputs that it needs; `loss` is the name of the loss where it has it, `prediction` that
    of the model's answer, of which it `predicts` a part, and `seeds_loss` is true on the one rank whose loss the
    gradient starts from: a value that all tiles share has its gradient counted once. `lasting` values stay to the end
    of the step.
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
        """The segments that begin a value which the next one completes, by that value."""
        found = (item for item in self.forward if isinstance(item, Compute) and item.interior)
        return {name: segment for segment in found for name in segment.outputs}

    @cached_property
    def reads(self) -> Mapping[str, tuple[str, ...]]:
        """The instructions of the forward pass that read each value, in order."""
        found: dict[str, tuple[str, ...]] = {}
        for instruction in self.forward:
            names = _get_read_values(instruction)
            found.update({name: (*found.get(name, ()), instruction.name) for name in names})
        return found


def _get_read_values(instruction: ModelInstruction) -> tuple[str, ...]:
    """The values that an instruction reads going forward."""
    if isinstance(instruction, Compute):
        return instruction.inputs
    return () if isinstance(instruction, ExchangeHalf) and not instruction.begins else (instruction.source,)


@dataclass(frozen=True, repr=False)
class Program:
    """Everything that one rank does in one training step, or for one prediction, in order.

    `ways` are by direction, and `directions` says in which one each of the rank's micro-batches goes, of the
    `micro_batches` that a step has on all ranks together. `weights` and `buffers` are what the rank owns.
    """

    rank: int
    steps: tuple[Step, ...]
    direction_programs: Mapping[int, DirectionProgram]
    directions: Mapping[int, int]
    micro_batches: int
    weights: tuple[str, ...]
    buffers: tuple[str, ...]

    def get_direction_program(self, micro_batch: int) -> DirectionProgram:
        """What the rank does for one of its micro-batches."""
        return self.direction_programs[self.directions[micro_batch]]

    @property
    def forward(self) -> tuple[ModelInstruction, ...]:
        """The instructions of all its forward passes, each once."""
        return tuple(item for way in self.direction_programs.values() for item in way.forward)

    @property
    def feeds(self) -> Mapping[int, Mapping[str, ShardSpec]]:
        """The parts of the inputs that the rank needs, by micro-batch."""
        return {number: self.get_direction_program(number).input_shards for number in self.directions}

    def select_instructions(self, kind: type[Kind]) -> Iterable[Kind]:
        """Its instructions of a kind, as often as they are walked."""
        return (step.instruction for step in self.steps if isinstance(step.instruction, kind))

    @property
    def facts(self) -> dict[str, str]:
        """What the rank does in a training step, in a few lines: its instructions by kind, and what it sends."""
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
        told = "; ".join(f"{name}: {fact}" for name, fact in self.facts.items())
        return f"<Program of rank {self.rank}: {told}>"

    def _repr_html_(self) -> str:
        return format_html_table(f"Program of rank {self.rank}", self.facts)
