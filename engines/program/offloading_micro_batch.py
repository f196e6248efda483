"""Micro-batches whose values are offloaded while they are idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from engines.program.instructions import Compute, Exchange, ModelInstruction, Phase
from engines.program.micro_batch import MicroBatchState
from engines.program.offloader import Offloader

__all__ = ["OffloadingMicroBatch"]


@dataclass
class OffloadingMicroBatch(MicroBatchState):
    """A micro-batch that offloads what a forward instruction makes as soon as it ends, and fetches what one reads.

    It records what autograd saves for each segment. Message buffers do not belong to a micro-batch, so nothing is moved
    while it is being sent.
    """

    offloader: Offloader = field(kw_only=True)
    _saved: dict[str, list[Tensor]] = field(default_factory=dict)
    _touched: dict[str, ModelInstruction] = field(default_factory=dict)
    _going_back: ModelInstruction | None = None

    def __post_init__(self) -> None:
        # The caller's pixels, in tensors of their own memory, so that moving one moves nothing else.
        self.inputs = {
            name: part.detach() if part.untyped_storage().nbytes() == part.nbytes else part.clone()
            for name, part in self.inputs.items()
        }
        super().__post_init__()
        self._begun = list(self.inputs)
        self.inputs = dict.fromkeys(self.inputs)  # names only, so that inputs can be freed  # type: ignore[arg-type]

    def run_instruction(self, instruction: ModelInstruction, phase: Phase) -> int:
        """Run one instruction with all that it reads in memory, and offload what it made; return the bytes sent."""
        if phase is Phase.FORWARD:
            names = instruction.inputs if isinstance(instruction, Compute) else (instruction.source,)
            self.offloader.fetch(self.values[name] for name in names if name in self.values)
        else:
            # What autograd saved for a segment is read twice if the weights' gradients follow later (WEIGHTS).
            take = self._saved.get if phase is Phase.INPUTS else self._saved.pop
            self.offloader.fetch(take(instruction.name, ()))
            self.offloader.fetch(self._get_gradients(instruction))
            self._going_back = instruction
        try:
            sent = super().run_instruction(instruction, phase)
        finally:
            self._going_back = None
            self.offloader.end_instruction()
            self._touched[instruction.name] = instruction
        if phase is Phase.FORWARD:
            self.offload()
            return sent
        # Going backward, only what was fetched for this instruction and will be read by another one is worth a copy:
        # the rest is freed soon.
        names = instruction.inputs if isinstance(instruction, Compute) else ()
        lasting = self.direction_program.kept_to_end
        leaves = [self.leaves[name] for name in names if name in self.leaves and name not in lasting]
        self.offloader.offload([*self._saved.get(instruction.name, ()), *leaves])
        return sent

    def offload(self) -> None:
        """Offload what instructions have made or added to since the last call, as far as it is alive and not in use.

        Of the values that outlive the step only the prediction is large; the others are not offloaded, since other code
        reads them too.
        """
        if self._going_back is not None:
            self.offloader.fetch(self._get_gradients(self._going_back))  # one may have been created since
        lasting = self.direction_program.kept_to_end - {self.direction_program.prediction}
        # By storage, not by tensor: views of a value that stays must stay, too.
        kept = {self.leaves[name].untyped_storage()._cdata for name in lasting & self.leaves.keys()}
        names = [*self._begun, *(name for each in self._touched.values() for name in _get_value_names(each))]
        saved = [tensor for name in self._touched for tensor in self._saved.get(name, ())]
        made = [tensor for name in self._touched for tensor in self._made.get(name, ())]
        self._begun, self._touched = [], {}
        touched = (*saved, *made, *self._get_tensors(names))
        self.offloader.offload(tensor for tensor in touched if tensor.untyped_storage()._cdata not in kept)

    def _get_tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Yield values and their gradients."""
        for name in names:
            for tensors in (self.values, self.leaves):
                if name in tensors:
                    yield tensors[name]
            if name in self.leaves and self.leaves[name].grad is not None:
                yield self.leaves[name].grad

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return the tensor, moved back to the device it is computed on."""
        self.offloader.fetch([tensor])
        return tensor

    def _compute(self, segment: Compute) -> int:
        if not (segment.differentiable and self.runtime.keeps_graphs):
            return super()._compute(segment)
        saved: list[Tensor] = []

        # The hooks see every tensor that autograd saves, including intermediate results without a name. Autograd keeps
        # an alias in the tensor's place. If it kept an output itself, the output's graph would refer to the output: a
        # cycle that only a backward pass frees.
        #
        #   output --grad_fn--> node --saved--> output         output --grad_fn--> node --saved--> alias
        def record(tensor: Tensor) -> Tensor:
            saved.append(tensor.data)
            return saved[-1]

        with saved_tensors_hooks(record, lambda tensor: tensor):
            sent = super()._compute(segment)
        self._saved[segment.name] = saved
        return sent

    def _recompute(self, segment: Compute) -> None:
        self.offloader.fetch(self._get_inputs(segment))
        super()._recompute(segment)

    def _get_gradients(self, instruction: ModelInstruction) -> Iterator[Tensor]:
        """Return the gradients that an instruction reads or adds to."""
        leaves = (self.leaves.get(name) for name in _get_value_names(instruction))
        return (leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)


def _get_value_names(instruction: ModelInstruction) -> tuple[str, ...]:
    """Return the names of the values that an instruction reads and makes."""
    match instruction:
        case Compute():
            return (*instruction.inputs, *instruction.outputs)
        case Exchange():
            return (instruction.source, *(name for name, _ in instruction.parts))
    return (instruction.source, instruction.target)
