"""Instructions of a rank's program, as data: local computation between linear communications.

A value is identified by its name. The name means the same value on every rank; each rank holds its own part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mpi4dl_nb.engines.graph.model_graph import Ref, TensorSpec
from mpi4dl_nb.engines.program.effects import Effects, Instruction, LocalOp, Phase, Reduction
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.ring import RingAttention

DEVICE = Ref("@device")
"""Placeholder for the device of a rank's tensors in a kernel's arguments; each rank substitutes its own device."""

SEED = Ref("@seed")
"""Placeholder for the seed of random numbers: the same number on every rank, a new one for each training step."""


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """A segment: the local computation between two communications.

    Backward is one `torch.autograd.backward` from `outputs` to `inputs`. The outputs of an `interior` segment are read
    only by the next segment, which completes them in the same memory.
    """

    per_micro_batch: ClassVar[bool] = True
    is_local: ClassVar[bool] = True
    kind: ClassVar[str] = "compute"
    name: str
    ops: tuple[LocalOp, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: bool
    interior: bool = False

    @property
    def local_ops(self) -> tuple[LocalOp, ...]:
        """The kernels that it runs on this rank alone."""
        return self.ops

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the segment does in a phase."""
        if phase is Phase.FORWARD:
            return Effects(self.inputs, self.outputs)
        # The gradients of the outputs are kept for WEIGHTS, which adds to the weights' gradients only.
        return Effects() if phase is Phase.WEIGHTS else Effects(self.outputs, self.inputs)


@dataclass(frozen=True, slots=True)
class AllReduce(Instruction):
    """`target` is the sum of `source` over the ranks in `group`; backward sums the gradients over the same ranks."""

    per_micro_batch: ClassVar[bool] = True
    kind: ClassVar[str] = "all-reduce"
    name: str
    source: str
    target: str
    spec: TensorSpec
    group: tuple[int, ...]
    differentiable: bool

    @property
    def sources(self) -> tuple[str, ...]:
        """The values that it reads."""
        return (self.source,)

    @property
    def bytes(self) -> int:
        """Size in bytes of each rank's term."""
        return self.spec.bytes

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the all-reduce does in a phase."""
        reductions = (Reduction(self.name, self.group, self.bytes),)
        if phase is Phase.FORWARD:
            return Effects((self.source,), (self.target,), {self.target: self.spec}, reductions=reductions)
        return Effects((self.target,), (self.source,), reductions=reductions)


@dataclass(frozen=True, slots=True)
class SumGradients(Instruction):
    """An all-reduce of the gradients of `weights` over the ranks in `group`, all of which hold these weights.

    The instruction appears twice in a program: it starts in the backward pass and is waited for at the update. `tag`
    separates its messages from those of other sums.
    """

    kind: ClassVar[str] = "all-reduce"
    name: str
    weights: tuple[str, ...]
    bytes: int
    group: tuple[int, ...]
    tag: int

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the sum does in a phase: it ends in the update, and starts in any other phase."""
        ends = phase is Phase.UPDATE
        reductions = (Reduction(self.name, self.group, self.bytes, starts=not ends, waits=ends),)
        return Effects(self.weights if ends else (), reductions=reductions)  # the sums replace the gradients


FINITE_CHECK = "agree"
"""The name of a program's `FiniteCheckAllReduce`."""


@dataclass(frozen=True, slots=True)
class FiniteCheckAllReduce(Instruction):
    """A barrier before the update over the ranks in `group`: no rank changes its weights if another has failed before.

    The same all-reduce yields whether all gradients are finite, and their norm. Each weight is `counted` by one rank
    only.
    """

    kind: ClassVar[str] = "all-reduce"
    name: str
    group: tuple[int, ...]
    counted: tuple[str, ...] = ()
    bytes: int = 16

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the all-reduce does."""
        return Effects(reductions=(Reduction(self.name, self.group, self.bytes),))


@dataclass(frozen=True, slots=True)
class ReduceBatchStats(Instruction):
    """An all-reduce by which all ranks in `group` get the moments of every micro-batch, from all replicas and
    directions.

    This rank contributes the moments of its `own_micro_batches`.
    """

    kind: ClassVar[str] = "all-reduce"
    name: str
    moments: tuple[str, ...]
    own_micro_batches: tuple[int, ...]
    bytes: int
    group: tuple[int, ...]

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the all-reduce does."""
        return Effects(reductions=(Reduction(self.name, self.group, self.bytes),))


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """How batch norm's buffers are updated from the value `moments`, which covers the `counts` pixels of all tiles.

    They are updated once per micro-batch, in order. The ranks `mean_over` each count for their own tile and their own
    micro-batches, and keep the mean of the two buffers, of `mean_bytes` bytes. With a `counter`, a buffer that counts
    the micro-batches, the running statistics are the mean over all of them and `momentum` is ignored.
    `turn` counts the passes over all micro-batches: 0 is that of forward, others are those of what backward recomputes.
    `whole`: the moments are those of the whole batch, and there is one update for all micro-batches.
    """

    mean_buffer: str
    variance_buffer: str
    moments: str
    momentum: float
    counts: tuple[int, ...]
    mean_over: tuple[int, ...] = ()
    counter: str | None = None
    mean_bytes: int = 0
    turn: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Update(Instruction):
    """The optimiser step, and the update of the buffers: running statistics, and counters that grow by a constant."""

    kind: ClassVar[str] = "update"
    name: str
    statistics: tuple[RunningStatistics, ...]
    counters: Mapping[str, int]

    @property
    def buffers(self) -> frozenset[str]:
        """The buffers that it changes."""
        names = ((entry.mean_buffer, entry.variance_buffer) for entry in self.statistics)
        return frozenset(self.counters).union(*names)

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the update does: besides the optimiser step, it takes the mean of tiles' own statistics."""
        sizes: Counter[tuple[int, ...]] = Counter()
        for entry in self.statistics:
            sizes[entry.mean_over] += entry.mean_bytes
        means = (Reduction(f"{self.name} {group}", group, size) for group, size in sorted(sizes.items()) if group)
        return Effects(reductions=tuple(means), updates=len(self.statistics))


ModelInstruction = Compute | Exchange | AllReduce | RingAttention
"""The instructions of which a micro-batch's forward pass consists."""
