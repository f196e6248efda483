"""What the outputs of a layer read of the picture beyond their tile, through the windows of all layers up to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mpi4dl_nb.draw.figure import format_size
from mpi4dl_nb.draw.halo_points import HaloLayers, HaloPoint, Shown
from mpi4dl_nb.engines.formatting import format_microns
from mpi4dl_nb.engines.geometry.tiles import Move, Tile, compute_moves


@dataclass(frozen=True, repr=False)
class PictureReach(HaloPoint):
    """What the outputs of the layer `readers` read of the picture: the tile `seen`, by rank.

    Pixels are those of the picture. Those of other tiles do not travel here: they are what earlier halos brought.
    """

    seen: Mapping[int, Tile] = field(default_factory=dict)

    unit = "px of the picture"
    verb = "read through windows"
    halo_words = "what its outputs read of other tiles"
    owner_form = "read,\nof rank {}"
    reads_image = True

    @property
    def facts(self) -> dict[str, object]:
        pixels = sum(move.tile.pixels for rank in self.ranks.ranks for move in self.get_receives(rank))
        size = f"{format_size(self.sizes)} px"
        return {"layer": self.name, "picture": size, "read of other tiles": f"{pixels:,} px"}

    def get_window(self, rank: int) -> Tile:
        self._check_rank(rank)
        return self.seen[rank]

    def get_receives(self, rank: int) -> tuple[Move, ...]:
        self._check_rank(rank)
        return tuple(move for move in compute_moves(self.tiles, {rank: self.seen[rank]}) if move.source != rank)

    def describe_total(self, rank: int) -> str:
        return f"reads {sum(move.tile.pixels for move in self.get_receives(rank)):,} px of others"

    def describe_move(self, move: Move, end: str = " ") -> str:
        return end.join((f"of rank {move.source}:", f"{format_size(move.tile.shape)} px"))


def make_reach(layers: HaloLayers, point: HaloPoint, picture: Shown) -> PictureReach | None:
    """Return what the outputs of a layer read of the picture; None if they are not cut into tiles."""
    if explain_no_reach(layers, point):
        return None
    spans = layers.get_spans(point)
    outputs = point.ranks.grid.cut(*(len(axis.starts) for axis in spans))
    seen = {
        rank: Tile(*(axis.find_hull(span) for axis, span in zip(spans, tile, strict=True)))
        for rank, tile in zip(point.ranks.ranks, outputs, strict=True)
    }
    sizes = picture.shape()
    spec = replace(point.spec, shape=(point.spec.shape[0], picture.channels, *sizes))
    return PictureReach(point.readers, point.stage, point.ranks, spec, tuple(range(-len(sizes), 0)), seen=seen)


def explain_no_reach(layers: HaloLayers, point: HaloPoint) -> str:
    """Return why the outputs of a layer have no tiles whose reach could be shown, or "" if they have."""
    out_px, grid = tuple(len(axis.starts) for axis in layers.get_spans(point)), point.ranks.grid
    if out_px and all(size >= tiles for size, tiles in zip(out_px, grid, strict=True)):
        return ""
    shortage = f"only {format_size(out_px)} px for {grid} tiles" if out_px else "no rows and columns"
    return f"The output of {point.name} ({point.operator}) has {shortage}, and hence no tiles that read the picture"


def describe_reach(reach: PictureReach, rank: int, microns_per_px: float | None) -> Iterator[str]:
    """Yield what a tile reads of its neighbours' pixels of the picture."""
    sides = reach.compute_widths(rank)
    far = max(sides.values())
    if not far:
        yield "Through all layers up to here it reads its own pixels of the picture only"
        return
    microns = f" (up to {format_microns(far * microns_per_px)})" if microns_per_px else ""
    parts = ", ".join(f"{px} {side}" for side, px in sides.items())
    yield f"Through all layers up to here it reads its neighbours' pixels of the picture, too: {parts}{microns}"
    yield "Norms and other sums over the whole picture depend on all of it, and are left out of these numbers"
