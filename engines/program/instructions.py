"""What a rank does, as data: local work between linear communications.

Values are named; a name means the same value on every rank, and each rank holds its own part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engines.layer.graph import Ref, TensorSpec, find_ref_names
from engines.spatial.moves import Move
from engines.spatial.tiles import Tile

if TYPE_CHECKING:
    from engines.program.program import Program

__all__ = [
    "DEVICE",
    "SEED",
    "AllReduce",
    "Compute",
    "CountLabels",
    "Exchange",
    "ExchangeHalf",
    "FiniteCheckAllReduce",
    "Instruction",
    "LocalOp",
    "ModelInstruction",
    "Phase",
    "ReduceBatchStats",
    "RunningStatistics",
    "SumGradients",
    "Update",
    "get_received_exchange",
    "with_prefix",
]

DEVICE = Ref("@device")
"""Where a rank has its tensors, as an argument of a kernel; each rank puts its own."""

SEED = Ref("@seed")
"""What random numbers follow from, likewise: the same number on every rank, another one for each training step."""


class Phase(Enum):
    """Which way an instruction is walked. Backward is to inputs and weights at once, or to one and then the other."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUTS = "inputs"
    WEIGHTS = "weights"
    UPDATE = "update"


@dataclass(frozen=True)
class LocalOp:
    """One local kernel: an ATen operator (`aten.relu.default`) or one of our own (`tile.pad`).

    One that is not `graded` runs without recording how its gradient would be computed.
    """

    out: str
    kernel: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    graded: bool = True

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the values that it reads, in order."""
        return tuple(find_ref_names((self.arguments, self.keywords)))


@dataclass(frozen=True, slots=True)
class Compute:
    """A segment: local work between two communications.

    Backward: one `torch.autograd.backward` from `outputs` to `inputs`. `interior`: what it makes is for the next
    segment alone, which completes it in its memory.
    """

    name: str
    ops: tuple[LocalOp, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: bool
    interior: bool = False

    @property
    def kind(self) -> str:
        """For figures."""
        return "compute"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Pixels of `source` travel so that this rank holds `window` of it under the name `target`.

    `own` is the part of `source` that this rank holds, None if it holds none; `window` is None if it wants
    none. `axes` are the two spatial axes, counted from the end, or None where the value has no pixels
    and travels whole. Pixels of the window outside the image are `fill`.
    `shape` is that of the whole-image value.
    Backward is the adjoint: the same moves the other way, adding; what fell on the fill is dropped.
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

    def compute_shape(self, tile: Tile) -> tuple[int, ...]:
        """The shape of the pixels of `tile`: all channels, all its images."""
        shape = list(self.shape)
        if tile.images is not None:
            shape[0] = len(tile.images)
        if self.axes is not None:
            shape[self.axes[0]], shape[self.axes[1]] = tile.shape
        return tuple(shape)

    def compute_bytes(self, moves: Iterable[Move]) -> int:
        """What travels with these moves."""
        return sum(TensorSpec(self.compute_shape(move.tile), self.dtype).bytes for move in moves)

    @property
    def window_covers_own(self) -> bool:
        """Whether all that this rank holds of the source lies in its window."""
        return bool(self.own and self.window) and self.own & self.window == self.own  # type: ignore[operator]

    @property
    def kind(self) -> str:
        """For figures."""
        return self.purpose


@dataclass(frozen=True, slots=True)
class ExchangeHalf:
    """The first or the second half of an exchange, between which this rank computes what needs no other rank.

    It `begins` as messages are posted, and ends when they are here and `strips` hold their pixels: of the window no
    more is made than these (name, tile). Backward is the adjoint, which begins where forward ends: gradients of the
    strips leave, and when those lent are home, all are added to that of the source.
    """

    exchange: Exchange
    strips: tuple[tuple[str, Tile], ...]
    begins: bool

    @property
    def name(self) -> str:
        """Which exchange, and which end of it, as it is walked."""
        return f"{self.exchange.name} {'begins' if self.begins else 'ends'}"

    @property
    def source(self) -> str:
        """The value whose pixels travel."""
        return self.exchange.source

    @property
    def differentiable(self) -> bool:
        """Whether it is walked back."""
        return self.exchange.differentiable

    @property
    def kind(self) -> str:
        """For figures."""
        return self.exchange.purpose

    @property
    def adjoint(self) -> ExchangeHalf:
        """What stands in its place going back."""
        return replace(self, begins=not self.begins)


def get_received_exchange(instruction: Instruction) -> Exchange | None:
    """The exchange whose messages are here when this instruction is done."""
    if isinstance(instruction, ExchangeHalf):
        return None if instruction.begins else instruction.exchange
    return instruction if isinstance(instruction, Exchange) else None


@dataclass(frozen=True, slots=True)
class AllReduce:
    """`target` is the sum of `source` over the ranks in `group`; backward sums the gradients likewise."""

    name: str
    source: str
    target: str
    spec: TensorSpec
    group: tuple[int, ...]
    differentiable: bool

    @property
    def kind(self) -> str:
        """For figures."""
        return "all-reduce"

    @property
    def bytes(self) -> int:
        """Of each rank's summand."""
        return self.spec.bytes


@dataclass(frozen=True, slots=True)
class SumGradients:
    """The gradients of `weights`, held by all ranks in `group`, are summed over them.

    Walked twice: it begins in backward and ends at the update. `tag` keeps its messages apart from others'.
    """

    name: str
    weights: tuple[str, ...]
    bytes: int
    group: tuple[int, ...]
    tag: int
    differentiable: bool = False

    @property
    def kind(self) -> str:
        """For figures."""
        return "all-reduce"


@dataclass(frozen=True, slots=True)
class FiniteCheckAllReduce:
    """All ranks in `group` have come this far: none updates its weights if another one has failed before.

    They agree whether all gradients are finite, and on their norm: each weight is `counted` by one rank only.
    """

    name: str
    group: tuple[int, ...]
    counted: tuple[str, ...] = ()
    bytes: int = 16
    differentiable: bool = False

    @property
    def kind(self) -> str:
        """For figures."""
        return "all-reduce"


@dataclass(frozen=True, slots=True)
class CountLabels:
    """The ranks in `group` count in all labels of a step what the loss of the whole batch divides by.

    Each walks a small `program` over its own micro-batches; what they find, `bytes` of it, is added up once.
    """

    name: str
    program: Program
    bytes: int
    group: tuple[int, ...]
    differentiable: bool = False

    @property
    def kind(self) -> str:
        """For figures."""
        return "all-reduce" if len(self.group) > 1 else "compute"


@dataclass(frozen=True, slots=True)
class ReduceBatchStats:
    """All ranks in `group` learn the moments of every micro-batch, whichever copy of the model it went through.

    `tells` are the micro-batches of which this rank tells the others.
    """

    name: str
    moments: tuple[str, ...]
    own_micro_batches: tuple[int, ...]
    bytes: int
    group: tuple[int, ...]
    differentiable: bool = False

    @property
    def kind(self) -> str:
        """For figures."""
        return "all-reduce"


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Batch norm's buffers move at the update, by what the value `moments` says of all tiles' `counts` pixels.

    Once for each micro-batch, in their order. The ranks `mean_over` count each for its own tile and its own
    micro-batches, and keep the mean of the buffers. With a `counter`, a buffer that counts the micro-batches, the
    running statistics are the mean over all of them, and `momentum` means nothing.
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
    """The optimiser's step, and the buffers': running statistics, and counters that grow by a constant."""

    name: str
    statistics: tuple[RunningStatistics, ...]
    counters: Mapping[str, int]
    differentiable: bool = False

    @property
    def kind(self) -> str:
        """For figures."""
        return "update"


ModelInstruction = Compute | Exchange | ExchangeHalf | AllReduce
"""What a micro-batch's forward pass is made of."""

Instruction = ModelInstruction | CountLabels | SumGradients | ReduceBatchStats | FiniteCheckAllReduce | Update


def with_prefix(item: ModelInstruction, prefix: str) -> ModelInstruction:
    """The same instruction under a longer name."""
    if isinstance(item, ExchangeHalf):
        return replace(item, exchange=replace(item.exchange, name=f"{prefix}{item.exchange.name}"))
    return replace(item, name=f"{prefix}{item.name}")
