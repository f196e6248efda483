"""Where a rank is: what each step of its program is called, in the words of the user's model and of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.layer.stages import layers
from engines.layout import Layout
from engines.pipeline.work import Kind, Work
from engines.plan import Plan
from engines.program.instructions import Compute, CountLabels, Linear, Phase
from engines.program.order import partners
from engines.program.program import Program, Step

__all__ = ["UNITS", "Place", "block_end", "places", "said"]

UNITS = ("instruction", "layer", "micro-batch", "phase")
"""What can be done at once, from the least to the most."""

_KINDS = {Phase.FORWARD: Kind.FORWARD, Phase.WEIGHTS: Kind.WEIGHTS}


@dataclass(frozen=True, slots=True)
class Place:
    """One step of a rank's program. `work` is None at the update, which is of no micro-batch.

    `layer` and `modules` are those of the computation, or of the one for which something is sent.
    """

    step: Step
    work: Work | None = None
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
    def way(self) -> str:
        """`forward`, `backward` (be it to inputs, weights or both) or `update`."""
        phase = self.step.phase
        return phase.value if phase in (Phase.FORWARD, Phase.UPDATE) else Phase.BACKWARD.value

    @property
    def where(self) -> str:
        """In the model; where it is of no layer the instruction's own name."""
        return self.module or self.layer or self.step.instruction.name

    @property
    def words(self) -> str:
        """`forward compute · micro-batch 0 · blocks.0.conv1`."""
        way = "" if self.kind == "update" else f"{self.way} "
        return f"{way}{self.kind} · " + (f"micro-batch {self.step.micro_batch} · " if self.work else "") + self.where

    def block(self, unit: str) -> object:
        """Equal for steps that belong together: of a layer, of a micro-batch in a stage, of a phase."""
        return {
            "layer": (self.work, self.way, self.layer),
            "micro-batch": (self.work, self.way),
            "phase": self.way,
        }[unit]


def places(graph: ModelGraph, program: Program) -> tuple[Place, ...]:
    """What each step of a program is."""
    if program.steps and isinstance(program.steps[0].instruction, CountLabels):
        step, *others = program.steps
        rest = places(graph, replace(program, steps=tuple(others)))
        return (Place(step, rest[0].work), *rest)  # it begins the work on the rank's first micro-batch
    known = {name: where for way in program.ways.values() for name, where in _of_stages(graph, way.stages)}
    found: list[Place] = []
    for step in program.steps:
        if step.phase is Phase.UPDATE:
            found.append(Place(step))
            continue
        here = known.get(step.instruction.name)
        if here is None:  # a sum of gradients begins behind what it sums
            found.append(replace(found[-1], step=step))
            continue
        stage, layer, modules = here
        kind = _KINDS.get(step.phase, Kind.BACKWARD)
        work = Work(kind, program.directions[step.micro_batch], stage, step.micro_batch)
        found.append(Place(step, work, layer, modules))
    return tuple(found)


def said(graph: ModelGraph, plan: Plan, program: Program) -> list[bytes]:
    """Of each step of a program, in words: who does it, what it is, and with which other ranks."""
    role, count = Layout.of(plan).words(program.rank), len(program.steps)
    found = []
    for number, place in enumerate(places(graph, program), 1):
        others = ", ".join(map(str, partners(program, place.step)))
        together = f", with {others}" if others else ""
        found.append(f"{role}: {place.words}{together} (instruction {number} of {count})".encode())
    return found


def block_end(found: tuple[Place, ...], start: int, unit: str) -> int:
    """How many steps are done when the unit is that begins (or goes on) at step `start`."""
    if start == len(found) or unit == "instruction":
        return min(start + 1, len(found))
    block = found[start].block(unit)
    return next((index for index in range(start, len(found)) if found[index].block(unit) != block), len(found))


_Where = tuple[str, tuple[str, ...]]
"""Layer and modules."""


def _of_stages(
    graph: ModelGraph, stages: Mapping[int, Iterable[Linear]]
) -> Iterator[tuple[str, tuple[int, str, tuple[str, ...]]]]:
    """(name of the instruction, (stage, layer, modules)) of a forward pass."""
    layer_of = {
        node.name: layer.name for layer in layers(graph) for node in graph.nodes[layer.nodes.start : layer.nodes.stop]
    }
    for stage, items in stages.items():
        waiting: list[str] = []
        here: _Where = ("", ())
        for item in items:
            waiting.append(item.name)
            if isinstance(item, Compute):
                here = _of_segment(item, layer_of, here[0])
                yield from ((name, (stage, *here)) for name in waiting)
                waiting = []
        yield from ((name, (stage, *here)) for name in waiting)  # what leaves the stage at its end


def _of_segment(segment: Compute, layer_of: Mapping[str, str], before: str) -> _Where:
    """What is computed; the layer is the last one, where the segment only prepares."""
    layer = next((layer_of[op.out] for op in segment.ops if op.out in layer_of), before)
    return layer, tuple(dict.fromkeys(op.module for op in segment.ops if op.module))
