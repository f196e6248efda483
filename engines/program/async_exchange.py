"""An exchange in two halves: what it needs of others travels while this rank computes.

Of the window only strips are made, which the border of a tile's outputs reads; nothing else of it is ever copied.
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
from engines.program.exchange_runner import ExchangeRunner, make_exchange_runners
from engines.program.instructions import Exchange, ExchangeHalf, ModelInstruction
from engines.program.message_buffers import find_outside, make_index
from engines.program.send_queue import SendQueue
from engines.spatial.tiles import Tile

__all__ = ["AsyncExchangeRunner", "StartedExchange", "make_async_runners"]


@dataclass(frozen=True, slots=True)
class StartedExchange:
    """An exchange that has begun: its messages, and of these the parcels that are `expected`.

    `strips` are to be filled, or going back hold the gradients that are added at the end.
    """

    pending: Pending
    expected: Sequence[Any]
    strips: Sequence[Tensor | None]


class AsyncExchangeRunner(ExchangeRunner):
    """Both halves of an exchange on one rank, there and back: of its window it makes the strips `tiles`."""

    def __init__(
        self, tiles: Sequence[Tile], exchange: Exchange, world: World, device: torch.device, outbox: SendQueue,
        arena: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(exchange, world, device, outbox, arena)
        self.tiles = tiles
        self._frames = [find_outside(exchange, tile) for tile in self.tiles]
        own = [(tile, exchange.own & tile) for tile in self.tiles] if exchange.own else []
        self._shared = [
            (number, make_index(exchange, part, exchange.own), make_index(exchange, part, tile))
            for number, (tile, part) in enumerate(own)
            if part
        ]
        arrivals = product(enumerate(exchange.receives), enumerate(self.tiles))
        self._arrivals = [
            (parcel, number, make_index(exchange, part, move.tile), make_index(exchange, part, tile))
            for (parcel, move), (number, tile) in arrivals
            if (part := move.tile & tile)
        ]

    def start_forward(self, source: Tensor | None) -> tuple[StartedExchange, int]:
        """Messages are posted and what is here already is in its place; the bytes that this rank sends."""
        with torch.no_grad():
            route = self._get_message_set()
            pending = self.outbox.start_after(self._pack(route.sent, source), route.start_forward)
            strips = [self._make_strip(number) for number in range(len(self.tiles))]
            for number, here, there in self._shared:
                strips[number][there].copy_(source[here])
        return StartedExchange(pending, route.received, strips), self._sent[0]

    def wait_forward(self, begun: StartedExchange) -> Sequence[Tensor]:
        """The strips, when all has arrived."""
        with torch.no_grad():
            self._finish(begun.pending, begun.expected)
            pixels = copy_to_device([parcel.pixels for parcel in begun.expected], self.device, self._where)
            for parcel, number, arrived, there in self._arrivals:
                begun.strips[number][there].copy_(pixels[parcel][arrived])
            self._record_received(begun.expected)
        return begun.strips

    def start_backward(self, grads: Sequence[Tensor | None]) -> tuple[StartedExchange, int]:
        """Gradients of borrowed pixels leave; the bytes that this rank sends. A pixel may lie in several strips."""
        with torch.no_grad():
            route = self._get_message_set()
            sums = [torch.zeros_like(parcel.pixels, device=self.device) for parcel in route.received]
            for parcel, number, arrived, there in self._arrivals:
                if grads[number] is not None:
                    sums[parcel][arrived].add_(grads[number][there])
            pending = self.outbox.start_after(self._fill(route.received, sums), route.start_backward)
        return StartedExchange(pending, route.sent, grads), self._sent[1]

    def wait_backward(self, begun: StartedExchange, source: Tensor | None) -> None:
        """What came home, and what never left, is added to the gradient of `source` (None where that is not asked)."""
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

    def _make_strip(self, number: int) -> Tensor:
        """Memory for a strip, with the fill where it lies outside the image."""
        strip = self._allocate(self.tiles[number])
        for index in self._frames[number]:
            strip[index].fill_(self.exchange.fill)
        return strip


def make_async_runners(
    forward: Iterable[ModelInstruction], world: World, device: torch.device, outbox: SendQueue
) -> dict[str, AsyncExchangeRunner]:
    """The exchanges of a program that are done in halves, made ready, by name."""
    found = {item.exchange: [tile for _, tile in item.strips] for item in forward if isinstance(item, ExchangeHalf)}
    return make_exchange_runners(
        found, world, device, outbox, lambda exchange, *rest: AsyncExchangeRunner(found[exchange], exchange, *rest)
    )
