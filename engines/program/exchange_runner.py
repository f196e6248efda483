"""Runs an exchange between ranks, forward and backward: a linear map and its adjoint.

What depends on the instruction alone is computed once: the position of each message's pixels, its buffer, its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from engines.comm.device import choose_memory_format
from engines.comm.streams import DeviceEvent, copy_to_device, record_event, use_send_stream
from engines.comm.world import Pending, World
from engines.program.instructions import Exchange, ExchangeHalf, ModelInstruction
from engines.program.message_buffers import (
    MessageBuffer,
    MessageSet,
    SendQueue,
    choose_message_device,
    find_outside,
    make_index,
    make_message_allocator,
    make_persistent_messages,
    make_temporary_messages,
)
from engines.program.traffic import compute_arena_bytes, is_all_sent, is_persistent
from engines.spatial.tiles import Move, Tile

__all__ = [
    "AsyncExchangeRunner",
    "ExchangeRunner",
    "ReceivedMessage",
    "StartedExchange",
    "make_async_runners",
    "make_exchange_runners",
]

Made = TypeVar("Made", bound="ExchangeRunner")


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """Record of one received message: pixels of a window, or gradients added at the owner.

    `before` is the content of the destination before gradients were added; None if the pixels were copied.
    """

    move: Move
    before: Tensor | None
    arrived: Tensor
    after: Tensor


class ExchangeRunner:
    """One exchange on one rank, prepared to run repeatedly.

    `arena` (or None) holds the messages in transit. Exchanges share it, as only one of them runs at a time. Without an
    arena, messages go directly from tensor to tensor where a region's pixels are contiguous in memory. No message
    starts before the GPU has computed its pixels and has read the previous content of its buffer. Windows and gradients
    are always separate tensors, to which autograd may keep references.

                  forward                            backward
      source --pack--> sent     = = = >     source.grad <--add-- sent     < = = =
      window <-unpack- received < = = =     window.grad --pack-> received = = = >
    """

    def __init__(
        self, exchange: Exchange, world: World, device: torch.device, outbox: SendQueue, arena: Tensor | None = None
    ) -> None:
        self.exchange, self.world, self.device, self.outbox = exchange, world, device, outbox
        self._sent = exchange.compute_bytes(exchange.sends), exchange.compute_bytes(exchange.receives)
        self._outside = find_outside(exchange, exchange.window)
        # Where the pixels that stay on this rank are: in its tile of the source, and in its window.
        #
        #   source, own columns 4 to 7         [4 5 6 7]
        #   window, columns 3 to 8           3 [4 5 6 7] 8      3 and 8 arrive from the neighbours
        kept = exchange.own & exchange.window if exchange.own and exchange.window else None
        self._kept = (
            (make_index(exchange, kept, exchange.own), make_index(exchange, kept, exchange.window)) if kept else None
        )
        self._keeps_all = exchange.window_covers_own
        self._lends_all = is_all_sent(exchange)
        self.received: list[ReceivedMessage] | None = None  # set to a list to record what arrives
        # The window of which `allocate_source` handed out the middle, and how to recognise that middle later.
        self._room: Tensor | None = None
        self._middle: tuple[int, tuple[int, ...]] | None = None
        self._memory, self._where = make_message_allocator(device, world), choose_message_device(device, world)
        self._route = None if arena is None else make_persistent_messages(exchange, world, arena)

    @property
    def can_allocate_source(self) -> bool:
        """Whether the window contains all that this rank holds of the source."""
        return self._keeps_all and self.exchange.axes is not None

    def allocate_source(self) -> Tensor:
        """Return memory for the source's values that is the middle of a newly allocated window.

        If `forward` then gets this tensor as the source, the window is already complete except for the halo, and the
        rank's own pixels are not copied.
        """
        self._room = self._make_window()
        # Not a view in autograd's sense (`set_` shares the storage only): writing the halo into the window must not
        # count as a change of the source, and the source's data may be moved elsewhere.
        view = self._room[self._kept[1]]
        middle = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
        self._middle = middle.data_ptr(), middle.stride()
        return middle

    def forward(self, source: Tensor | None) -> tuple[Tensor | None, int]:
        """Return this rank's window (None if it wants none) and the bytes that it sent."""
        with torch.no_grad():
            window, in_place = None, False
            if self.exchange.window is not None:
                room, self._room = self._room, None
                # The source must still be exactly the tensor handed out: a kernel may have ignored it, or offloading
                # moved it.
                in_place = bool(
                    room is not None and source is not None and (source.data_ptr(), source.stride()) == self._middle
                )
                window = room if in_place else self._make_window()
            route = self._get_message_set(source, window)
            pending = self.outbox.start_after(self._pack(route.sent, source), route.start_forward)
            # Copy the rank's own pixels while the messages are in transit.
            if self._kept and not in_place:
                window[self._kept[1]].copy_(source[self._kept[0]])
            self._finish(pending, route.received)
            self._unpack(self.exchange.receives, route.received, window, adds=False)
        return window, self._sent[0]

    def backward(self, grad: Tensor | None, source: Tensor | None, alone: bool) -> int:
        """Send the gradients of received pixels to their owners, which add them; return the bytes that this rank sent.

        `alone`: nothing else is added to the gradient of `source`, so that it may remain a view of the window's
        gradient.
        """
        with torch.no_grad():
            if grad is None and self.exchange.window is not None:
                grad = self._allocate(self.exchange.window).zero_()
            # If every pixel was sent to exactly one rank and none stays, the arriving gradients cover the source
            # exactly once: they can be received straight into uninitialised memory instead of being added to zeros.
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
        """Copy pixels into their messages; the event returned marks when the messages may be sent."""
        return self._fill(parcels, [whole[parcel.index] for parcel in parcels])

    def _fill(self, parcels: Sequence[MessageBuffer], contents: Sequence[Tensor]) -> DeviceEvent:
        with use_send_stream(self.device, self._where, contents):
            for parcel, pixels in zip(parcels, contents, strict=True):
                if self._where != self.device:  # only a copy of contiguous memory is asynchronous
                    pixels = pixels.contiguous(memory_format=choose_memory_format(pixels.dim()))
                parcel.pixels.copy_(pixels, non_blocking=True)
            return record_event(self.device, self._where)

    def _unpack(
        self, moves: Sequence[Move], parcels: Sequence[MessageBuffer], whole: Tensor | None, adds: bool
    ) -> None:
        """Copy the received pixels to their place, or add them there."""
        arrived = copy_to_device([parcel.pixels for parcel in parcels], self.device, self._where)
        for move, parcel, pixels in zip(moves, parcels, arrived, strict=True):
            place = whole[parcel.index]
            before = place.clone() if adds and self.received is not None else None
            place.add_(pixels) if adds else place.copy_(pixels)
            if self.received is not None:
                self.received.append(ReceivedMessage(move, before, parcel.pixels.clone(), place.clone()))

    def _finish(self, pending: Pending, expected: Sequence[MessageBuffer]) -> None:
        """Wait if messages are expected, else queue the sends: waiting for them would block the pipeline."""
        if expected:
            pending.wait()
        else:
            self.outbox.add(pending)

    def _add_own_gradient(self, grad: Tensor | None, source: Tensor, alone: bool) -> None:
        """Add the gradient of the pixels that stayed on this rank."""
        if self._keeps_all and source.grad is None:
            own = grad[self._kept[1]]
            source.grad = own if alone else torch.empty_like(source).copy_(own)  # other readers add to it in place
            return
        if source.grad is None:
            source.grad = torch.zeros_like(source)
        if self._kept:
            source.grad[self._kept[0]].add_(grad[self._kept[1]])

    def _make_window(self) -> Tensor:
        """Allocate a window and write the fill where it extends beyond the image."""
        window = self._allocate(self.exchange.window)
        for index in self._outside:
            window[index].fill_(self.exchange.fill)
        return window

    def _allocate(self, tile: Tile) -> Tensor:
        shape, dtype = self.exchange.compute_shape(tile), getattr(torch, self.exchange.dtype)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=choose_memory_format(len(shape)))


def make_exchange_runners(
    exchanges: Iterable[Exchange],
    world: World,
    device: torch.device,
    outbox: SendQueue,
    make: Callable[..., Made] = ExchangeRunner,
) -> dict[str, Made]:
    """Make a runner for each exchange of a program, by name; persistent exchanges share one message arena."""
    found = {item.name: item for item in exchanges}
    arena = make_message_allocator(device, world)(compute_arena_bytes(found.values()))
    return {
        name: make(exchange, world, device, outbox, arena if is_persistent(exchange) else None)
        for name, exchange in found.items()
    }


# An exchange in two halves: messages travel while this rank computes what does not depend on them.
#
# Only strips of the window are made, the ones that the border of a tile's outputs reads; the rest of the window is
# never
# copied.
#
#   start: pack, post messages | interior of the outputs | wait: fill strips | border of the outputs


@dataclass(frozen=True, slots=True)
class StartedExchange:
    """An exchange in flight: its messages, and the buffers that are `expected` to be filled.

    `strips` are the strips to fill; in the backward pass, the gradients of strips, to be added at the end.
    """

    pending: Pending
    expected: Sequence[Any]
    strips: Sequence[Tensor | None]


class AsyncExchangeRunner(ExchangeRunner):
    """Runs both halves of an exchange on one rank, forward and backward; `tiles` are the strips of its window."""

    def __init__(self, tiles: Sequence[Tile], exchange: Exchange, *rest: Any) -> None:
        super().__init__(exchange, *rest)
        self.tiles = tiles
        # With a kernel of 3 x 3, only the outputs of the border read the halo, and of the own pixels only the outer two
        # rows and columns. The top strip therefore is three rows high:
        #
        #   h h h h h h h h      h  received (halo)
        #   h o o o o o o h      o  own pixels, copied into the strip
        #   h o o o o o o h
        #   h o o . . o o h      .  read by interior outputs only, from the source itself
        #   ...
        #
        # `_shared` places own pixels (strip, index in the source, index in the strip), `_arrivals` received ones
        # (message, strip, index in the message, index in the strip).
        self._frames = [find_outside(exchange, tile) for tile in self.tiles]
        own = [(tile, exchange.own & tile) for tile in self.tiles] if exchange.own else []
        self._shared = [
            (number, make_index(exchange, part, exchange.own), make_index(exchange, part, tile))
            for number, (tile, part) in enumerate(own)
            if part
        ]
        # Strips may overlap, so one message can fill parts of several strips.
        arrivals = product(enumerate(exchange.receives), enumerate(self.tiles))
        self._arrivals = [
            (parcel, number, make_index(exchange, part, move.tile), make_index(exchange, part, tile))
            for (parcel, move), (number, tile) in arrivals
            if (part := move.tile & tile)
        ]

    def start_forward(self, source: Tensor | None) -> tuple[StartedExchange, int]:
        """Post the messages and copy this rank's own pixels into the strips; return the bytes that this rank sends."""
        with torch.no_grad():
            # No window: its strips are no parts of one tensor, so messages need memory of their own.
            route = self._get_message_set()
            pending = self.outbox.start_after(self._pack(route.sent, source), route.start_forward)
            # After the sends have started: everything below overlaps with their transfer.
            strips = [self._allocate(tile) for tile in self.tiles]
            for strip, outside in zip(strips, self._frames, strict=True):
                for index in outside:
                    strip[index].fill_(self.exchange.fill)
            for number, here, there in self._shared:
                strips[number][there].copy_(source[here])
        return StartedExchange(pending, route.received, strips), self._sent[0]

    def wait_forward(self, begun: StartedExchange) -> Sequence[Tensor]:
        """Wait for the messages and return the completed strips."""
        with torch.no_grad():
            self._finish(begun.pending, begun.expected)
            pixels = copy_to_device([parcel.pixels for parcel in begun.expected], self.device, self._where)
            for parcel, number, arrived, there in self._arrivals:
                begun.strips[number][there].copy_(pixels[parcel][arrived])
            if self.received is not None:
                for move, each in zip(self.exchange.receives, begun.expected, strict=True):
                    self.received.append(ReceivedMessage(move, None, each.pixels.clone(), each.pixels.clone()))
        return begun.strips

    def start_backward(self, grads: Sequence[Tensor | None]) -> tuple[StartedExchange, int]:
        """Send the gradients of received pixels to their owners; return the bytes that this rank sends.

        A pixel may be in several strips, so the gradients are summed per message first.
        """
        with torch.no_grad():
            route = self._get_message_set()
            # Summed on the device, where the gradients are, then copied into the message once.
            sums = [torch.zeros_like(parcel.pixels, device=self.device) for parcel in route.received]
            for parcel, number, arrived, there in self._arrivals:
                if grads[number] is not None:
                    sums[parcel][arrived].add_(grads[number][there])
            pending = self.outbox.start_after(self._fill(route.received, sums), route.start_backward)
        return StartedExchange(pending, route.sent, grads), self._sent[1]

    def wait_backward(self, begun: StartedExchange, source: Tensor | None) -> None:
        """Wait, and add all gradients to that of `source` (unless it is None): received ones and the rank's own."""
        with torch.no_grad():
            self._finish(begun.pending, begun.expected)
            if source is None:
                return
            if source.grad is None:
                source.grad = torch.zeros_like(source)
            for number, here, there in self._shared:
                if begun.strips[number] is not None:
                    source.grad[here].add_(begun.strips[number][there])
            self._unpack(self.exchange.sends, begun.expected, source.grad, adds=True)


def make_async_runners(
    forward: Iterable[ModelInstruction], world: World, device: torch.device, outbox: SendQueue
) -> dict[str, AsyncExchangeRunner]:
    """Make a runner for each exchange of a program that is run in halves, by name."""
    found = {item.exchange: [tile for _, tile in item.strips] for item in forward if isinstance(item, ExchangeHalf)}
    return make_exchange_runners(
        found, world, device, outbox, lambda exchange, *rest: AsyncExchangeRunner(found[exchange], exchange, *rest)
    )
