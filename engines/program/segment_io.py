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
    #
    #   wanted {a} <- [s0: a -> b, c]  {b, c} <- (exchange b -> w)  {c, w} <- [s1: c, w -> y]  {y} = kept
    #
    # A value that only its own segment reads is in no set, so it is no output and dies inside the segment.
    for instruction in reversed(list(instructions)):
        if isinstance(instruction, Compute):
            made = {op.out for op in instruction.ops}
            read = dict.fromkeys(name for op in instruction.ops for name in op.reads)
            # Names that are not in `values` are weights and buffers, which the rank owns.
            inputs = tuple(name for name in read if name in values and name not in made)
            outputs = tuple(op.out for op in instruction.ops if op.out in wanted)
            differentiable = any(values[name].differentiable for name in outputs)
            instruction = replace(instruction, inputs=inputs, outputs=outputs, differentiable=differentiable)
            wanted.update(inputs)
        else:
            wanted.add(instruction.source)
        done.append(instruction)
    return done[::-1]
