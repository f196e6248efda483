"""Where a rank is: what each step of its program is called, in the words of the user's model and of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.layer.stages import find_layers
from engines.layout import Layout
from engines.pipeline.work import ActionKind, PipelineAction
from engines.plan import Plan
from engines.program.dependencies import find_peers
from engines.program.instructions import Compute, CountLabels, ModelInstruction, Phase
from engines.program.program import Program, Step

__all__ = ["UNITS", "StepLabel", "describe_steps", "find_block_end", "label_steps"]

UNITS = ("instruction", "layer", "micro-batch", "phase")
"""What can be done at once, from the least to the most."""

_KINDS = {Phase.FORWARD: ActionKind.FORWARD, Phase.WEIGHTS: ActionKind.WEIGHTS}


@dataclass(frozen=True, slots=True)
class StepLabel:
    """One step of a rank's program. `work` is None at the update, which is of no micro-batch.

    `layer` and `modules` are those of the computation, or of the one for which something is sent.
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
        """As in a timeline."""
        return self.step.instruction.kind

    @property
    def phase_name(self) -> str:
        """`forward`, `backward` (be it to inputs, weights or both) or `update`."""
        phase = self.step.phase
        return phase.value if phase in (Phase.FORWARD, Phase.UPDATE) else Phase.BACKWARD.value

    @property
    def where(self) -> str:
        """In the model; where it is of no layer the instruction's own name."""
        return self.module or self.layer or self.step.instruction.name

    @property
    def text(self) -> str:
        """`forward compute · micro-batch 0 · blocks.0.conv1`."""
        way = "" if self.kind == "update" else f"{self.phase_name} "
        return f"{way}{self.kind} · " + (f"micro-batch {self.step.micro_batch} · " if self.work else "") + self.where

    def get_block(self, unit: str) -> object:
        """Equal for steps that belong together: of a layer, of a micro-batch in a stage, of a phase."""
        return {
            "layer": (self.work, self.phase_name, self.layer),
            "micro-batch": (self.work, self.phase_name),
            "phase": self.phase_name,
        }[unit]


def label_steps(graph: ModelGraph, program: Program) -> tuple[StepLabel, ...]:
    """What each step of a program is."""
    if program.steps and isinstance(program.steps[0].instruction, CountLabels):
        step, *others = program.steps
        rest = label_steps(graph, replace(program, steps=tuple(others)))
        return (StepLabel(step, rest[0].work), *rest)  # it begins the work on the rank's first micro-batch
    known = {
        name: where
        for way in program.direction_programs.values()
        for name, where in _locate_instructions(graph, way.stages)
    }
    found: list[StepLabel] = []
    for step in program.steps:
        if step.phase is Phase.UPDATE:
            found.append(StepLabel(step))
            continue
        here = known.get(step.instruction.name)
        if here is None:  # a sum of gradients begins behind what it sums
            found.append(replace(found[-1], step=step))
            continue
        stage, layer, modules = here
        kind = _KINDS.get(step.phase, ActionKind.BACKWARD)
        work = PipelineAction(kind, program.directions[step.micro_batch], stage, step.micro_batch)
        found.append(StepLabel(step, work, layer, modules))
    return tuple(found)


def describe_steps(graph: ModelGraph, plan: Plan, program: Program) -> list[bytes]:
    """Of each step of a program, in words: who does it, what it is, and with which other ranks."""
    role, count = Layout.of(plan).describe_rank(program.rank), len(program.steps)
    found = []
    for number, place in enumerate(label_steps(graph, program), 1):
        others = ", ".join(map(str, find_peers(program, place.step)))
        together = f", with {others}" if others else ""
        found.append(f"{role}: {place.text}{together} (instruction {number} of {count})".encode())
    return found


def find_block_end(found: tuple[StepLabel, ...], start: int, unit: str) -> int:
    """How many steps are done when the unit is that begins (or goes on) at step `start`."""
    if start == len(found) or unit == "instruction":
        return min(start + 1, len(found))
    block = found[start].get_block(unit)
    return next((index for index in range(start, len(found)) if found[index].get_block(unit) != block), len(found))


_Location = tuple[str, tuple[str, ...]]
"""Layer and modules."""


def _locate_instructions(
    graph: ModelGraph, stages: Mapping[int, Iterable[ModelInstruction]]
) -> Iterator[tuple[str, tuple[int, str, tuple[str, ...]]]]:
    """(name of the instruction, (stage, layer, modules)) of a forward pass."""
    layer_of = {
        node.name: layer.name
        for layer in find_layers(graph)
        for node in graph.nodes[layer.nodes.start : layer.nodes.stop]
    }
    for stage, items in stages.items():
        waiting: list[str] = []
        here: _Location = ("", ())
        for item in items:
            waiting.append(item.name)
            if isinstance(item, Compute):
                here = _locate_segment(item, layer_of, here[0])
                yield from ((name, (stage, *here)) for name in waiting)
                waiting = []
        yield from ((name, (stage, *here)) for name in waiting)  # what leaves the stage at its end


def _locate_segment(segment: Compute, layer_of: Mapping[str, str], before: str) -> _Location:
    """What is computed; the layer is the last one, where the segment only prepares."""
    layer = next((layer_of[op.out] for op in segment.ops if op.out in layer_of), before)
    return layer, tuple(dict.fromkeys(op.module for op in segment.ops if op.module))
