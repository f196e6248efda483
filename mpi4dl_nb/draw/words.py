"""What a slicing says, in words and numbers."""

from __future__ import annotations

from engines.images.picture import Picture
from engines.layout import StageRanks
from engines.spatial.tiles import Tile
from mpi4dl_nb.draw.figure import spoken_bytes, spoken_size
from mpi4dl_nb.draw.halos import HaloPoint
from mpi4dl_nb.draw.numbers import UP_TO_PX, spoken_values
from mpi4dl_nb.draw.rasters import Rasters

__all__ = ["at_most", "close_words", "cut_text", "has_values", "summary", "title_of", "values_of"]


def cut_text(picture: Picture, stage: StageRanks) -> str:
    """`picture, 512 × 512 px (rows × columns), in 2x2 tiles on ranks 0 to 3`."""
    first, last = stage.ranks[0], stage.ranks[-1]
    where = f"tiles on ranks {first} to {last}" if last > first else f"tile on rank {first}"
    return f"{picture.name}, {spoken_size(picture.shape())} px (rows × columns), in {stage.grid} {where}"


def title_of(picture: Picture, point: HaloPoint) -> str:
    if not point.readers:
        return cut_text(picture, point.ranks)
    layer, channels = f"layer {point.name} ({point.operator})", point.spec.shape[1]
    size = spoken_size(point.size_px)
    return f"{cut_text(picture, point.ranks)}\n{layer} reads {channels} channels of {size} px"


def summary(point: HaloPoint, rank: int) -> list[str]:
    """What a tile owns, borrows or computes twice, and how wide its halo is."""
    own = f"Tile {point.numbers[rank]} (rank {rank}) owns {spoken_size(point.tiles[rank].shape)} px"
    if not point.readers:
        return [own]
    halo = ", ".join(f"{width} {side}" for side, width in point.widths(rank).items())
    more = _computed_words(point, rank) if point.computed else _borrowed_words(point, rank)
    lines = [f"{own} of this layer's input", more, f"Its halo in px: {halo}"]
    fill = point.fill(rank)
    return lines if fill is None else [*lines, f"Beyond the picture's edge it reads {fill:g}, which nobody lends"]


def _borrowed_words(point: HaloPoint, rank: int) -> str:
    pieces = point.borrowed(rank)
    count, total = sum(move.tile.pixels for move in pieces), spoken_bytes(point.bytes(pieces))
    images, channels = point.spec.shape[:2]
    batch = f"{channels} channels" if images == 1 else f"{channels} channels of {images} images"
    return f"It borrows {count} px more from {_ranks(len(pieces))}: {total} in {batch}"


def _computed_words(point: HaloPoint, rank: int) -> str:
    pieces = point.overlaps(rank)
    count = sum(move.tile.pixels for move in pieces)
    owned = f"{_ranks(len(pieces))} own{'s' * (len(pieces) == 1)}"
    return f"It computes {count} px more, which {owned}: nothing travels here, halos are fused"


def _ranks(count: int) -> str:
    """
    >>> _ranks(1), _ranks(3)
    ('1 rank', '3 ranks')
    """
    return f"{count} rank{'s' * (count != 1)}"


def close_words(point: HaloPoint, rank: int, place: Tile) -> list[str]:
    """Which pixels are shown, and whose they are."""
    rows, cols = place.rows, place.cols
    lent = sum((move.tile & place).pixels for move in (*point.borrowed(rank), *point.overlaps(rank)))
    own = (point.tiles[rank] & place).pixels
    verb = "computed twice" if point.computed else "borrowed"
    shown = (
        f"Shown: rows {rows.start} to {rows.stop - 1}, columns {cols.start} to {cols.stop - 1}. "
        f"{own} px are its own, {lent} {verb}, {place.pixels - own - lent} not needed"
    )
    words = [shown]
    if has_values(point, place):
        return [*words, "In each pixel: the picture's red, green, blue (0 to 255)"]
    if max(place.shape) <= UP_TO_PX:
        return [*words, "Colours are the picture's there: this layer's own values are on the ranks only"]
    return words


def has_values(point: HaloPoint, place: Tile) -> bool:
    """Whether the numbers of a place can be written into it: those of the picture, as that is what the layer reads."""
    return point.reads_image and max(place.shape) <= UP_TO_PX


def values_of(rasters: Rasters, point: HaloPoint, place: Tile) -> str:
    told = "; ".join(spoken_values(rasters.place(point.size_px, place), place))
    return f"Pixel values (red green blue) from column {place.cols.start} on: {told}"


def at_most(count: int, lines: list[str]) -> list[str]:
    """
    >>> at_most(2, ["a", "b", "c", "d"])
    ['a', 'b', '... and 2 more']
    """
    return lines if len(lines) <= count else [*lines[:count], f"... and {len(lines) - count} more"]
