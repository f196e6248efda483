"""The messages of an exchange: where each one's pixels lie, and the memory that it travels through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from engines.comm.device import has_own_memory, memory_format
from engines.comm.world import Message, Pending, World
from engines.program.instructions import Exchange
from engines.program.staging import ALIGNED_BYTES
from engines.spatial.moves import Move
from engines.spatial.tiles import Span, Tile

__all__ = ["Index", "Parcel", "Route", "fresh_route", "index_of", "kept_route", "memory_for", "outside", "place_for"]

Index = tuple[EllipsisType | slice, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One message: `pixels` is its buffer in the shape of the region, `flat` the same memory as a row.

    The buffer may be the region itself, where its pixels lie in a row: copying it onto itself does nothing.
    """

    peer: int
    index: Index
    flat: Tensor
    pixels: Tensor


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of both ways. What is lent going there comes home to the same buffers."""

    lent: Sequence[Parcel]
    borrowed: Sequence[Parcel]
    start_there: Callable[[], Pending]
    start_back: Callable[[], Pending]


def kept_route(exchange: Exchange, world: World, arena: Tensor) -> Route:
    """Through the same memory each time, by messages that are prepared once."""
    places = _slices(arena)
    parcels = [_staged(exchange, move, places) for move in (*exchange.sends, *exchange.receives)]
    return _route(exchange, parcels, world.prepare)


def fresh_route(
    exchange: Exchange,
    world: World,
    memory: Callable[[int], Tensor],
    source: Tensor | None = None,
    window: Tensor | None = None,
) -> Route:
    """Between these tensors themselves, where they are given, lie so and are within reach; else by fresh `memory`.

    For messages that are too large to be kept, and those that leave while the rank goes on.
    """
    ends = (*((move, source) for move in exchange.sends), *((move, window) for move in exchange.receives))
    parcels = [_bare(exchange, move, whole, world) or _staged(exchange, move, memory) for move, whole in ends]
    return _route(exchange, parcels, lambda *both: partial(world.exchange, *both))


def place_for(device: torch.device, world: World) -> torch.device:
    """Where messages of tensors there lie: with them, or on the host next to it."""
    return device if world.can_access(device) else torch.device("cpu")


def memory_for(device: torch.device, world: World) -> Callable[[int], Tensor]:
    """Makes memory, of so many bytes, for messages of tensors there."""
    where = place_for(device, world)
    return partial(torch.empty, dtype=torch.uint8, device=where, pin_memory=has_own_memory(device) and where != device)


def _route(exchange: Exchange, parcels: Sequence[Parcel], ready: Callable[..., Callable[[], Pending]]) -> Route:
    lent, borrowed = parcels[: len(exchange.sends)], parcels[len(exchange.sends) :]
    there = ready(_messages(lent, exchange.tag), _messages(borrowed, exchange.tag))
    back = ready(_messages(borrowed, exchange.tag + 1), _messages(lent, exchange.tag + 1))
    return Route(lent, borrowed, there, back)


def _messages(parcels: Sequence[Parcel], tag: int) -> list[Message]:
    return [Message(parcel.peer, tag, parcel.flat) for parcel in parcels]


def _end(exchange: Exchange, move: Move) -> tuple[int, Index]:
    """Who is at the other end of a move, and where its pixels lie here."""
    lends = move in exchange.sends
    peer, frame = (move.target, exchange.own) if lends else (move.source, exchange.window)
    return peer, index_of(exchange, move.tile, frame)


def _staged(exchange: Exchange, move: Move, memory: Callable[[int], Tensor]) -> Parcel:
    """A message with a buffer."""
    flat = memory(exchange.bytes_of([move])).view(getattr(torch, exchange.dtype))
    return Parcel(*_end(exchange, move), flat, _shaped(flat, exchange.shape_of(move.tile)))


def _bare(exchange: Exchange, move: Move, whole: Tensor | None, world: World) -> Parcel | None:
    """A message that is its pixels, where that can be."""
    if whole is None or whole.dtype != getattr(torch, exchange.dtype) or not world.can_access(whole.device):
        return None
    peer, index = _end(exchange, move)
    pixels = whole.data[index]  # by `data`: packing is no change that autograd counts
    ordered = pixels.permute(0, 2, 3, 1) if _is_image(pixels.shape) else pixels
    as_stored = ordered.is_contiguous() and not (ordered.is_conj() or ordered.is_neg())
    return Parcel(peer, index, ordered.view(-1), pixels) if as_stored else None


def _slices(arena: Tensor) -> Callable[[int], Tensor]:
    """Gives one part of it after another."""
    used = 0

    def part(count_bytes: int) -> Tensor:
        nonlocal used
        begin, used = used, used - (-count_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return arena[begin : begin + count_bytes]

    return part


def _is_image(shape: Sequence[int]) -> bool:
    return memory_format(len(shape)) is torch.channels_last


def _shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """A row of memory as a tensor that lies as images do (see `memory_format`): rows of pixels are copied whole."""
    if not _is_image(shape):
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
