"""A rank's program: the instructions that it runs in one training step, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from engines.formatting import format_html_table
from engines.program.instructions import Compute, Exchange, Instruction, ModelInstruction, Phase
from engines.program.traffic import count_traffic
from engines.spatial.tiles import Tile

__all__ = ["DirectionProgram", "Program", "ShardSpec", "Step"]

Kind = TypeVar("Kind", bound=Instruction)


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
        told = "; ".join(f"{name}: {fact}" for name, fact in self.facts.items())
        return f"<Program of rank {self.rank}: {told}>"

    def _repr_html_(self) -> str:
        return format_html_table(f"Program of rank {self.rank}", self.facts)
