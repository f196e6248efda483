"""An exchange in two halves: messages travel while this rank computes what does not depend on them.

Only strips of the window are made, the ones that the border of a tile's outputs reads; the rest of the window is never
copied.

  start: pack, post messages | interior of the outputs | wait: fill strips | border of the outputs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from engines.comm.streams import copy_to_device
from engines.comm.world import Pending, World
from engines.program.exchange_runner import ExchangeRunner, ReceivedMessage, make_exchange_runners
from engines.program.instructions import Exchange, ExchangeHalf, ModelInstruction
from engines.program.message_buffers import find_outside, make_index
from engines.program.send_queue import SendQueue
from engines.spatial.tiles import Tile

__all__ = ["AsyncExchangeRunner", "StartedExchange", "make_async_runners"]


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
