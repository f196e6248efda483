"""What each step of a rank's program is, in terms of the user's model and of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from engines.graph.model_graph import ModelGraph
from engines.graph.stages import find_layers
from engines.plan import Plan
from engines.program.dependencies import find_peers
from engines.program.instructions import Compute, ModelInstruction, Phase
from engines.program.program import CountLabels, Program, Step
from engines.program.schedule import ActionKind, PipelineAction
from engines.spatial.layout import Layout

__all__ = ["UNITS", "StepLabel", "describe_steps", "find_block_end", "label_steps"]

UNITS = ("instruction", "layer", "micro-batch", "phase")
"""Units by which a run can advance, from the smallest to the largest."""


@dataclass(frozen=True, slots=True)
class StepLabel:
    """One step of a rank's program. `work` is None at the update, which belongs to no micro-batch.

    `layer` and `modules` are those of the computation, or of the one for which a message is sent.
    """

    step: Step
    work: PipelineAction | None = None
    layer: str = ""
    modules: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """`block.conv`, or the first and the last of several: `block.0 … 2`."""
        if len(self.modules) < 2:
            return "".join(self.modules)
        first, last = (module.split(".") for module in (self.modules[0], self.modules[-1]))
        shared = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
        return f"{'.'.join(first)} … {'.'.join(last[shared:])}"

    @property
    def kind(self) -> str:
        """The kind of instruction, as in a timeline."""
        return self.step.instruction.kind

    @property
    def phase_name(self) -> str:
        """`forward`, `backward` (of inputs, weights or both) or `update`."""
        phase = self.step.phase
        return phase.value if phase in (Phase.FORWARD, Phase.UPDATE) else Phase.BACKWARD.value

    @property
    def where(self) -> str:
        """The place in the model, or the instruction's own name if it belongs to no layer."""
        return self.module or self.layer or self.step.instruction.name

    @property
    def text(self) -> str:
        """A short description: `forward compute · micro-batch 0 · blocks.0.conv1`."""
        way = "" if self.kind == "update" else f"{self.phase_name} "
        return f"{way}{self.kind} · " + (f"micro-batch {self.step.micro_batch} · " if self.work else "") + self.where

    def get_block(self, unit: str) -> object:
        """Return a key that is equal for steps of one unit: a layer, a micro-batch in a stage, or a phase."""
        return {
            "layer": (self.work, self.phase_name, self.layer),
            "micro-batch": (self.work, self.phase_name),
            "phase": self.phase_name,
        }[unit]


def label_steps(graph: ModelGraph, program: Program) -> tuple[StepLabel, ...]:
    """Return the label of each step of a program."""
    if program.steps and isinstance(program.steps[0].instruction, CountLabels):
        step, *others = program.steps
        rest = label_steps(graph, replace(program, steps=tuple(others)))
        return (StepLabel(step, rest[0].work), *rest)  # counted with the rank's first micro-batch
    known = {
        name: where
        for way in program.direction_programs.values()
        for name, where in _locate_instructions(graph, way.stages)
    }
    kinds = {Phase.FORWARD: ActionKind.FORWARD, Phase.WEIGHTS: ActionKind.WEIGHTS}  # else BACKWARD
    found: list[StepLabel] = []
    for step in program.steps:
        if step.phase is Phase.UPDATE:
            found.append(StepLabel(step))
            continue
        here = known.get(step.instruction.name)
        if here is None:  # a gradient sum starts after the last gradient in it
            found.append(replace(found[-1], step=step))
            continue
        stage, layer, modules = here
        kind = kinds.get(step.phase, ActionKind.BACKWARD)
        work = PipelineAction(kind, program.directions[step.micro_batch], stage, step.micro_batch)
        found.append(StepLabel(step, work, layer, modules))
    return tuple(found)


def describe_steps(graph: ModelGraph, plan: Plan, program: Program) -> list[bytes]:
    """Return a description of each step of a program: the rank's role, the instruction, and its peers."""
    role, count = Layout.of(plan).describe_rank(program.rank), len(program.steps)
    found = []
    for number, place in enumerate(label_steps(graph, program), 1):
        others = ", ".join(map(str, find_peers(program, place.step)))
        together = f", with {others}" if others else ""
        found.append(f"{role}: {place.text}{together} (instruction {number} of {count})".encode())
    return found


def find_block_end(found: tuple[StepLabel, ...], start: int, unit: str) -> int:
    """Return how many steps are done at the end of the unit that step `start` belongs to."""
    if start == len(found) or unit == "instruction":
        return min(start + 1, len(found))
    block = found[start].get_block(unit)
    return next((index for index in range(start, len(found)) if found[index].get_block(unit) != block), len(found))


def _locate_instructions(
    graph: ModelGraph, stages: Mapping[int, Iterable[ModelInstruction]]
) -> Iterator[tuple[str, tuple[int, str, tuple[str, ...]]]]:
    """Yield (name, (stage, layer, modules)) of each instruction of a forward pass.

    A communication belongs to the next segment of its stage, or to the last one if none follows.
    """
    layer_of = {
        node.name: layer.name
        for layer in find_layers(graph)
        for node in graph.nodes[layer.nodes.start : layer.nodes.stop]
    }
    for stage, items in stages.items():
        waiting: list[str] = []
        layer, modules = "", ()
        for item in items:
            waiting.append(item.name)
            if isinstance(item, Compute):
                # A segment that only prepares something, such as a padded window, counts to the layer before.
                layer = next((layer_of[op.out] for op in item.ops if op.out in layer_of), layer)
                modules = tuple(dict.fromkeys(op.module for op in item.ops if op.module))
                yield from ((name, (stage, layer, modules)) for name in waiting)
                waiting = []
        yield from ((name, (stage, layer, modules)) for name in waiting)  # the sends at the end of the stage
