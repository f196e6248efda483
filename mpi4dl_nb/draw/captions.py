"""Captions of the drawings of a tiling, in words and numbers."""

from __future__ import annotations

from engines.images.picture import Picture
from engines.layout import StageRanks
from engines.spatial.tiles import Tile
from mpi4dl_nb.draw.figure import format_bytes, format_rank_count, format_size
from mpi4dl_nb.draw.halo_points import HaloPoint
from mpi4dl_nb.draw.pixel_values import UP_TO_PX, format_values
from mpi4dl_nb.draw.raster_cache import RasterCache

__all__ = [
    "describe_region",
    "describe_tile",
    "describe_tiling",
    "describe_values",
    "format_title",
    "has_values",
    "truncate_lines",
]


def describe_tiling(picture: Picture, stage: StageRanks) -> str:
    """Return a text such as `picture, 512 × 512 px (rows × columns), in 2x2 tiles on ranks 0 to 3`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    where = f"tiles on ranks {first} to {last}" if last > first else f"tile on rank {first}"
    return f"{picture.name}, {format_size(picture.shape())} px (rows × columns), in {stage.grid} {where}"


def format_title(picture: Picture, point: HaloPoint) -> str:
    if not point.readers:
        return describe_tiling(picture, point.ranks)
    layer, channels = f"layer {point.name} ({point.operator})", point.spec.shape[1]
    size = format_size(point.size_px)
    return f"{describe_tiling(picture, point.ranks)}\n{layer} reads {channels} channels of {size} px"


def describe_tile(point: HaloPoint, rank: int) -> list[str]:
    """Describe the pixels that a tile owns, and those that it borrows or computes redundantly, and its halo widths."""
    own = f"Tile {point.numbers[rank]} (rank {rank}) owns {format_size(point.tiles[rank].shape)} px"
    if not point.readers:
        return [own]
    pieces = point.find_redundant_moves(rank) if point.computed else point.get_receives(rank)
    count, owners = sum(move.tile.pixels for move in pieces), format_rank_count(len(pieces))
    if point.computed:
        owned = f"{owners} own{'s' * (len(pieces) == 1)}"
        more = f"It computes {count} px more, which {owned}: nothing travels here, halos are fused"
    else:
        images, channels = point.spec.shape[:2]
        batch = f"{channels} channels" if images == 1 else f"{channels} channels of {images} images"
        more = f"It borrows {count} px more from {owners}: {format_bytes(point.count_bytes(pieces))} in {batch}"
    halo = ", ".join(f"{width} {side}" for side, width in point.compute_widths(rank).items())
    lines = [f"{own} of this layer's input", more, f"Its halo in px: {halo}"]
    fill = point.get_fill(rank)
    return lines if fill is None else [*lines, f"Beyond the picture's edge it reads {fill:g}, which nobody lends"]


def describe_region(point: HaloPoint, rank: int, place: Tile) -> list[str]:
    """Describe which pixels are shown, and how many of them are owned, borrowed or computed redundantly."""
    rows, cols = place.rows, place.cols
    lent = sum((move.tile & place).pixels for move in point.find_halo(rank))
    own = (point.tiles[rank] & place).pixels
    verb = "computed twice" if point.computed else "borrowed"
    shown = (
        f"Shown: rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}. "
        f"{own} px are its own, {lent} {verb}, {place.pixels - own - lent} not needed"
    )
    words = [shown]
    # Only the image itself is at hand here. The values of inner layers exist on the ranks, during a step.
    if has_values(point, place):
        return [*words, "In each pixel: the picture's red, green, blue (0 to 255)"]
    if max(place.shape) <= UP_TO_PX:
        return [*words, "Colours are the picture's there: this layer's own values are on the ranks only"]
    return words


def has_values(point: HaloPoint, place: Tile) -> bool:
    """Return whether pixel values can be written into `place`: it is small, and the layer reads the picture itself."""
    return point.reads_image and max(place.shape) <= UP_TO_PX


def describe_values(rasters: RasterCache, point: HaloPoint, place: Tile) -> str:
    told = "; ".join(format_values(rasters.render_region(point.size_px, place), place))
    return f"Pixel values (red green blue) from column {place.cols.start} on: {told}"


def truncate_lines(count: int, lines: list[str]) -> list[str]:
    """
    >>> truncate_lines(2, ["a", "b", "c", "d"])
    ['a', 'b', '... and 2 more']
    """
    return lines if len(lines) <= count else [*lines[:count], f"... and {len(lines) - count} more"]
