"""Pixels drawn so large that their values can be written into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from engines.images.picture import Pixels
from engines.spatial.tiles import Tile

__all__ = ["UP_TO_PX", "format_values", "render_cells", "render_values"]

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
