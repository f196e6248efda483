"""The effects of an instruction, as data: all that forecasts, traffic, offloading and figures need to know of it.

An instruction declares its effects in each phase (`Instruction.get_effects`). The runtime has a kernel for each kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from mpi4dl_nb.engines.geometry.tiles import Move
from mpi4dl_nb.engines.graph.model_graph import TensorSpec, find_ref_names


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
class MessageSpec:
    """A message of `bytes` bytes to or from rank `peer`: the pixels of `move`, or backward their gradients."""

    peer: int
    bytes: int
    move: Move


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of an exchange on one rank, in the order of posting.

    An instruction posts them, waits for them, or both. Messages of one tag, between two ranks, arrive in order.
    `packed` and `unpacked` are the bytes copied into and out of messages, `own` the bytes of the rank's own pixels that
    are copied between the two values. These stay in place if the source was computed inside the window (`makes_room`)
    and, backward, if its gradient may be a part of the window's (`in_place`). `arena` is the memory that the messages
    use of what is kept between steps. Otherwise they have memory of their own; `lasting` bytes of it are held
    until the next instruction has run, since nothing here waits for the end of the sends.
    """

    tag: int
    sends: tuple[MessageSpec, ...]
    receives: tuple[MessageSpec, ...]
    posts: bool
    waits: bool
    packed: int
    unpacked: int
    own: int
    makes_room: bool
    in_place: bool
    arena: int
    lasting: int

    @property
    def bytes(self) -> int:
        """The bytes of all messages, sent and received."""
        return sum(message.bytes for message in (*self.sends, *self.receives))


@dataclass(frozen=True, slots=True)
class Reduction:
    """An all-reduce of `bytes` bytes over the ranks in `group`, on all of which it has the same name.

    An instruction starts it, waits for its end, or both. One that is waited for later proceeds in the background.
    """

    name: str
    group: tuple[int, ...]
    bytes: int
    starts: bool = True
    waits: bool = True


@dataclass(frozen=True, slots=True)
class Effects:
    """What one instruction does in one phase.

    It `reads` values and `makes` others, whose specs are `specs` where they do not follow from its kernels. In another
    phase than FORWARD these are the gradients of the values, and those that are read are freed. `temporary` are the
    bytes of memory that an instruction with messages needs beside these. `updates` is set only for the weight update,
    which runs on all ranks or none: the number of running statistics that it updates. `inner` are the effects of a
    small program that the instruction runs.
    """

    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)
    messages: Messages | None = None
    reductions: tuple[Reduction, ...] = ()
    temporary: int = 0
    updates: int | None = None
    inner: tuple[Effects, ...] = ()


class Instruction(ABC):
    """What every instruction declares. The `kind` of an instruction is the category shown in figures."""

    __slots__ = ()

    name: str
    differentiable: bool = False
    per_micro_batch: ClassVar[bool] = False
    """Whether it belongs to a micro-batch, and not to the step as a whole."""
    is_local: ClassVar[bool] = False
    """Whether it only runs kernels (`local_ops`), and needs no other rank."""

    @property
    @abstractmethod
    def kind(self) -> str: ...

    @abstractmethod
    def get_effects(self, phase: Phase) -> Effects:
        """Return what the instruction does in a phase."""

    @property
    def interior(self) -> bool:
        """Whether only the next segment reads what it makes, and completes it in the same memory."""
        return False

    @property
    def is_image(self) -> bool:
        """Whether what it makes of four or five axes is stored as images (N, C, ...) are: channels last."""
        return True

    @property
    def key(self) -> str:
        """Its name, or that of the instruction of which it is one half."""
        return self.name

    @property
    def local_ops(self) -> tuple[LocalOp, ...]:
        """The kernels that it runs on this rank alone."""
        return ()

    @property
    def adjoint(self) -> Instruction:
        """The instruction that takes its place in the backward pass."""
        return self


Kind = TypeVar("Kind", bound=Instruction)


def select_kind(items: Iterable[Instruction], kind: type[Kind]) -> Iterator[Kind]:
    """Yield the instructions of one kind, in order."""
    return (item for item in items if isinstance(item, kind))
