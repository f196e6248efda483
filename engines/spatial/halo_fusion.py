"""Fused halos: one exchange serves several layers, and where their tiles then overlap both ranks compute."""

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
"""The name of a tiled value -> the whole image that it is, and each rank's own tile."""


@dataclass(frozen=True, slots=True)
class WindowRead:
    """A node's outputs read a tiled value, as `rows` and `cols` say, with `fill` outside the image."""

    node: str
    value: str
    rows: SpanRule
    cols: SpanRule
    fill: float


@dataclass(frozen=True)
class ExtendedTiles:
    """What ranks hold beyond their own tiles.

    `held`: what each rank computes of a node's result, where that is more. `fetched`: what each rank wants of a value
    that another group made, by group and value; `alike` are those of which all readers want the same.
    """

    held: Mapping[str, Tiles] = field(default_factory=dict)
    fetched: Mapping[tuple[int, str], Tiles] = field(default_factory=dict)
    alike: frozenset[tuple[int, str]] = frozenset()
    groups: Mapping[str, int] = field(default_factory=dict)

    def get_fetched(self, node: str, value: str) -> Tiles | None:
        """What the group of `node` fetches of `value` for all its readers; None where they all want the same."""
        place = self.groups.get(node, -1), value
        return None if place in self.alike else self.fetched.get(place)


def extend_tiles(reads: Iterable[WindowRead], groups: Mapping[str, int], extent: TileLookup) -> ExtendedTiles:
    """Walk a stage backwards: each node computes what the nodes behind it in its group read.

    `reads` are in the nodes' order; `groups` numbers the group of each node.
    """
    held: dict[str, Tiles] = {}
    asked: dict[tuple[int, str], list[tuple[Tiles, float]]] = defaultdict(list)
    for read in reversed(list(reads)):
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
    """The smallest tiles that hold all that is wished for inside the image."""
    return {rank: reduce(or_, (wish[rank] & whole for wish in wishes)) for rank in wishes[0]}
