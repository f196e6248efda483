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

from engines.comm.streams import fetched
from engines.comm.world import Pending, World
from engines.program.carry import Carrier, carriers
from engines.program.instructions import Exchange, Half, Linear
from engines.program.outbox import Outbox
from engines.program.parcels import index_of, outside
from engines.spatial.tiles import Tile

__all__ = ["Halves", "UnderWay", "in_halves"]


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An exchange that has begun: its messages, and of these the parcels that are `expected`.

    `strips` are to be filled, or going back hold the gradients that are added at the end.
    """

    pending: Pending
    expected: Sequence[Any]
    strips: Sequence[Tensor | None]


class Halves(Carrier):
    """Both halves of an exchange on one rank, there and back: of its window it makes the strips `tiles`."""

    def __init__(
        self, tiles: Sequence[Tile], exchange: Exchange, world: World, device: torch.device, outbox: Outbox,
        arena: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(exchange, world, device, outbox, arena)
        self.tiles = tiles
        self._frames = [outside(exchange, tile) for tile in self.tiles]
        own = [(tile, exchange.own & tile) for tile in self.tiles] if exchange.own else []
        self._shared = [
            (number, index_of(exchange, part, exchange.own), index_of(exchange, part, tile))
            for number, (tile, part) in enumerate(own)
            if part
        ]
        arrivals = product(enumerate(exchange.receives), enumerate(self.tiles))
        self._arrivals = [
            (parcel, number, index_of(exchange, part, move.tile), index_of(exchange, part, tile))
            for (parcel, move), (number, tile) in arrivals
            if (part := move.tile & tile)
        ]

    def begin(self, source: Tensor | None) -> tuple[UnderWay, int]:
        """Messages are posted and what is here already is in its place; the bytes that this rank sends."""
        with torch.no_grad():
            route = self._route_of()
            pending = self.outbox.depart(self._pack(route.lent, source), route.start_there)
            strips = [self._filled(number) for number in range(len(self.tiles))]
            for number, here, there in self._shared:
                strips[number][there].copy_(source[here])
        return UnderWay(pending, route.borrowed, strips), self._sent[0]

    def end(self, begun: UnderWay) -> Sequence[Tensor]:
        """The strips, when all has arrived."""
        with torch.no_grad():
            self._finish(begun.pending, begun.expected)
            pixels = fetched([parcel.pixels for parcel in begun.expected], self.device, self._where)
            for parcel, number, arrived, there in self._arrivals:
                begun.strips[number][there].copy_(pixels[parcel][arrived])
            self._tell(begun.expected)
        return begun.strips

    def begin_back(self, grads: Sequence[Tensor | None]) -> tuple[UnderWay, int]:
        """Gradients of borrowed pixels leave; the bytes that this rank sends. A pixel may lie in several strips."""
        with torch.no_grad():
            route = self._route_of()
            sums = [torch.zeros_like(parcel.pixels, device=self.device) for parcel in route.borrowed]
            for parcel, number, arrived, there in self._arrivals:
                if grads[number] is not None:
                    sums[parcel][arrived].add_(grads[number][there])
            pending = self.outbox.depart(self._fill(route.borrowed, sums), route.start_back)
        return UnderWay(pending, route.lent, grads), self._sent[1]

    def end_back(self, begun: UnderWay, source: Tensor | None) -> None:
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
            self._land(self.exchange.sends, begun.expected, source.grad, adds=True)

    def _filled(self, number: int) -> Tensor:
        """Memory for a strip, with the fill where it lies outside the image."""
        strip = self._empty(self.tiles[number])
        for index in self._frames[number]:
            strip[index].fill_(self.exchange.fill)
        return strip


def in_halves(forward: Iterable[Linear], world: World, device: torch.device, outbox: Outbox) -> dict[str, Halves]:
    """The exchanges of a program that are done in halves, made ready, by name."""
    found = {item.exchange: [tile for _, tile in item.strips] for item in forward if isinstance(item, Half)}
    return carriers(found, world, device, outbox, lambda exchange, *rest: Halves(found[exchange], exchange, *rest))
