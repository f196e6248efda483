"""A micro-batch whose values are away while others compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engines.offload.offloader import Offloader
from engines.program.instructions import Compute, ExchangeHalf, ModelInstruction, Phase
from engines.program.micro_batch import MicroBatchState

__all__ = ["EagerOffloadingMicroBatch", "OffloadingMicroBatch"]


@dataclass
class OffloadingMicroBatch(MicroBatchState):
    """A lane that brings back what an instruction reads, and knows what autograd keeps of each segment."""

    offloader: Offloader = field(kw_only=True)
    _saved: dict[str, list[Tensor]] = field(default_factory=dict)
    _touched: dict[str, ModelInstruction] = field(default_factory=dict)
    _going_back: ModelInstruction | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun = list(self.inputs)
        self.inputs = dict.fromkeys(self.inputs)  # their names alone: what has been read may go  # type: ignore[arg-type]

    def run_instruction(self, instruction: ModelInstruction, phase: Phase) -> int:
        """Walk one instruction with all that it reads in memory; the bytes that were sent."""
        if phase is Phase.FORWARD:
            self.offloader.fetch(self._get_read_values(instruction))
        else:
            self.offloader.fetch(self._take_saved(instruction.name, phase))
            self.offloader.fetch(self._get_gradients(instruction))
            self._going_back = instruction
        try:
            return super().run_instruction(instruction, phase)
        finally:
            self._going_back = None
            self.offloader.end_instruction()
            self._touched[instruction.name] = instruction

    def _take_saved(self, name: str, phase: Phase) -> Sequence[Tensor]:
        """What autograd keeps of a segment; of one whose weights' gradients come later it keeps it until then."""
        return self._saved.get(name, ()) if phase is Phase.INPUTS else self._saved.pop(name, ())

    def collect_touched(self) -> Iterator[Tensor]:
        """What instructions have made or added to since this was asked last, as far as it lives.

        Of what outlives the step only the prediction is large; the rest stays where it is: others read that, too.
        """
        if self._going_back is not None:
            self.offloader.fetch(self._get_gradients(self._going_back))  # one may have been begun since
        lasting = self.direction_program.kept_to_end - {self.direction_program.prediction}
        kept = {self.leaves[name].untyped_storage()._cdata for name in lasting & self.leaves.keys()}
        names = [*self._begun, *(name for each in self._touched.values() for name in _get_value_names(each))]
        saved = [tensor for name in self._touched for tensor in self._saved.get(name, ())]
        made = [tensor for name in self._touched for tensor in self._made.get(name, ())]
        self._begun, self._touched = [], {}
        for tensor in (*saved, *made, *self._get_tensors(names)):
            if tensor.untyped_storage()._cdata not in kept:
                yield tensor

    def _get_tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Values and their gradients."""
        for name in names:
            for tensors in (self.values, self.leaves):
                if name in tensors:
                    yield tensors[name]
            if name in self.leaves and self.leaves[name].grad is not None:
                yield self.leaves[name].grad

    def offload(self) -> None:
        """Others compute meanwhile: what it has made and added to goes into the file, but for what is in use."""
        self.offloader.offload(self.collect_touched())

    def fetch(self, tensor: Tensor) -> Tensor:
        """The same tensor, brought back to where it is computed with."""
        self.offloader.fetch([tensor])
        return tensor

    def _compute(self, segment: Compute) -> int:
        if not (segment.differentiable and self.runtime.keeps_graphs):
            return super()._compute(segment)
        saved: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor: _record_saved(saved, tensor), lambda tensor: tensor):
            sent = super()._compute(segment)
        self._saved[segment.name] = saved
        return sent

    def _get_read_values(self, instruction: ModelInstruction) -> Iterator[Tensor]:
        """What an instruction reads going forward."""
        names = instruction.inputs if isinstance(instruction, Compute) else (instruction.source,)
        return (self.values[name] for name in names if name in self.values)

    def _get_gradients(self, instruction: ModelInstruction) -> Iterator[Tensor]:
        """The gradients that an instruction reads or adds to."""
        leaves = (self.leaves.get(name) for name in _get_value_names(instruction))
        return (leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)


@dataclass
class EagerOffloadingMicroBatch(OffloadingMicroBatch):
    """A lane of an ordinary training: what an instruction has made on its way forward is put away as soon as it ends.

    What messages travel through is no part of a lane, so that nothing is moved while it is sent.
    """

    def __post_init__(self) -> None:
        self.inputs = {name: _copy_if_view(part) for name, part in self.inputs.items()}
        super().__post_init__()

    def run_instruction(self, instruction: ModelInstruction, phase: Phase) -> int:
        """Walk one instruction; the bytes that were sent."""
        sent = super().run_instruction(instruction, phase)
        self.offloader.offload(self.collect_touched() if phase is Phase.FORWARD else self._get_reread(instruction))
        return sent

    def _get_reread(self, instruction: ModelInstruction) -> Iterator[Tensor]:
        """What came back for a backward, and will be read by another one."""
        yield from self._saved.get(instruction.name, ())
        names = instruction.inputs if isinstance(instruction, Compute) else ()
        yield from (
            self.leaves[name]
            for name in names
            if name in self.leaves and name not in self.direction_program.kept_to_end
        )

    def _recompute(self, segment: Compute) -> None:
        self.offloader.fetch(self._get_inputs(segment))
        super()._recompute(segment)


def _get_value_names(instruction: ModelInstruction) -> tuple[str, ...]:
    """The values that an instruction reads and makes."""
    match instruction:
        case Compute():
            return (*instruction.inputs, *instruction.outputs)
        case ExchangeHalf():
            return (instruction.source, *(strip for strip, _ in instruction.strips))
    return (instruction.source, instruction.target)


def _copy_if_view(part: Tensor) -> Tensor:
    """Pixels that a caller gave, in a tensor of our own, which may be moved; nothing but these is moved."""
    return part.detach() if part.untyped_storage().nbytes() == part.nbytes else part.clone()


def _record_saved(saved: list[Tensor], tensor: Tensor) -> Tensor:
    """What autograd keeps instead: an output that its own graph keeps would never be let go of without a backward."""
    saved.append(tensor.data)
    return saved[-1]
