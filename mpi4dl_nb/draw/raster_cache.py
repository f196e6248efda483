"""A picture scaled to the size at which it is drawn, read once from the level that fits, and cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from engines.images.picture import Picture, Pixels
from engines.images.picture_reader import make_thumbnail
from engines.spatial.tiles import Tile

__all__ = ["EXACT_PX", "LONGEST_PX", "UP_TO_PX", "RasterCache", "format_values", "render_cells", "render_values"]

LONGEST_PX = 1200  # of the picture as drawn; more than a screen shows
EXACT_PX = 1 << 20  # pixels; a larger region is read from a coarser level
KEPT = 16  # cached rasters


class RasterCache:
    """A cache of the whole picture and of regions of it, in screen pixels. The oldest entries are dropped first."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._kept: dict[Hashable, Pixels] = {}

    @classmethod
    def of(cls, picture: Picture | RasterCache) -> RasterCache:
        """Return the cache of a picture. A `RasterCache` is returned unchanged."""
        return picture if isinstance(picture, cls) else cls(picture)

    @cached_property
    def _whole(self) -> Pixels:
        return self.picture.thumbnail(LONGEST_PX)

    def render_whole(self, size: tuple[int, int]) -> Pixels:
        """Return the whole picture as (*size, 4). Matplotlib draws RGBA several times faster than RGB."""

        def render() -> Pixels:
            larger = max(size) > max(self._whole.shape[:2])
            how = Image.Resampling.NEAREST if larger else Image.Resampling.BOX
            return np.array(Image.fromarray(self._whole).resize(size[::-1], how).convert("RGBA"))

        return self._get_cached(("whole", size), render)

    def render_region(self, layer_px: tuple[int, int], view: Tile, longest_px: int = LONGEST_PX) -> Pixels:
        """Return the picture under the pixels `view` of a layer as (h, w, 3), averaged over each layer pixel.

        A large region is coarser: its sides are at most `longest_px`.
        """

        def render() -> Pixels:
            # A layer pixel may cover a fraction of the picture's pixels at its edges: whole pixels are read, and the
            # resampling weighs them by their share of `box`.
            (top, bottom), (left, right) = (
                (span.start * side / px, span.stop * side / px)
                for span, side, px in zip((view.rows, view.cols), self.picture.shape(), layer_px, strict=True)
            )
            y0, x0 = int(top), int(left)
            rows, cols = math.ceil(bottom) - y0, math.ceil(right) - x0
            if rows * cols > EXACT_PX:
                return make_thumbnail(self.picture, longest_px, (y0, x0, rows, cols))
            there = Image.fromarray(self.picture.read(y0, x0, rows, cols))
            box = (left - x0, top - y0, right - x0, bottom - y0)
            return np.array(there.resize(view.shape[::-1], Image.Resampling.BOX, box=box))

        return self._get_cached((layer_px, view, longest_px), render)

    def _get_cached(self, key: Hashable, make: Callable[[], Pixels]) -> Pixels:
        """Return the cached entry of `key`, or make it, and drop the oldest entry beyond `KEPT`."""
        # A dict keeps the order of insertion: its first key is the oldest.
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]


# Pixels drawn so large that their values can be written into them.


UP_TO_PX = 12  # across a view; three numbers would be illegible in smaller cells
SMALLEST_FONT_PX, LARGEST_FONT_PX = 7, 17
DARK = 3 * 120  # sum of red, green and blue; dark text is hard to read on less
FONT = Path(mpl.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


def render_cells(pixels: Pixels, size: tuple[int, int], lines: bool) -> Pixels:
    """Return an image (*size, 4) with each pixel as a cell, and white lines between cells if `lines`."""
    rows, cols = (_compute_edges(count, px) for count, px in zip(pixels.shape[:2], size, strict=True))
    # At the resolution of the screen, so that Matplotlib need not resample it, which is slow and blurs the edges.
    large = np.repeat(np.repeat(pixels, np.diff(rows), 0), np.diff(cols), 1)
    if lines:
        large[rows[1:-1]], large[:, cols[1:-1]] = 255, 255
    return np.dstack([large, np.full(size, 255, np.uint8)])


def _compute_edges(count: int, px: int) -> NDArray[np.int64]:
    # Rounded edges: cells differ by at most one screen pixel in size, and the last one ends at the edge of the image.
    return np.rint(np.linspace(0, px, count + 1)).astype(np.int64)


def render_values(
    pixels: Pixels, ground: Pixels, size: tuple[int, int], notes: Mapping[tuple[int, int], str]
) -> Pixels:
    """Return an overlay (*size, 4) with red, green and blue of each pixel as text, for cells of the colours `ground`.

    `notes` are lines above the numbers, by (row, column). The text of such a cell has a white background.
    """
    page = Image.new("RGBA", size[::-1], (255, 255, 255, 0))
    pen = ImageDraw.Draw(page)
    rows, cols = (_compute_edges(count, px) for count, px in zip(pixels.shape[:2], size, strict=True))
    cell = min(size[0] / pixels.shape[0], size[1] / pixels.shape[1])
    font = ImageFont.truetype(FONT, min(LARGEST_FONT_PX, max(SMALLEST_FONT_PX, int(cell / 5.2))))
    for row, col in np.ndindex(pixels.shape[:2]):
        middle = (cols[col] + cols[col + 1]) / 2, (rows[row] + rows[row + 1]) / 2
        lines = [str(value) for value in pixels[row, col]]
        note = notes.get((row, col))
        text = "\n".join([note, *lines] if note else lines)
        style = {"font": font, "anchor": "mm", "align": "center", "spacing": 1}
        if note:
            left, top, right, bottom = pen.multiline_textbbox(middle, text, **style)
            pen.rounded_rectangle((left - 4, top - 3, right + 4, bottom + 3), 4, fill=(255, 255, 255, 235))
        dark = note or int(ground[row, col].astype(int).sum()) > DARK
        pen.multiline_text(middle, text, fill=(26, 26, 26, 255) if dark else (255, 255, 255, 255), **style)
    return np.array(page)


def format_values(pixels: Pixels, view: Tile) -> Iterable[str]:
    """Yield `row 4: 231 201 214, 229 200 213` for each row: red, green and blue of its pixels from left to right."""
    for number, row in enumerate(pixels, start=view.rows.start):
        yield f"row {number}: {', '.join(' '.join(str(value) for value in pixel) for pixel in row)}"
