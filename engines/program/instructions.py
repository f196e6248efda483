"""Instructions of a rank's program, as data: local computation between linear communications.

A value is identified by its name. The name means the same value on every rank; each rank holds its own part of it.
The `kind` of an instruction is the category shown in figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

from engines.graph.model_graph import Ref, TensorSpec, find_ref_names
from engines.spatial.tiles import Move, Tile

__all__ = [
    "DEVICE",
    "SEED",
    "AllReduce",
    "Compute",
    "Exchange",
    "FiniteCheckAllReduce",
    "LocalOp",
    "ModelInstruction",
    "Phase",
    "ReduceBatchStats",
    "RunningStatistics",
    "SumGradients",
    "Update",
]

DEVICE = Ref("@device")
"""Placeholder for the device of a rank's tensors in a kernel's arguments; each rank substitutes its own device."""

SEED = Ref("@seed")
"""Placeholder for the seed of random numbers: the same number on every rank, a new one for each training step."""


class Phase(Enum):
    """The pass in which an instruction runs.

    BACKWARD computes the gradients of inputs and weights together; INPUTS and WEIGHTS compute them separately.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUTS = "inputs"
    WEIGHTS = "weights"
    UPDATE = "update"


@dataclass(frozen=True)
class LocalOp:
    """One local kernel: an ATen operator (`aten.relu.default`) or one of the project's own (`tile.pad`).

    An op that is not `graded` runs without recording a graph for its gradient.
    """

    out: str
    kernel: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    graded: bool = True

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that the op reads, in order."""
        return tuple(find_ref_names((self.arguments, self.keywords)))


@dataclass(frozen=True, slots=True)
class Compute:
    """A segment: the local computation between two communications.

    Backward is one `torch.autograd.backward` from `outputs` to `inputs`. The outputs of an `interior` segment are read
    only by the next segment, which completes them in the same memory.
    """

    kind: ClassVar[str] = "compute"
    name: str
    ops: tuple[LocalOp, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: bool
    interior: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """Pixels of `source` are transferred so that this rank holds `window` of it under the name `target`.

    `own` is the part of `source` that this rank holds (None if it holds none); `window` is None if the rank needs none.
    `axes` are the two spatial axes, counted from the end, or None where the value has no pixels and is transferred
    whole. `shape` is that of the value for the whole image. Pixels of the window outside the image are `fill`.

    Backward is the adjoint: the same moves with source and target swapped, accumulating at the destination. Gradients
    of the fill are dropped.

    An exchange begins, where it posts its messages, and ends, where it waits for them. Both are one instruction, or
    (`split`) two, between which the rank computes what depends on no other rank. Then only `strips` of the window are
    ever made, a list of (name, tile). Backward runs in reverse order: it begins at the second half, which sends the
    gradients of the strips, and ends at the first half, which receives the gradients of the pixels that this rank had
    sent and adds everything to the gradient of the source.
    """

    name: str
    purpose: str
    source: str
    target: str
    axes: tuple[int, int] | None
    shape: tuple[int, ...]
    dtype: str
    own: Tile | None
    window: Tile | None
    fill: float
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    tag: int
    differentiable: bool
    strips: tuple[tuple[str, Tile], ...] = ()
    begins: bool = True
    ends: bool = True

    @property
    def key(self) -> str:
        """The name of the exchange, which its two halves share."""
        return self.name if self.begins and self.ends else self.name.rpartition(" ")[0]

    @property
    def parts(self) -> tuple[tuple[str, Tile], ...]:
        """The tensors that the exchange makes, with their tiles: the window if the rank needs one, or strips of it."""
        return self.strips or (((self.target, self.window),) if self.window is not None else ())

    def split(self, strips: tuple[tuple[str, Tile], ...]) -> Exchange:
        """Return the first half of the exchange in halves that makes `strips`; the second one is its `adjoint`."""
        return replace(self, name=f"{self.name} begins", strips=strips, ends=False)

    @property
    def adjoint(self) -> Exchange:
        """The instruction in the place of this one in the backward pass: itself, or of a half the other half."""
        if self.begins and self.ends:
            return self
        return replace(self, name=f"{self.key} {'begins' if self.ends else 'ends'}", begins=self.ends, ends=self.begins)

    def compute_shape(self, tile: Tile) -> tuple[int, ...]:
        """Return the shape of the pixels of `tile`, with all channels and all images of the tile."""
        shape = list(self.shape)
        if tile.images is not None:
            shape[0] = len(tile.images)
        if self.axes is not None:
            shape[self.axes[0]], shape[self.axes[1]] = tile.shape
        return tuple(shape)

    def compute_bytes(self, moves: Iterable[Move]) -> int:
        """Return the total size in bytes of the messages of these moves."""
        return sum(TensorSpec(self.compute_shape(move.tile), self.dtype).bytes for move in moves)

    @property
    def window_covers_own(self) -> bool:
        """Whether the window contains all that this rank holds of the source."""
        return bool(self.own and self.window) and self.own & self.window == self.own  # type: ignore[operator]

    @property
    def kind(self) -> str:
        """The category shown in figures."""
        return self.purpose


@dataclass(frozen=True, slots=True)
class AllReduce:
    """`target` is the sum of `source` over the ranks in `group`; backward sums the gradients over the same ranks."""

    kind: ClassVar[str] = "all-reduce"
    name: str
    source: str
    target: str
    spec: TensorSpec
    group: tuple[int, ...]
    differentiable: bool

    @property
    def bytes(self) -> int:
        """Size in bytes of each rank's term."""
        return self.spec.bytes


@dataclass(frozen=True, slots=True)
class SumGradients:
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
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class FiniteCheckAllReduce:
    """A barrier before the update over the ranks in `group`: no rank changes its weights if another has failed before.

    The same all-reduce yields whether all gradients are finite, and their norm. Each weight is `counted` by one rank
    only.
    """

    kind: ClassVar[str] = "all-reduce"
    name: str
    group: tuple[int, ...]
    counted: tuple[str, ...] = ()
    bytes: int = 16
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class ReduceBatchStats:
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
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """How batch norm's buffers are updated from the value `moments`, which covers the `counts` pixels of all tiles.

    They are updated once per micro-batch, in order. The ranks `mean_over` each count for their own tile and their own
    micro-batches, and keep the mean of the buffers. With a `counter`, a buffer that counts the micro-batches, the
    running statistics are the mean over all of them and `momentum` is ignored.
    """

    mean_buffer: str
    variance_buffer: str
    moments: str
    momentum: float
    counts: tuple[int, ...]
    mean_over: tuple[int, ...] = ()
    counter: str | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """The optimiser step, and the update of the buffers: running statistics, and counters that grow by a constant."""

    kind: ClassVar[str] = "update"
    name: str
    statistics: tuple[RunningStatistics, ...]
    counters: Mapping[str, int]
    differentiable: bool = False

    @property
    def buffers(self) -> frozenset[str]:
        """The buffers that it changes."""
        names = ((entry.mean_buffer, entry.variance_buffer) for entry in self.statistics)
        return frozenset(self.counters).union(*names)


ModelInstruction = Compute | Exchange | AllReduce
"""The instructions of which a micro-batch's forward pass consists."""
