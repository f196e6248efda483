"""What is shown of a tiled picture: its pixels at a resolution of the screen, and places in layers of any size."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import count, product
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from mpi4dl_nb.draw.halo_points import HaloPoint, Shown
from mpi4dl_nb.engines.geometry.tiles import Grid, Span, Tile
from mpi4dl_nb.engines.images.picture import crop_picture
from mpi4dl_nb.engines.images.picture_reader import Picture, Pixels, make_thumbnail

WHOLE_PX, REGION_PX = 1200, 800  # longer side as read; more than a screen shows
EXACT_PX = 1 << 20  # pixels; a larger region is read from a coarser level
KEPT = 16  # cached regions
Pixel = tuple[int, int]
"""Row and column."""
Position = tuple[int, ...]
"""A pixel along each axis: (plane, row, column) of a volume."""
TILE_PX = 256  # as in page/slicer/pyramid.js
QUALITY = 88  # of JPEG, for levels whose pixels are means anyway


class RasterCache:
    """The whole picture and regions of it; those used last are cached."""

    cell_words = "red, green, blue (0 to 255)"
    cell_order = " (red green blue)"

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.render_region = lru_cache(KEPT)(self._render_region)

    @cached_property
    def whole(self) -> Pixels:
        """The whole picture as (h, w, 3)."""
        return self.picture.thumbnail(WHOLE_PX)

    def _render_region(self, layer_px: tuple[int, int], view: Tile) -> Pixels:
        """Return the picture under the pixels `view` of a layer as (h, w, 3), averaged over each layer pixel.

        A large region is coarser: its sides are at most `REGION_PX`.
        """
        # A layer pixel may cover a fraction of the picture's pixels at its edges: whole pixels are read, and the
        # resampling weighs them by their share of `box`.
        (top, bottom), (left, right) = (
            (span.start * side / px, span.stop * side / px)
            for span, side, px in zip((view.rows, view.cols), self.picture.shape(), layer_px, strict=True)
        )
        y0, x0 = int(top), int(left)
        rows, cols = math.ceil(bottom) - y0, math.ceil(right) - x0
        if rows * cols > EXACT_PX:
            return make_thumbnail(self.picture, REGION_PX, (y0, x0, rows, cols))
        there = Image.fromarray(self.picture.read(y0, x0, rows, cols))
        box = (left - x0, top - y0, right - x0, bottom - y0)
        return np.array(there.resize((len(view.cols), len(view.rows)), Image.Resampling.BOX, box=box))

    def list_cells(self, layer_px: tuple[int, int], view: Tile) -> list[list[list[str]]]:
        """Return the numbers in each pixel of a small region, row by row, as texts: red, green and blue."""
        return [[[str(value) for value in pixel] for pixel in row] for row in self.render_region(layer_px, view)]


def make_nameless(picture: Picture) -> Picture:
    """Return a view of the picture that does not know the name of its file."""
    view = crop_picture(picture, 0, 0, *picture.shape())
    view.name = "picture"
    return view


# Tiles of the picture's pyramid, encoded for a page that shows as much of it as is in view.


def count_levels(picture: Picture) -> int:
    """Return the number of levels, each half as large as the one before, until all of the picture is one tile.

    >>> import numpy as np
    >>> from mpi4dl_nb.engines.images.picture import open_image
    >>> count_levels(open_image(np.zeros((600, 1000, 3), np.uint8)))
    3
    """
    return next(level for level in count(1) if TILE_PX << (level - 1) >= max(picture.shape()))


def encode_tile(picture: Picture, level: int, row: int, col: int) -> bytes:
    """Return one tile as an image file: PNG with the exact pixels of the finest level, JPEG of the others.

    A tile at an edge of the picture has the pixels inside only. It is empty if it lies outside.
    """
    side = TILE_PX << level
    whole = Tile.whole(*picture.shape())
    tile = Tile(Span(row * side, (row + 1) * side), Span(col * side, (col + 1) * side)) & whole
    if not tile:
        return b""
    box = tile.rows.start, tile.cols.start, len(tile.rows), len(tile.cols)
    if level == 0:
        return encode_pixels(picture.read(*box), exact=True)
    # At an edge the tile is smaller by the same factor, so that it lies where it belongs.
    longest = max(1, round(max(tile.shape) / 2**level))
    return encode_pixels(make_thumbnail(picture, longest, box))


def encode_pyramid(picture: Picture, most_bytes: int) -> dict[tuple[int, int, int], bytes]:
    """Return the tiles of as many whole levels as fit into `most_bytes`, the coarsest first, by (level, row, column).

    >>> import numpy as np
    >>> from mpi4dl_nb.engines.images.picture import open_image
    >>> picture = open_image(np.zeros((600, 1000, 3), np.uint8))
    >>> [sorted({level for level, _, _ in encode_pyramid(picture, most)}) for most in (100, 3000, 200_000)]
    [[], [2], [0, 1, 2]]
    """
    tiles: dict[tuple[int, int, int], bytes] = {}
    for level in reversed(range(count_levels(picture))):
        rows, cols = (-(-px // (TILE_PX << level)) for px in picture.shape())
        for row, col in product(range(rows), range(cols)):
            pixels = encode_tile(picture, level, row, col)
            most_bytes -= len(pixels)
            if most_bytes < 0:  # what is here of this level would leave holes
                return {key: tile for key, tile in tiles.items() if key[0] > level}
            tiles[level, row, col] = pixels
    return tiles


def describe_level(level: int) -> str:
    """Say how fine the finest level of a picture is that a page has; nothing if it is the picture itself."""
    side = 1 << level
    return f"The page has one pixel for {side} × {side} of the picture; the finer ones are left out." if level else ""


def encode_pixels(pixels: Pixels, exact: bool = False) -> bytes:
    """Return pixels (h, w, 3) as a PNG file if they must be exact, else as JPEG."""
    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    image.save(buffer, "PNG", compress_level=1) if exact else image.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


# What a page may ask for and set: a page may send anything.

MOST_TILES = 4096  # of one request; a screen of 8K pixels shows half of them


def are_tiles(places: object, picture: Picture) -> bool:
    """Return whether these are tiles of the picture's pyramid: [level, row, column] each.

    >>> import numpy as np
    >>> from mpi4dl_nb.engines.images.picture import open_image
    >>> picture = open_image(np.zeros((600, 1000, 3), np.uint8))
    >>> are_tiles([[0, 2, 3], [2, 0, 0]], picture), are_tiles([[0, 3, 0]], picture), are_tiles([[9, 0, 0]], picture)
    (True, False, False)
    """
    if not isinstance(places, list) or len(places) > MOST_TILES:
        return False
    sides, levels = picture.shape(), range(count_levels(picture))
    for tile in places:
        if not are_integers(tile, 3) or tile[0] not in levels:  # a level is a power of two: checked before it is used
            return False
        level, *at = tile
        if not all(index >= 0 and index * (TILE_PX << level) < px for index, px in zip(at, sides, strict=True)):
            return False
    return True


def is_view(place: object, size_px: Sequence[float]) -> bool:
    """Return whether this is a view of a picture: the row and column of its middle, and its side.

    A view may reach beyond the picture, but not farther than the picture is long.

    >>> is_view([50, -3, 20], (100, 200)), is_view([50, 10**9, 20], (100, 200)), is_view([50], (100, 200))
    (True, False, False)
    """
    if not are_integers(place, 3):
        return False
    *middle, side = place
    most = max(size_px)
    return 1 <= side <= 4 * most and all(-most <= at <= px + most for at, px in zip(middle, size_px, strict=True))


def is_picked(pixels: object, layer: Mapping[str, Any]) -> bool:
    """Return whether this is a pixel of what a layer reads, and one of its output; `layer` are its facts."""
    # An output without rows and columns has none to choose: the page sends zeros.
    sizes = [*layer["sizes"], *(layer["out_sizes"] or [1] * len(layer["sizes"]))]
    return are_integers(pixels, len(sizes)) and all(0 <= at < px for at, px in zip(pixels, sizes, strict=True))


def get_picked_output(pixels: Sequence[int]) -> Sequence[int]:
    """Return the pixel of a layer's output that was picked, with that of what it reads before it."""
    return pixels[len(pixels) // 2 :]


def are_integers(values: object, count: int) -> TypeGuard[list[int]]:
    """Return whether this is a list of so many whole numbers."""
    return isinstance(values, list) and len(values) == count and all(type(value) is int for value in values)


# Places: pixels of layers of different sizes, tiles that own them, seams where tiles borrow.


def make_square(at: Sequence[int], side: int, size_px: Sequence[int]) -> Tile:
    """Return the square of `side` pixels around pixel `at`, shifted and cut so that it is within the image.

    >>> make_square((1, 50), 8, (100, 100)).rows
    Span(start=0, stop=8)
    """
    starts = [max(0, min(px - side // 2, limit - side)) for px, limit in zip(at, size_px, strict=True)]
    return Tile(*(Span(start, min(limit, start + side)) for start, limit in zip(starts, size_px, strict=True)))


def clamp_position(at: Sequence[float], sizes: Sequence[int]) -> Position:
    """Return the pixel at a point; outside the image, the nearest one.

    >>> clamp_position((-0.2, 3.7), (8, 8))
    (0, 3)
    """
    return tuple(min(max(int(coordinate), 0), limit - 1) for coordinate, limit in zip(at, sizes, strict=True))


def scale_position(at: Sequence[int], sizes: Sequence[float], other: Sequence[int]) -> Position:
    """Return the pixel of a layer of the sizes `other` that has the middle of pixel `at`.

    >>> scale_position((10, 20), (100, 100), (50, 50))
    (5, 10)
    """
    middles = [(px + 0.5) / size * wanted for px, size, wanted in zip(at, sizes, other, strict=True)]
    return clamp_position(middles, other)


def compute_layer_microns(picture: Shown, sizes: Sequence[int]) -> tuple[float, ...] | None:
    """Return the micrometres of the picture in a pixel of a layer, by axis; None if its scale is not known."""
    if not picture.microns_per_px:
        return None
    return tuple(picture.microns_per_px * px / layer for px, layer in zip(picture.shape(), sizes, strict=True))


def clamp_to_tile(grid: Grid, tile: int, at: Sequence[int], sizes: Sequence[int]) -> Position:
    """Return the pixel of a tile that is nearest to pixel `at` of the image.

    >>> clamp_to_tile(Grid(2, 2), 0, (50, 20), (100, 100))
    (49, 20)
    """
    bounds = grid.get_tile(tile, *sizes)
    return tuple(min(max(px, span.start), span.stop - 1) for px, span in zip(at, bounds, strict=True))


def find_owner(grid: Grid, at: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of the tile that owns a pixel of an image.

    >>> find_owner(Grid(2, 2), (50, 20), (100, 100))
    2
    """
    tiles = enumerate(grid.cut(*sizes))
    return next(index for index, tile in tiles if all(px in span for px, span in zip(at, tile, strict=True)))


def find_nearest_seam(point: HaloPoint, rank: int, at: Position) -> Position:
    """Return the pixel on a tile's border to another tile that is nearest to `at`; `at` if there is no other tile.

    The borders are those across which the tile reads, or all inner ones if it reads across none.
    """
    near = clamp_to_tile(point.ranks.grid, point.numbers[rank], at, point.sizes)
    inner: list[tuple[int, Position]] = []  # the width of the halo beyond each inner border, and its pixel
    bounds = zip(point.tiles[rank], point.sizes, point.compute_axis_widths(rank), strict=True)
    for axis, (span, size, widths) in enumerate(bounds):
        for border, outer, width in ((span.start, 0, widths[0]), (span.stop, size, widths[1])):
            if border != outer:
                inner.append((width, (*near[:axis], border, *near[axis + 1 :])))
    # The outer edges of the image are no seams. With a stride, windows may reach beyond a tile on one side only, so
    # that a tile can have neighbours from which it borrows nothing.
    seams = [pixel for width, pixel in inner if width] or [pixel for _, pixel in inner]
    return min(seams, key=lambda pixel: sum(abs(px - to) for px, to in zip(pixel, at, strict=True)), default=at)


def choose_seam(point: HaloPoint, rank: int) -> Position:
    """Return the pixel of the tile's border at the smallest piece that it reads, such as a corner; else on a seam."""
    pieces = [move.tile for move in point.find_halo(rank)]
    tile = point.tiles[rank]
    if not pieces:
        return find_nearest_seam(point, rank, tuple((span.start + span.stop) // 2 for span in tile))
    piece = min(pieces, key=lambda tile: tile.pixels)
    # A quarter along the piece, because the arrow of the piece points to its middle.
    quarters = zip([span.start + len(span) / 4 for span in piece], tile, strict=True)
    return tuple(int(min(max(px, span.start), span.stop)) for px, span in quarters)
