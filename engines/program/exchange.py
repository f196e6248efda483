"""Exchanges of pixels between ranks, as data: which pixels travel, what is made of them, and the memory on the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Axes, Move, Plane, Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.program.effects import Effects, Instruction, Messages, MessageSpec, Phase

_KEPT_BYTES = 1 << 24  # larger messages are not kept between steps: copying dominates, not set-up
ALIGNED_BYTES = 64


def _compute_tile_shape(shape: tuple[int, ...], axes: Axes, tile: Tile) -> tuple[int, ...]:
    sizes = list(shape)
    for axis, span in zip(axes, tile, strict=True):
        sizes[axis] = len(span)
    return tuple(sizes)


@lru_cache(maxsize=1 << 16)  # the same tiles are counted for each rank, phase and buffer
def _count_tile_bytes(shape: tuple[int, ...], axes: Axes, dtype: str, tile: Tile) -> int:
    return TensorSpec(_compute_tile_shape(shape, axes, tile), dtype).bytes


@dataclass(frozen=True, slots=True)
class Exchange(Instruction):
    """Pixels of `source` are transferred so that this rank holds `window` of it under the name `target`.

    `own` is the part of `source` that this rank holds (None if it holds none); `window` is None if the rank needs none.
    `axes` are those along which the value is sharded before or after; without any, it is transferred whole. `shape` is
    that of the value for the whole image. Pixels of the window outside the image are `fill`.

    Backward is the adjoint: the same moves with source and target swapped, accumulating at the destination. Gradients
    of the fill are dropped.

    An exchange begins, where it posts its messages, and ends, where it waits for them. Both are one instruction, or
    (`split`) two, between which the rank computes what depends on no other rank. Then only `strips` of the window are
    ever made, a list of (name, tile). Backward runs in reverse order: it begins at the second half, which sends the
    gradients of the strips, and ends at the first half, which receives the gradients of the pixels that this rank had
    sent and adds everything to the gradient of the source.
    """

    per_micro_batch: ClassVar[bool] = True
    name: str
    purpose: str
    source: str
    target: str
    axes: Axes
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
    def sources(self) -> tuple[str, ...]:
        """The values that it reads."""
        return (self.source,)

    @property
    def key(self) -> str:
        """The name of the exchange, which its two halves share."""
        return self.name if self.begins and self.ends else self.name.rpartition(" ")[0]

    @property
    def own_tile(self) -> Tile:
        """`own` on a rank that holds some of the source. Raises PlanError on any other."""
        if self.own is None:
            raise PlanError(f"{self.name}: this rank holds nothing of {self.source}. Ask a rank that does.")
        return self.own

    @property
    def window_tile(self) -> Tile:
        """`window` on a rank that needs one. Raises PlanError on any other."""
        if self.window is None:
            raise PlanError(f"{self.name}: this rank needs no window of {self.source}. Ask a rank that does.")
        return self.window

    @property
    def parts(self) -> tuple[tuple[str, Tile], ...]:
        """The tensors that the exchange makes, with their tiles: the window if the rank needs one, or strips of it."""
        return self.strips or (((self.target, self.window),) if self.window is not None else ())

    @property
    def is_image(self) -> bool:
        """Whether it transfers images (N, C, ...), stored channels last; others are in the order of their axes."""
        # All axes of an image behind its channels are cut. Where others are, as of (N, H, W, C) or of attention's
        # (N, heads, T, C), the last axis has the channels: channels last would make rows or heads the innermost.
        count = len(self.shape)
        return count in (4, 5) and self.axes in (tuple(range(2 - count, 0)), (-count,), ())

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
        """Return the shape of a tensor that holds `tile`."""
        return _compute_tile_shape(self.shape, self.axes, tile)

    def get_plane(self, tile: Tile) -> Plane:
        """Return what can be drawn of `tile`."""
        return Plane.of(self.shape, self.axes, tile)

    def compute_bytes(self, moves: Iterable[Move]) -> int:
        """Return the total size in bytes of the messages of these moves."""
        return sum(_count_tile_bytes(self.shape, self.axes, self.dtype, move.tile) for move in moves)

    @property
    def keeps_all(self) -> bool:
        """Whether it makes a window that contains all that this rank holds of the source."""
        return bool(self.own and self.window and self.own & self.window == self.own and not self.strips)

    @property
    def kind(self) -> str:
        """The category shown in figures."""
        return self.purpose

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the exchange does in a phase: backward sends each gradient the way that its pixels came."""
        forward = phase is Phase.FORWARD
        # A message goes from `source` to `target` of its move, and its gradient back.
        lent = tuple(MessageSpec(move.target, self.compute_bytes([move]), move) for move in self.sends)
        borrowed = tuple(MessageSpec(move.source, self.compute_bytes([move]), move) for move in self.receives)
        sends, receives = (lent, borrowed) if forward else (borrowed, lent)
        packed, unpacked = self.count_staged_bytes(forward)
        one_way = sends and not receives and not self.is_persistent
        messages = Messages(
            # The tag of its own keeps a late message of forward from being taken for an early one of backward.
            tag=self.tag + (not forward),
            sends=sends,
            receives=receives,
            posts=self.begins,
            waits=self.ends,
            packed=packed,
            unpacked=unpacked,
            own=sum(self.compute_bytes([Move(0, 0, self.own & tile)]) for _, tile in self.parts) if self.own else 0,
            makes_room=self.keeps_all and bool(self.axes),
            in_place=self.keeps_all,
            arena=self.staging_bytes if self.is_persistent else 0,
            lasting=(packed if forward else self.compute_bytes(self.receives)) if one_way else 0,
        )
        specs = {name: TensorSpec(self.compute_shape(tile), self.dtype) for name, tile in self.parts}
        source = (self.source,) if forward or self.own is not None else ()
        if forward:
            return Effects(source if self.begins else (), tuple(specs) if self.ends else (), specs, messages)
        return Effects(tuple(specs) if self.begins else (), source if self.ends else (), {}, messages)

    # The memory of the messages: kept between steps, fresh, or the tensors themselves.

    @property
    def staging_bytes(self) -> int:
        """The memory in bytes for all messages of the exchange on one rank."""
        sizes = (self.compute_bytes([move]) for move in (*self.sends, *self.receives))
        return sum(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes)

    @property
    def is_persistent(self) -> bool:
        """Whether the messages are kept between steps.

        Those of a one-way exchange are not: nothing waits for its sends, so their buffers could not be reused safely.
        """
        return bool(self.sends and self.receives) and self.staging_bytes <= _KEPT_BYTES

    @property
    def sends_all_once(self) -> bool:
        """Whether each pixel that this rank holds is sent to exactly one other rank, and none stays."""
        if not self.own or (self.window and self.own & self.window):
            return False
        disjoint = not any(move.tile & other.tile for move, other in combinations(self.sends, 2))
        return disjoint and self.compute_bytes(self.sends) == self.compute_bytes([Move(0, 0, self.own)])

    def is_contiguous(self, tile: Tile, frame: Tile) -> bool:
        """Return whether the pixels of `tile` are contiguous in a tensor of those of `frame`, as that is stored."""
        part, whole = list(self.compute_shape(tile)), list(self.compute_shape(frame))
        if self.is_image:
            for shape in (part, whole):
                shape.append(shape.pop(1))  # (N, ..., C), the order in memory
        cut = [index for index, (here, all_here) in enumerate(zip(part, whole, strict=True)) if here < all_here]
        # Contiguous if only the outermost axis longer than 1 is cut: all axes before the last cut one have length 1.
        #
        #   rows 0 and 1 of one image    (1, [2], 8, 16)   contiguous
        #   columns 0 and 1              (1, 8, [2], 16)   8 pieces
        #   rows 0 and 1 of two images   (2, [2], 8, 16)   2 pieces
        return all(size == 1 for size in part[: max(cut, default=0)])

    def count_staged_bytes(self, forward: bool) -> tuple[int, int]:
        """Return the bytes copied into messages and out of messages; messages directly between tensors copy none."""
        lent = self._count_copied_bytes(self.sends, self.own)
        borrowed = self._count_copied_bytes(self.receives, self.window)
        if forward:
            return lent, borrowed
        return borrowed, lent if self.sends_all_once else self.compute_bytes(self.sends)

    def _count_copied_bytes(self, ends: Sequence[Move], frame: Tile | None) -> int:
        if frame is None or self.is_persistent:
            return self.compute_bytes(ends)
        return self.compute_bytes(move for move in ends if not self.is_contiguous(move.tile, frame))
