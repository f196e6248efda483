"""Which layers share a halo exchange: groups of a given size, or the cheapest groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.spatial.halo_fusion import ExtendedTiles, TileLookup, WindowRead, extend_tiles
from engines.spatial.moves import compute_moves

__all__ = ["MOST_LAYERS", "HaloCost", "ValueCost", "group_cheapest", "group_evenly"]

MOST_LAYERS = 8
"""Longer groups are not searched: redundant computation grows with the square of their length."""


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


def group_evenly(layers: int, together: int) -> tuple[int, ...]:
    """Return the number of layers of each group.

    >>> group_evenly(5, 2)
    (2, 2, 1)
    """
    return tuple(min(together, layers - first) for first in range(0, layers, together))


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
        starts = range(max(0, end - MOST_LAYERS), end)
        options = ((best[start][0] + estimate_group(start, end), (*best[start][1], end - start)) for start in starts)
        best.append(min(options))
    return best[-1][1]
