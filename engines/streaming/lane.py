"""A micro-batch of one tile whose values are away while other tiles compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engines.program.instructions import Compute, Linear, Phase
from engines.program.lane import Lane
from engines.streaming.shelf import Shelf

__all__ = ["ShelvedLane"]


@dataclass
class ShelvedLane(Lane):
    """A lane that brings back what an instruction reads, and knows what autograd keeps of each segment."""

    shelf: Shelf = field(kw_only=True)
    _saved: dict[str, list[Tensor]] = field(default_factory=dict)
    _touched: dict[str, Linear] = field(default_factory=dict)
    _going_back: Linear | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun = list(self.inputs)
        self.inputs = dict.fromkeys(self.inputs)  # their names alone: what has been read may go  # type: ignore[arg-type]

    def do(self, instruction: Linear, phase: Phase) -> int:
        """Walk one instruction with all that it reads in memory; the bytes that were sent."""
        if phase is Phase.FORWARD:
            self.shelf.use(self._read(instruction))
        else:
            self.shelf.use(self._saved.pop(instruction.name, ()))
            self.shelf.use(self._gradients(instruction))
            self._going_back = instruction
        try:
            return super().do(instruction, phase)
        finally:
            self._going_back = None
            self.shelf.done()
            self._touched[instruction.name] = instruction

    def touched(self) -> Iterator[Tensor]:
        """What instructions have made or added to since this was asked last, as far as it lives.

        Of what outlives the step only the prediction is large; the rest stays where it is: others read that, too.
        """
        if self._going_back is not None:
            self.shelf.use(self._gradients(self._going_back))  # one may have been begun since
        lasting = self.way.lasting - {self.way.prediction}
        kept = {self.leaves[name].untyped_storage()._cdata for name in lasting & self.leaves.keys()}
        names = [*self._begun, *(name for each in self._touched.values() for name in _named(each))]
        saved = [tensor for name in self._touched for tensor in self._saved.get(name, ())]
        made = [tensor for name in self._touched for tensor in self._made.get(name, ())]
        self._begun, self._touched = [], {}
        for tensor in (*saved, *made, *self._held(names)):
            if tensor.untyped_storage()._cdata not in kept:
                yield tensor

    def _held(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Values and their gradients."""
        for name in names:
            for tensors in (self.values, self.leaves):
                if name in tensors:
                    yield tensors[name]
            if name in self.leaves and self.leaves[name].grad is not None:
                yield self.leaves[name].grad

    def _compute(self, segment: Compute) -> int:
        saved: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor: _seen(saved, tensor), lambda tensor: tensor):
            sent = super()._compute(segment)
        if segment.differentiable:
            self._saved[segment.name] = saved
        return sent

    def _read(self, instruction: Linear) -> Iterator[Tensor]:
        """What an instruction reads going forward."""
        names = instruction.inputs if isinstance(instruction, Compute) else (instruction.source,)
        return (self.values[name] for name in names if name in self.values)

    def _gradients(self, instruction: Linear) -> Iterator[Tensor]:
        """The gradients that an instruction reads or adds to."""
        leaves = (self.leaves.get(name) for name in _named(instruction))
        return (leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)


def _named(instruction: Linear) -> tuple[str, ...]:
    """The values that an instruction reads and makes."""
    if isinstance(instruction, Compute):
        return (*instruction.inputs, *instruction.outputs)
    return (instruction.source, instruction.target)  # type: ignore[union-attr]


def _seen(saved: list[Tensor], tensor: Tensor) -> Any:
    saved.append(tensor)
    return tensor
