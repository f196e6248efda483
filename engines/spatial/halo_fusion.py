"""Fused halos: one exchange serves several layers, and ranks recompute the overlap of their extended tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from engines.spatial.tiles import Tile, compute_moves
from engines.spatial.windows import SpanRule, compute_window

__all__ = [
    "ExtendedTiles",
    "HaloCost",
    "TileLookup",
    "ValueCost",
    "WindowRead",
    "extend_tiles",
    "group_cheapest",
]

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
    requests: dict[tuple[int, str], list[tuple[Tiles, float]]] = defaultdict(list)
    for read in reversed(list(reads)):  # backwards: `held` of a node must cover its readers before its own reads follow
        whole, own = extent(read.value)
        outputs = held.get(read.node) or extent(read.node)[1]
        wanted = {rank: compute_window(tile, read.rows, read.cols) for rank, tile in outputs.items()}
        if groups.get(read.value) == groups[read.node]:
            held[read.value] = _compute_hulls([held.get(read.value, own), wanted], whole)
        else:
            requests[groups[read.node], read.value].append((wanted, read.fill))
    fetched = {
        place: _compute_hulls([wanted for wanted, _ in wishes], extent(place[1])[0])
        for place, wishes in requests.items()
    }
    alike = frozenset(place for place, wishes in requests.items() if all(wish == wishes[0] for wish in wishes))
    return ExtendedTiles(held, fetched, alike, groups)


def _compute_hulls(wishes: Sequence[Tiles], whole: Tile) -> Tiles:
    """Return each rank's smallest tile that contains all its wishes inside the image."""
    return {rank: reduce(or_, (wish[rank] & whole for wish in wishes)) for rank in wishes[0]}


# Which layers share a halo exchange: groups of a given size, or the cheapest groups.


_MOST_LAYERS = 8  # longer groups are not searched: redundant computation grows with the square of their length


@dataclass(frozen=True, slots=True)
class ValueCost:
    """Cost of a value: FLOPs for the whole image, a multiply-add counted as two, and bytes per pixel."""

    flops: int
    pixel_bytes: float


@dataclass(frozen=True, slots=True)
class HaloCost:
    """Cost of a halo exchange and of redundant computation, for one rank.

    Every exchange costs `exchange_s` seconds, and its bytes at `bytes_per_s`; work that another rank does as well runs
    at `flops_per_s`. The defaults are for ranks that share the cores of a small machine.
    """

    exchange_s: float = 3e-4
    bytes_per_s: float = 4e9
    flops_per_s: float = 2e10

    def estimate_seconds(self, wide: ExtendedTiles, extent: TileLookup, work: Mapping[str, ValueCost]) -> float:
        """Return the seconds that fused layers add to a training step, on the rank to which they add most.

        Backward transfers the bytes once more, and computes twice as much redundantly as forward.
        """
        # More layers in a group: fewer exchanges, and a wider rim that neighbours compute as well.
        added: dict[int, float] = {}
        for node, tiles in wide.held.items():
            whole, own = extent(node)
            for rank, tile in tiles.items():
                more = work[node].flops * (tile.pixels - own[rank].pixels) / whole.pixels
                added[rank] = added.get(rank, 0.0) + 3 * more / self.flops_per_s
        for (_, value), wanted in wide.fetched.items():
            travelling = [move for move in compute_moves(extent(value)[1], wanted) if move.source != move.target]
            for rank in wanted:
                pixels = sum(move.tile.pixels for move in travelling if move.target == rank)
                seconds = pixels * work[value].pixel_bytes / self.bytes_per_s + self.exchange_s * bool(travelling)
                added[rank] = added.get(rank, 0.0) + 2 * seconds
        return max(added.values(), default=0.0)


def group_cheapest(
    layers: Sequence[Sequence[str]],
    reads: Sequence[WindowRead],
    extent: TileLookup,
    work: Mapping[str, ValueCost],
    cost: HaloCost,
) -> tuple[int, ...]:
    """Return the group sizes that minimise the time of a training step; `layers` are the names of their nodes.

    Dynamic programming over the start of the last group.
    """
    layer_of = {node: number for number, nodes in enumerate(layers) for node in nodes}
    reads_of: list[list[WindowRead]] = [[] for _ in layers]
    for read in reads:
        reads_of[layer_of[read.node]].append(read)

    def estimate_group(start: int, end: int) -> float:
        inside = [read for found in reads_of[start:end] for read in found]
        nodes = dict.fromkeys((node for found in layers[start:end] for node in found), 0)
        return cost.estimate_seconds(extend_tiles(inside, nodes, extent), extent, work)

    # best[end]: the first `end` layers, as (seconds, size of each group).
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for end in range(1, len(layers) + 1):
        starts = range(max(0, end - _MOST_LAYERS), end)
        options = ((best[start][0] + estimate_group(start, end), (*best[start][1], end - start)) for start in starts)
        best.append(min(options))
    return best[-1][1]
