"""The inputs and outputs of each segment of a rank's program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engines.program.instructions import Compute, ModelInstruction
from engines.program.value_layout import ValueLayout

__all__ = ["resolve_segment_io"]


def resolve_segment_io(
    instructions: Iterable[ModelInstruction], values: Mapping[str, ValueLayout], kept: Iterable[str]
) -> list[ModelInstruction]:
    """Return the instructions with each segment's inputs, and as outputs what later instructions read or is `kept`."""
    wanted, done = set(kept), []
    # Liveness, from the end backward: `wanted` are the values read by the instructions after this one.
    for instruction in reversed(list(instructions)):
        if isinstance(instruction, Compute):
            instruction = _resolve_segment(instruction, values, wanted)
            wanted.update(instruction.inputs)
        else:
            wanted.add(instruction.source)
        done.append(instruction)
    return done[::-1]


def _resolve_segment(segment: Compute, values: Mapping[str, ValueLayout], wanted: set[str]) -> Compute:
    made = {op.out for op in segment.ops}
    read = dict.fromkeys(name for op in segment.ops for name in op.reads)
    inputs = tuple(name for name in read if name in values and name not in made)
    outputs = tuple(op.out for op in segment.ops if op.out in wanted)
    differentiable = any(values[name].differentiable for name in outputs)
    return replace(segment, inputs=inputs, outputs=outputs, differentiable=differentiable)
