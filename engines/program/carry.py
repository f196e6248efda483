"""Carries out an exchange between ranks, there and back: a linear map and its adjoint.

What depends on the instruction alone is found once: where each message's pixels lie, its buffer, its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import TypeVar

import torch
from torch import Tensor

from engines.comm.device import has_own_memory, memory_format
from engines.comm.world import Message, Pending, World
from engines.program.instructions import Exchange
from engines.program.outbox import Outbox
from engines.spatial.moves import Move
from engines.spatial.tiles import Span, Tile

__all__ = ["Carrier", "Landing", "carriers", "index_of", "outside"]

Index = tuple[EllipsisType | slice, ...]
Made = TypeVar("Made", bound="Carrier")

_KEPT_BYTES = 1 << 24  # more than this is not held between steps: time goes into moving it, not into preparing
_ALIGNED_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Parcel:
    """One message: `pixels` is its buffer in the shape of the region, `flat` the same memory as a row."""

    peer: int
    index: Index
    flat: Tensor
    pixels: Tensor


@dataclass(frozen=True, slots=True)
class Landing:
    """What one message did where it arrived: pixels of a window, or of the gradient at home.

    `before` is None where they were written over memory without content: only gradients add.
    """

    move: Move
    before: Tensor | None
    arrived: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True)
class _Route:
    """The messages of both ways. What is lent going there comes home to the same buffers."""

    lent: Sequence[_Parcel]
    borrowed: Sequence[_Parcel]
    start_there: Callable[[], Pending]
    start_back: Callable[[], Pending]


class Carrier:
    """One exchange on one rank, made ready to run again and again.

    `arena` (host memory, or None) holds the messages while they travel, shared with other exchanges: one at a time
    is under way. Copies from a GPU into it wait for the GPU, so that nothing leaves before it is computed.
    Windows and gradients are always tensors of their own, which autograd may hold.
    """

    def __init__(
        self, exchange: Exchange, world: World, device: torch.device, outbox: Outbox, arena: Tensor | None = None
    ) -> None:
        self.exchange, self.world, self.device, self.outbox = exchange, world, device, outbox
        self._sent = exchange.bytes_of(exchange.sends), exchange.bytes_of(exchange.receives)
        self._outside = outside(exchange, exchange.window)
        kept = exchange.own & exchange.window if exchange.own and exchange.window else None
        self._kept = (
            (index_of(exchange, kept, exchange.own), index_of(exchange, kept, exchange.window)) if kept else None
        )
        self._keeps_all = exchange.surrounds
        self.landings: list[Landing] | None = None  # where somebody looks, what arrived last
        self._room: Tensor | None = None
        self._middle: tuple[int, tuple[int, ...]] | None = None
        both_ways = exchange.sends and exchange.receives
        self._route = self._routed(arena, world.prepare) if both_ways and arena is not None else None

    @property
    def has_room(self) -> bool:
        """Whether all that this rank holds of the source lies in its window."""
        return self._keeps_all and self.exchange.axes is not None

    def room(self) -> Tensor:
        """Fresh memory for the source's values, around which the window of this rank fits (see `has_room`).

        Handed to `there` as the source, its pixels need not be copied: the window is the memory around them.
        """
        self._room = self._filled_window()
        # No view: what borrowed pixels do to the window is no change of the source, which may also be moved elsewhere.
        view = self._room[self._kept[1]]
        middle = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
        self._middle = middle.data_ptr(), middle.stride()
        return middle

    def there(self, source: Tensor | None) -> tuple[Tensor | None, int]:
        """This rank's window (None where it wants none) and the bytes that it sent."""
        with torch.no_grad():
            route = self._route or self._fresh_route()
            for parcel in route.lent:
                parcel.pixels.copy_(source[parcel.index])
            pending = route.start_there()
            window = None if self.exchange.window is None else self._begun(source)
            self._finish(pending, route.borrowed)
            for move, parcel in zip(self.exchange.receives, route.borrowed, strict=True):
                self._land(move, parcel, window, adds=False)
        return window, self._sent[0]

    def back(self, grad: Tensor | None, source: Tensor | None, alone: bool) -> int:
        """Gradients of borrowed pixels go home and are added there; the bytes that this rank sent.

        `alone`: nothing else adds to the gradient of `source`, so it may stay a view of the window's.
        """
        with torch.no_grad():
            route = self._route or self._fresh_route()
            if grad is None and self.exchange.window is not None:
                grad = self._empty_window().zero_()
            for parcel in route.borrowed:
                parcel.pixels.copy_(grad[parcel.index])
            pending = route.start_back()
            if source is not None:
                self._start_from_own(grad, source, alone)
            self._finish(pending, route.lent)
            for move, parcel in zip(self.exchange.sends, route.lent, strict=True):
                self._land(move, parcel, source.grad, adds=True)
        return self._sent[1]

    def _land(self, move: Move, parcel: _Parcel, whole: Tensor, adds: bool) -> None:
        """Put what has arrived into its place, or add it there."""
        place = whole[parcel.index]
        before = place.clone() if adds and self.landings is not None else None
        if adds:
            place.add_(parcel.pixels.to(self.device))
        else:
            place.copy_(parcel.pixels)
        if self.landings is not None:
            self.landings.append(Landing(move, before, parcel.pixels.clone(), place.clone()))

    def _tell(self, borrowed: Sequence[_Parcel]) -> None:
        """What has arrived, where it is put elsewhere than into a window."""
        if self.landings is not None:
            pairs = zip(self.exchange.receives, borrowed, strict=True)
            self.landings += [Landing(move, None, each.pixels.clone(), each.pixels.clone()) for move, each in pairs]

    def _finish(self, pending: Pending, expected: Sequence[_Parcel]) -> None:
        """Wait for what is expected; what only leaves is not waited for, or stages would work one at a time."""
        if expected:
            pending.wait()
        else:
            self.outbox.add(pending)

    def _begun(self, source: Tensor | None) -> Tensor:
        """The window but for what others send."""
        window, self._room = self._room, None
        if window is None or source is None or (source.data_ptr(), source.stride()) != self._middle:
            window = self._filled_window()
            if source is not None and self._kept:
                window[self._kept[1]].copy_(source[self._kept[0]])
        return window

    def _start_from_own(self, grad: Tensor | None, source: Tensor, alone: bool) -> None:
        """Add the gradient of the pixels that never left."""
        if self._keeps_all and source.grad is None:
            own = grad[self._kept[1]]
            source.grad = own if alone else torch.empty_like(source).copy_(own)  # others will add to it in place
            return
        if source.grad is None:
            source.grad = torch.zeros_like(source)
        if self._kept:
            source.grad[self._kept[0]].add_(grad[self._kept[1]])

    def _filled_window(self) -> Tensor:
        """Memory for a window, with the fill where it lies outside the image."""
        window = self._empty_window()
        for index in self._outside:
            window[index].fill_(self.exchange.fill)
        return window

    def _empty_window(self) -> Tensor:
        return self._empty(self.exchange.window)

    def _empty(self, tile: Tile) -> Tensor:
        shape, dtype = self.exchange.shape_of(tile), getattr(torch, self.exchange.dtype)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=memory_format(len(shape)))

    def _fresh_route(self) -> _Route:
        """For messages too large to be held between steps, and those that leave memory of their own behind."""
        arena = torch.empty(staging_bytes(self.exchange), dtype=torch.uint8)
        return self._routed(arena, lambda sends, receives: partial(self.world.exchange, sends, receives))

    def _routed(self, arena: Tensor, ready: Callable[..., Callable[[], Pending]]) -> _Route:
        exchange, used = self.exchange, 0
        parcels: list[_Parcel] = []
        for move in (*exchange.sends, *exchange.receives):
            lends = len(parcels) < len(exchange.sends)
            peer, frame = (move.target, exchange.own) if lends else (move.source, exchange.window)
            flat = arena[used : used + _bytes(exchange, move)].view(getattr(torch, exchange.dtype))
            pixels = _shaped(flat, exchange.shape_of(move.tile))
            parcels.append(_Parcel(peer, index_of(exchange, move.tile, frame), flat, pixels))
            used += _aligned(_bytes(exchange, move))
        lent, borrowed = parcels[: len(exchange.sends)], parcels[len(exchange.sends) :]
        there = ready(_messages(lent, exchange.tag), _messages(borrowed, exchange.tag))
        back = ready(_messages(borrowed, exchange.tag + 1), _messages(lent, exchange.tag + 1))
        return _Route(lent, borrowed, there, back)


def carriers(
    exchanges: Iterable[Exchange], world: World, device: torch.device, outbox: Outbox,
    make: Callable[..., Made] = Carrier,
) -> dict[str, Made]:  # fmt: skip
    """Every exchange of a program made ready by `make`, by name; they share the memory that messages travel through."""
    sizes = {exchange: staging_bytes(exchange) for exchange in {item.name: item for item in exchanges}.values()}
    kept = max((size for size in sizes.values() if size <= _KEPT_BYTES), default=0)
    arena = torch.empty(kept, dtype=torch.uint8, pin_memory=has_own_memory(device))
    return {
        exchange.name: make(exchange, world, device, outbox, arena if size <= _KEPT_BYTES else None)
        for exchange, size in sizes.items()
    }


def staging_bytes(exchange: Exchange) -> int:
    """Memory for the messages of an exchange on one rank."""
    return sum(_aligned(_bytes(exchange, move)) for move in (*exchange.sends, *exchange.receives))


def _bytes(exchange: Exchange, move: Move) -> int:
    return exchange.bytes_of([move])


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _messages(parcels: Sequence[_Parcel], tag: int) -> list[Message]:
    return [Message(parcel.peer, tag, parcel.flat) for parcel in parcels]


def _shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """A row of memory as a tensor that lies as images do (see `memory_format`): rows of pixels are copied whole."""
    if memory_format(len(shape)) is not torch.channels_last:
        return flat.view(shape)
    batch, channels, height, width = shape
    return flat.view(batch, height, width, channels).permute(0, 3, 1, 2)


def index_of(exchange: Exchange, tile: Tile, frame: Tile) -> Index:
    """Where the pixels of `tile` lie in a tensor that holds those of `frame`."""
    pixels = _spatial(exchange, *tile.within(frame))
    if tile.images is None:
        return pixels
    return (tile.images.within(frame.images or Span(0, exchange.shape[0])), *pixels)


def _spatial(exchange: Exchange, rows: slice, cols: slice) -> Index:
    """Slices of the spatial axes as an index of the whole tensor."""
    if exchange.axes is None:
        return (...,)
    chosen = dict(zip(exchange.axes, (rows, cols), strict=True))
    return (..., *(chosen.get(axis, slice(None)) for axis in range(min(exchange.axes), 0)))


def outside(exchange: Exchange, window: Tile | None) -> list[Index]:
    """The rows and columns of a window that lie outside the image."""
    if exchange.axes is None or window is None:
        return []
    found, everything = [], [slice(None), slice(None)]
    for position, span in enumerate((window.rows, window.cols)):
        widths = -span.start, span.stop - exchange.shape[exchange.axes[position]]
        before, after = (min(max(0, width), len(span)) for width in widths)
        for part in (slice(0, before), slice(len(span) - after, len(span))):
            if part.stop > part.start:
                slices = [*everything]
                slices[position] = part
                found.append(_spatial(exchange, *slices))
    return found
