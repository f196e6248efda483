"""The state of one micro-batch on one rank: its values, and how each instruction runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.program.effects import Instruction, Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import ExchangeRunner, StartedExchange
from mpi4dl_nb.engines.program.instructions import AllReduce, Compute
from mpi4dl_nb.engines.program.program import DirectionProgram, LiveValues
from mpi4dl_nb.engines.program.ring import RingAttention
from mpi4dl_nb.engines.program.ring_runner import RingRunner
from mpi4dl_nb.engines.program.segment import Segment


@dataclass(frozen=True)
class Runtime:
    """What all micro-batches of a rank share. Exchanges are by `Exchange.key`, all others by the instruction's name.

    `keeps_graphs`: a segment's local autograd graph is kept until its backward pass, which otherwise recomputes it.
    """

    world: World
    exchange_runners: Mapping[str, ExchangeRunner]
    segments: dict[str, Segment]
    ring_runners: Mapping[str, RingRunner]
    keeps_graphs: bool = True


@dataclass
class MicroBatchState(LiveValues[Tensor]):
    """The values of one micro-batch as leaf tensors: the gradients of all readers of a value accumulate in `.grad`.

    `values` are those that the forward pass has still to read, `leaves` those that the backward pass needs. `seed` is
    the seed of random numbers, `loss_gradient` the gradient of the loss with which the backward pass starts. `inputs`
    are None where they may be released.
    """

    runtime: Runtime
    direction_program: DirectionProgram
    inputs: Mapping[str, Tensor | None]
    seed: int
    loss_gradient: float
    values: dict[str, Tensor] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    # By segment, from its forward to its backward pass: where the local graph of each output begins, None without one.
    # The output itself would hold memory: also that of which it is a view, wherever its own data are moved.
    #
    #   forward    leaf x --[segment graph]--> output y ..detach..> leaf y --[next segment's graph]--> ...
    #   backward   x.grad <--[segment graph]-- y.grad <------------ (read and released) <---- summed here by all readers
    _graphs: dict[str, list[GradientEdge | None]] = field(default_factory=dict)
    # By segment, from INPUTS to WEIGHTS: the graphs of its differentiable outputs, and their gradients.
    _late: dict[str, tuple[list[GradientEdge], list[Tensor]]] = field(default_factory=dict)
    # By exchange, from where it begins to where it ends.
    _under_way: dict[str, StartedExchange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = {name: tensor for name, tensor in self.inputs.items() if tensor is not None}
        self.values.update(tensors)
        self.leaves.update(tensors)

    def run_instruction(self, instruction: Instruction, phase: Phase) -> int:
        """Run one instruction and return the bytes that it sent."""
        sent = KERNELS[type(instruction)](self, instruction, phase)
        if phase is Phase.FORWARD:
            self.release_read(instruction)
        return sent

    @property
    def loss(self) -> float | None:
        """The loss, or None before it is computed and on ranks that do not compute it."""
        return self.leaves[self.direction_program.loss].item() if self.direction_program.loss in self.leaves else None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors held by name, and their gradients; some may be views of others."""
        for tensor in (*self.values.values(), *self.leaves.values()):
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad

    def fetch(self, tensor: Tensor) -> Tensor:
        """Return one of its tensors with its content accessible."""
        return tensor

    def offload(self) -> None:
        """Release memory while the micro-batch is idle (nothing to do here; subclasses offload)."""

    def end_step(self) -> None:
        """Keep only the values that outlive the step."""
        kept = self.direction_program.kept_to_end | self.inputs.keys()
        self.leaves = {name: leaf for name, leaf in self.leaves.items() if name in kept}
        self.values = {name: value for name, value in self.values.items() if name in kept}

    def keep(self, name: str, value: Tensor, differentiable: bool) -> None:
        """Hold a value that an instruction has made."""
        # Detached: each segment's graph is local, and communications join the graphs by copying gradients between
        # leaves.
        has_gradient = differentiable and (value.is_floating_point() or value.is_complex())
        self.leaves[name] = self.values[name] = value.detach().requires_grad_(has_gradient)

    def needs_gradient(self, name: str) -> bool:
        return self.values[name].requires_grad

    @property
    def recomputes(self) -> bool:
        return not self.runtime.keeps_graphs

    def _compute(self, segment: Compute, phase: Phase) -> int:
        if phase is not Phase.FORWARD:
            return self._compute_backward(segment, phase)
        # `outputs` are roots of the local graph; readers get detached leaves instead (see `keep`).
        outputs = self.runtime.segments[segment.name](self.values, self.seed)
        for name, value in zip(segment.outputs, outputs, strict=True):
            self.keep(name, value, value.requires_grad)
        if segment.differentiable and self.runtime.keeps_graphs:
            self._graphs[segment.name] = _get_graphs(outputs)
        if not self.runtime.keeps_graphs:
            for name in self.direction_program.interiors.keys() & set(segment.inputs):
                del self.leaves[name]  # the recomputation in backward makes it anew
        if self.direction_program.loss in segment.outputs:
            # On one rank only: the other ranks that share this loss start with zero, or it would count several times.
            loss = self.leaves[self.direction_program.loss]
            loss.grad = torch.full_like(loss, self.loss_gradient if self.direction_program.seeds_loss else 0.0)
        return 0

    def _compute_backward(self, segment: Compute, phase: Phase) -> int:
        """Run a segment's backward pass, or one of the halves into which zero bubble splits it.

        BACKWARD computes all gradients at once; INPUTS those of the inputs alone, which other ranks wait for, and
        WEIGHTS those of the weights alone, which can wait (Qi et al., 2024, arXiv:2401.10241, section 2).
        """
        # `_late` takes what the second half needs from the first one:
        #
        #   INPUTS    outputs' gradients, graph --> inputs' gradients         graph kept in `_late`
        #   WEIGHTS   `_late`                   --> weights' gradients        graph freed
        if phase is Phase.WEIGHTS:
            roots, grads = self._late.pop(segment.name, ([], []))
        else:
            if segment.name not in self._graphs:
                self._recompute(segment)
            outputs = zip(self._graphs.pop(segment.name), map(self.take_gradient, segment.outputs), strict=True)
            pairs = [(graph, grad) for graph, grad in outputs if grad is not None and graph is not None]
            roots, grads = [graph for graph, _ in pairs], [grad for _, grad in pairs]
        if not roots:
            return 0
        ready = self.runtime.segments[segment.name]
        if phase is Phase.BACKWARD or not ready.late:
            ready.backward(roots, grads)
        elif phase is Phase.WEIGHTS:
            torch.autograd.backward(roots, grads, inputs=ready.late)
        else:
            inputs = [leaf for leaf in self._get_inputs(segment) if leaf.requires_grad]
            if inputs:
                torch.autograd.backward(roots, grads, inputs=inputs, retain_graph=True)
            self._late[segment.name] = roots, grads
        # Not in WEIGHTS: that phase accumulates into the weights only, so no leaf got a gradient.
        if phase is not Phase.WEIGHTS:
            self._copy_shared_gradients(segment, self._late.get(segment.name, ((), ()))[1])
        return 0

    def _recompute(self, segment: Compute) -> tuple[Tensor, ...]:
        """Recompute and return a segment's outputs, first those of an interior segment that it completes.

        The backward pass of that interior segment follows.
        """
        for name in self.direction_program.interiors.keys() & set(segment.inputs):
            interior = self.direction_program.interiors[name]
            for begun, value in zip(interior.outputs, self._recompute(interior), strict=True):
                self.leaves[begun] = value.detach().requires_grad_(value.requires_grad)
        outputs = self.runtime.segments[segment.name](self.leaves, self.seed, again=True)
        self._graphs[segment.name] = _get_graphs(outputs)
        return outputs

    def _copy_shared_gradients(self, segment: Compute, kept: Sequence[Tensor]) -> None:
        """Give each leaf a gradient whose memory no other leaf, weight or `kept` gradient shares.

        Autograd may give two leaves one buffer (where both reach a sum through views). A later addition to one gradient
        would then change the other as well, or a message that is being sent. `kept` are the gradients saved for the
        weights' pass.
        """
        weights = (weight.grad for weight in self.runtime.segments[segment.name].trained)
        seen = {_get_address(grad) for grad in (*weights, *kept) if grad is not None}
        for leaf in self._get_inputs(segment):
            if leaf.grad is not None:
                leaf.grad = leaf.grad.clone() if _get_address(leaf.grad) in seen else leaf.grad
                seen.add(_get_address(leaf.grad))

    def _get_inputs(self, segment: Compute) -> list[Tensor]:
        """Return those inputs of a segment that the backward pass needs."""
        return [self.leaves[name] for name in segment.inputs if name in self.leaves]

    def take_gradient(self, name: str) -> Tensor | None:
        """Return the gradient accumulated for a value and release it."""
        if (leaf := self.leaves.get(name)) is None:
            return None
        self.release_leaf(name)
        grad, leaf.grad = leaf.grad, None
        return grad

    def _sum(self, total: AllReduce, phase: Phase) -> int:
        layout = torch.contiguous_format  # as the all-reduce needs it
        if phase is Phase.FORWARD:
            # A copy, since the all-reduce is in place and others may still read the source.
            summed = self.values[total.source].detach().clone(memory_format=layout)
            sent = all_reduce(self.runtime.world, summed, total.group).wait()
            self.keep(total.target, summed, total.differentiable)
            return sent
        # y = sum over ranks of x is read on every rank, so dL/dx is the sum over ranks of dL/dy. A rank without a
        # gradient must take part with zeros: the all-reduce is collective.
        leaf, grad = self.leaves[total.source], self.take_gradient(total.target)
        summed = torch.zeros_like(leaf, memory_format=layout) if grad is None else grad.clone(memory_format=layout)
        sent = all_reduce(self.runtime.world, summed, total.group).wait()
        leaf.grad = summed if leaf.grad is None else leaf.grad.add_(summed)
        return sent

    def _exchange(self, exchange: Exchange, phase: Phase) -> int:
        runner, sent = self.runtime.exchange_runners[exchange.key], 0
        if phase is Phase.FORWARD:
            if exchange.begins:
                source = self.values.get(exchange.source) if exchange.own else None
                self._under_way[exchange.key], sent = runner.start_forward(source)
            if exchange.ends:
                parts = runner.wait_forward(self._under_way[exchange.key])
                del self._under_way[exchange.key]
                for (name, _), pixels in zip(exchange.parts, parts, strict=True):
                    self.keep(name, pixels, exchange.differentiable)
            return sent
        source = self.leaves[exchange.source] if exchange.own else None
        if exchange.begins:
            grads = [self.take_gradient(name) for name, _ in exchange.parts]
            self._under_way[exchange.key], sent = runner.start_backward(grads, source)
        if exchange.ends:
            # With no other reader, nothing is added to the source's gradient later, so it may remain a view of the
            # window's.
            alone = len(self.direction_program.reads[exchange.source]) == 1
            runner.wait_backward(self._under_way[exchange.key], source, alone)
            del self._under_way[exchange.key]
        return sent

    def _attend(self, ring: RingAttention, phase: Phase) -> int:
        runner = self.runtime.ring_runners[ring.name]
        if phase is Phase.FORWARD:
            result, log_sums, sent = runner.run_forward(self.values, self.seed)
            self.keep(ring.target, result, ring.differentiable)
            self.keep(ring.log_sums, log_sums, differentiable=False)
            return sent
        leaves = {name: self.fetch(self.leaves[name]) for name in (*ring.sources, ring.target, ring.log_sums)}
        grad = self.take_gradient(ring.target)
        self.release_leaf(ring.log_sums)
        # A rank whose result nobody reads takes part with zeros: the others need its keys.
        grad = torch.zeros_like(leaves[ring.target]) if grad is None else grad
        gradients, sent = runner.run_backward(leaves, grad, self.seed)
        for name, part in gradients.items():
            if (leaf := leaves[name]).requires_grad:
                leaf.grad = part if leaf.grad is None else leaf.grad.add_(part)
        return sent


Kernel = Callable[[MicroBatchState, Any, Phase], int]
"""Runs an instruction for a micro-batch in a phase, and returns the bytes that it sent."""

KERNELS: dict[type[Instruction], Kernel] = {
    Compute: MicroBatchState._compute,
    Exchange: MicroBatchState._exchange,
    AllReduce: MicroBatchState._sum,
    RingAttention: MicroBatchState._attend,
}
"""The kernels of the instructions of a micro-batch, by their kind."""


def _get_graphs(outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Return where the graph of each of a segment's outputs begins, None for one without a graph."""
    return [get_gradient_edge(value) if value.requires_grad else None for value in outputs]


def _get_address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()
