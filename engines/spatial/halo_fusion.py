"""Fused halos: one exchange serves several layers, and ranks recompute the overlap of their extended tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from engines.spatial.tiles import Tile
from engines.spatial.windows import SpanRule, compute_window

__all__ = ["ExtendedTiles", "TileLookup", "WindowRead", "extend_tiles"]

Tiles = Mapping[int, Tile]
"""A tile for each rank."""

TileLookup = Callable[[str], tuple[Tile, Tiles]]
"""Maps the name of a tiled value to the tile of its whole image and each rank's own tile."""


@dataclass(frozen=True, slots=True)
class WindowRead:
    """A read of a tiled value by a node's outputs, by the rules `rows` and `cols`, with `fill` outside the image."""

    node: str
    value: str
    rows: SpanRule
    cols: SpanRule
    fill: float


@dataclass(frozen=True)
class ExtendedTiles:
    """Pixels that ranks hold beyond their own tiles.

    `held`: what each rank computes of a node's result, if more than its own tile. `fetched`: what each rank fetches of
    a value from another group, by group and value; `alike` are the entries of which all readers want the same. `groups`
    maps each node to its group.
    """

    held: Mapping[str, Tiles] = field(default_factory=dict)
    fetched: Mapping[tuple[int, str], Tiles] = field(default_factory=dict)
    alike: frozenset[tuple[int, str]] = frozenset()
    groups: Mapping[str, int] = field(default_factory=dict)

    def get_fetched(self, node: str, value: str) -> Tiles | None:
        """Return what the group of `node` fetches of `value` for all its readers; None if they all want the same."""
        place = self.groups.get(node, -1), value
        return None if place in self.alike else self.fetched.get(place)


def extend_tiles(reads: Iterable[WindowRead], groups: Mapping[str, int], extent: TileLookup) -> ExtendedTiles:
    """Walk a stage backwards: each node also computes what later nodes of its group read.

    `reads` are in the nodes' order; `groups` maps each node to the number of its group.
    """
    # Two 3 x 3 convolutions in one group, on the rank that owns columns 4 to 8:
    #
    #     second convolution        4 |==========| 8           its own outputs
    #     first convolution       3 |--============--| 9       computed redundantly where neighbours own the columns
    #     input                2 |----============----| 10     fetched in one exchange of two columns, not in two of one
    held: dict[str, Tiles] = {}
    asked: dict[tuple[int, str], list[tuple[Tiles, float]]] = defaultdict(list)
    for read in reversed(list(reads)):  # backwards: `held` of a node must cover its readers before its own reads follow
        whole, own = extent(read.value)
        outputs = held.get(read.node) or extent(read.node)[1]
        wanted = {rank: compute_window(tile, read.rows, read.cols) for rank, tile in outputs.items()}
        if groups.get(read.value) == groups[read.node]:
            held[read.value] = _compute_hulls([held.get(read.value, own), wanted], whole)
        else:
            asked[groups[read.node], read.value].append((wanted, read.fill))
    fetched = {
        place: _compute_hulls([wanted for wanted, _ in wishes], extent(place[1])[0]) for place, wishes in asked.items()
    }
    alike = frozenset(place for place, wishes in asked.items() if all(wish == wishes[0] for wish in wishes))
    return ExtendedTiles(held, fetched, alike, groups)


def _compute_hulls(wishes: Sequence[Tiles], whole: Tile) -> Tiles:
    """Return each rank's smallest tile that contains all its wishes inside the image."""
    return {rank: reduce(or_, (wish[rank] & whole for wish in wishes)) for rank in wishes[0]}
