"""Carries out an exchange between ranks, there and back: a linear map and its adjoint.

What depends on the instruction alone is found once: where each message's pixels lie, its buffer, its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engines.comm.device import choose_memory_format
from engines.comm.streams import DeviceEvent, copy_to_device, record_event, use_send_stream
from engines.comm.world import Pending, World
from engines.program.instructions import Exchange
from engines.program.message_buffers import (
    MessageBuffer,
    MessageSet,
    choose_message_device,
    find_outside,
    make_index,
    make_message_allocator,
    make_persistent_messages,
    make_temporary_messages,
)
from engines.program.send_queue import SendQueue
from engines.program.staging import compute_arena_bytes, is_all_sent, is_persistent
from engines.spatial.moves import Move
from engines.spatial.tiles import Tile

__all__ = ["ExchangeRunner", "ReceivedMessage", "make_exchange_runners"]

Made = TypeVar("Made", bound="ExchangeRunner")


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """What one message did where it arrived: pixels of a window, or of the gradient at home.

    `before` is None where they were written over memory without content: only gradients add.
    """

    move: Move
    before: Tensor | None
    arrived: Tensor
    after: Tensor


class ExchangeRunner:
    """One exchange on one rank, made ready to run again and again.

    `arena` (or None) holds the messages while they travel, shared with other exchanges: one at a time is under way.
    Messages without a place there go from tensor to tensor, where a region's pixels follow each other in memory.
    Nothing leaves before a GPU has computed it, and has read what came before to the same place.
    Windows and gradients are always tensors of their own, which autograd may hold.
    """

    def __init__(
        self, exchange: Exchange, world: World, device: torch.device, outbox: SendQueue, arena: Tensor | None = None
    ) -> None:
        self.exchange, self.world, self.device, self.outbox = exchange, world, device, outbox
        self._sent = exchange.compute_bytes(exchange.sends), exchange.compute_bytes(exchange.receives)
        self._outside = find_outside(exchange, exchange.window)
        kept = exchange.own & exchange.window if exchange.own and exchange.window else None
        self._kept = (
            (make_index(exchange, kept, exchange.own), make_index(exchange, kept, exchange.window)) if kept else None
        )
        self._keeps_all = exchange.window_covers_own
        self._lends_all = is_all_sent(exchange)
        self.received: list[ReceivedMessage] | None = None  # where somebody looks, what arrived last
        self._room: Tensor | None = None
        self._middle: tuple[int, tuple[int, ...]] | None = None
        self._memory, self._where = make_message_allocator(device, world), choose_message_device(device, world)
        self._route = None if arena is None else make_persistent_messages(exchange, world, arena)

    @property
    def can_allocate_source(self) -> bool:
        """Whether all that this rank holds of the source lies in its window."""
        return self._keeps_all and self.exchange.axes is not None

    def allocate_source(self) -> Tensor:
        """Fresh memory for the source's values, around which the window of this rank fits (see `has_room`).

        Handed to `there` as the source, its pixels need not be copied: the window is the memory around them.
        """
        self._room = self._make_window()
        # No view: what borrowed pixels do to the window is no change of the source, which may also be moved elsewhere.
        view = self._room[self._kept[1]]
        middle = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
        self._middle = middle.data_ptr(), middle.stride()
        return middle

    def forward(self, source: Tensor | None) -> tuple[Tensor | None, int]:
        """This rank's window (None where it wants none) and the bytes that it sent."""
        with torch.no_grad():
            window, complete = self._get_window_buffer(source)
            route = self._get_message_set(source, window)
            pending = self.outbox.start_after(self._pack(route.sent, source), route.start_forward)
            if self._kept and not complete:
                window[self._kept[1]].copy_(source[self._kept[0]])
            self._finish(pending, route.received)
            self._unpack(self.exchange.receives, route.received, window, adds=False)
        return window, self._sent[0]

    def backward(self, grad: Tensor | None, source: Tensor | None, alone: bool) -> int:
        """Gradients of borrowed pixels go home and are added there; the bytes that this rank sent.

        `alone`: nothing else adds to the gradient of `source`, so it may stay a view of the window's.
        """
        with torch.no_grad():
            if grad is None and self.exchange.window is not None:
                grad = self._allocate_window().zero_()
            first = source is not None and source.grad is None and self._lends_all
            if first:
                source.grad = torch.empty_like(source)
            route = self._get_message_set(source.grad if first else None, grad)
            pending = self.outbox.start_after(self._pack(route.received, grad), route.start_backward)
            if source is not None and not first:
                self._add_own_gradient(grad, source, alone)
            self._finish(pending, route.sent)
            if source is not None:
                self._unpack(self.exchange.sends, route.sent, source.grad, adds=not first)
        return self._sent[1]

    def _get_message_set(self, source: Tensor | None = None, window: Tensor | None = None) -> MessageSet:
        return self._route or make_temporary_messages(self.exchange, self.world, self._memory, source, window)

    def _pack(self, parcels: Sequence[MessageBuffer], whole: Tensor | None) -> DeviceEvent:
        """Put pixels into their messages, which may leave when that has been done."""
        return self._fill(parcels, [whole[parcel.index] for parcel in parcels])

    def _fill(self, parcels: Sequence[MessageBuffer], contents: Sequence[Tensor]) -> DeviceEvent:
        with use_send_stream(self.device, self._where, contents):
            for parcel, pixels in zip(parcels, contents, strict=True):
                if self._where != self.device:  # a copy of what has gaps would be waited for
                    pixels = pixels.contiguous(memory_format=choose_memory_format(pixels.dim()))
                parcel.pixels.copy_(pixels, non_blocking=True)
            return record_event(self.device, self._where)

    def _unpack(
        self, moves: Sequence[Move], parcels: Sequence[MessageBuffer], whole: Tensor | None, adds: bool
    ) -> None:
        """Put what has arrived into its place, or add it there."""
        arrived = copy_to_device([parcel.pixels for parcel in parcels], self.device, self._where)
        for move, parcel, pixels in zip(moves, parcels, arrived, strict=True):
            place = whole[parcel.index]
            before = place.clone() if adds and self.received is not None else None
            place.add_(pixels) if adds else place.copy_(pixels)
            if self.received is not None:
                self.received.append(ReceivedMessage(move, before, parcel.pixels.clone(), place.clone()))

    def _record_received(self, borrowed: Sequence[MessageBuffer]) -> None:
        """What has arrived, where it is put elsewhere than into a window."""
        if self.received is not None:
            pairs = zip(self.exchange.receives, borrowed, strict=True)
            self.received += [
                ReceivedMessage(move, None, each.pixels.clone(), each.pixels.clone()) for move, each in pairs
            ]

    def _finish(self, pending: Pending, expected: Sequence[MessageBuffer]) -> None:
        """Wait for what is expected; what only leaves is not waited for, or stages would work one at a time."""
        if expected:
            pending.wait()
        else:
            self.outbox.add(pending)

    def _get_window_buffer(self, source: Tensor | None) -> tuple[Tensor | None, bool]:
        """Memory for the window, and whether what `source` has of it is there already."""
        if self.exchange.window is None:
            return None, True
        room, self._room = self._room, None
        if room is None or source is None or (source.data_ptr(), source.stride()) != self._middle:
            return self._make_window(), False
        return room, True

    def _add_own_gradient(self, grad: Tensor | None, source: Tensor, alone: bool) -> None:
        """Add the gradient of the pixels that never left."""
        if self._keeps_all and source.grad is None:
            own = grad[self._kept[1]]
            source.grad = own if alone else torch.empty_like(source).copy_(own)  # others will add to it in place
            return
        if source.grad is None:
            source.grad = torch.zeros_like(source)
        if self._kept:
            source.grad[self._kept[0]].add_(grad[self._kept[1]])

    def _make_window(self) -> Tensor:
        """Memory for a window, with the fill where it lies outside the image."""
        window = self._allocate_window()
        for index in self._outside:
            window[index].fill_(self.exchange.fill)
        return window

    def _allocate_window(self) -> Tensor:
        return self._allocate(self.exchange.window)

    def _allocate(self, tile: Tile) -> Tensor:
        shape, dtype = self.exchange.compute_shape(tile), getattr(torch, self.exchange.dtype)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=choose_memory_format(len(shape)))


def make_exchange_runners(
    exchanges: Iterable[Exchange], world: World, device: torch.device, outbox: SendQueue,
    make: Callable[..., Made] = ExchangeRunner,
) -> dict[str, Made]:  # fmt: skip
    """Every exchange of a program made ready by `make`, by name; they share the memory that messages travel through."""
    found = {item.name: item for item in exchanges}
    arena = make_message_allocator(device, world)(compute_arena_bytes(found.values()))
    return {
        name: make(exchange, world, device, outbox, arena if is_persistent(exchange) else None)
        for name, exchange in found.items()
    }
