"""Thumbnails of large pictures, made from the best level in bands, so that the whole picture is never in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from engines.errors import ImageError

if TYPE_CHECKING:
    from engines.images.picture import Picture
    from engines.images.picture_reader import Pixels

__all__ = ["DecodeBlock", "make_thumbnail"]

BAND_PX = 1 << 24  # pixels in memory at a time
MOST_PX = 1 << 29  # pixels of a level: a larger one is sampled, since reading all of it takes minutes
SAMPLES, SAMPLE_PX = 64, 16  # squares along the longer side, and the side of each
MOST_DECODED_PX = 1 << 32  # pixels decoded for one thumbnail, which takes at most ten seconds
FEWEST = 4  # squares along the longer side, whatever their cost


@dataclass(frozen=True)
class DecodeBlock:
    """The smallest unit of decoding, and its cost, as the number of pixels that take equally long to decode."""

    rows: int = 1
    cols: int = 1
    cost_px: int = 1


def make_thumbnail(
    picture: Picture, longest_px: int, box: tuple[int, int, int, int] | None = None, level: int = 0
) -> Pixels:
    """Return a rectangle of one level (None: all of it), shrunk by averaging until no side exceeds `longest_px`.

    `box` is (y0, x0, height, width). It is read in bands, never all at once, from the coarsest level that has
    enough pixels. If even on that level it is larger than 2**29 pixels (a slide without a pyramid), or would take as
    long because its tiles are huge or tiny, only a grid of squares is read, and the result is coarse. It is never
    enlarged. Raises ImageError if `longest_px` is less than 1.
    """
    if longest_px < 1:
        raise ImageError(f"A thumbnail of {picture.name} cannot have sides of {longest_px} px: use 1 or more.")
    y0, x0, rows, cols = box or (0, 0, *picture.shape(level))
    scale = min(1.0, longest_px / max(rows, cols))
    size = max(1, round(rows * scale)), max(1, round(cols * scale))
    source = _choose_level(picture, (rows, cols), level, size)
    ratios = [there / here for there, here in zip(picture.shape(source), picture.shape(level), strict=True)]
    top, left, bottom, right = (
        side * ratio for side, ratio in zip((y0, x0, y0 + rows, x0 + cols), ratios * 2, strict=True)
    )
    # What is decoded counts, not what is read: bands cut through tiles, and each tile is decoded for every band that it
    # lies in. A band of n tile rows may touch n + 1 of them.
    #
    #     tiles   |      |      |      |
    #     bands   |  a |  b |  c |  d |        tile 1 is decoded for a and b, tile 2 for b and c, ...
    segment, sides = _get_decode_block(picture, source), (bottom - top, right - left)
    bands = max(1.0, sides[0] * sides[1] / BAND_PX)
    touched = bands * (sides[0] / bands / segment.rows + 1) * (sides[1] / segment.cols + 1)
    if sides[0] * sides[1] > MOST_PX or touched * segment.cost_px > MOST_DECODED_PX:
        return _shrink_by_sampling(picture, (top, left, bottom, right), source, size)
    return _shrink_in_bands(picture, (top, left, bottom, right), source, size)


def _choose_level(picture: Picture, sides: tuple[int, int], level: int, size: tuple[int, int]) -> int:
    """Return the coarsest level on which the rectangle has at least `size` pixels."""
    fits = level
    for number, other in enumerate(picture.levels):
        ratios = [there / here for there, here in zip(other.shape, picture.shape(level), strict=True)]
        wide = all(side * ratio >= px for side, ratio, px in zip(sides, ratios, size, strict=True))
        if wide and other.downsample > picture.levels[fits].downsample:
            fits = number
    return fits


def _get_decode_block(picture: Picture, level: int) -> DecodeBlock:
    """Return the unit of decoding; for a user's own kind of picture it is unknown, and single pixels are assumed."""
    get_block = getattr(picture, "get_decode_block", None)
    return get_block(level) if get_block else DecodeBlock()


def _shrink_in_bands(picture: Picture, edges: tuple[float, ...], level: int, size: tuple[int, int]) -> Pixels:
    """Average the rectangle between four edges, which need not be integers, to `size`."""
    # Rows of the thumbnail rarely begin at whole pixels of the level. A band reads the pixels around its rows, and
    # `resize` weighs the pixels at the two borders by the share that belongs to it.
    #
    #     pixels of the level    |    |    |    |    |    |    |
    #     rows of the thumbnail    |       |       |       |        per_row = 1.6
    #     band of two rows       y0|...............| y1             y0, y1: rounded outwards
    top, left, bottom, right = edges
    x0, x1 = math.floor(left), math.ceil(right)
    per_row = (bottom - top) / size[0]
    step = max(1, int(BAND_PX / (per_row * (x1 - x0))))
    bands = []
    for start in range(0, size[0], step):
        stop = min(size[0], start + step)
        upper, lower = top + start * per_row, top + stop * per_row
        y0, y1 = math.floor(upper), max(math.floor(upper) + 1, math.ceil(lower - 1e-6))
        band = Image.fromarray(picture.read(y0, x0, y1 - y0, x1 - x0, level))
        inner = (left - x0, upper - y0, right - x0, min(lower - y0, y1 - y0))
        bands.append(np.array(band.resize((size[1], stop - start), Image.Resampling.BOX, box=inner)))
    return np.concatenate(bands)


def _shrink_by_sampling(picture: Picture, edges: tuple[float, ...], level: int, size: tuple[int, int]) -> Pixels:
    """Fill each cell of a grid with the mean colour of a square in its centre."""
    # As many squares as `MOST_DECODED_PX` allows: each of them costs the tiles that it lies in.
    segment = _get_decode_block(picture, level)
    each = math.ceil(SAMPLE_PX / segment.rows) * math.ceil(SAMPLE_PX / segment.cols) * segment.cost_px
    samples = min(SAMPLES, max(FEWEST, math.isqrt(MOST_DECODED_PX // each)))
    top, left, bottom, right = edges
    cell = max(bottom - top, right - left) / min(samples, *size)
    rows, cols = max(1, round((bottom - top) / cell)), max(1, round((right - left) / cell))
    grid = np.empty((rows, cols, 3), np.uint8)
    for row, col in np.ndindex(rows, cols):
        y, x = (
            int(start + (place + 0.5) * (stop - start) / count) - SAMPLE_PX // 2
            for start, stop, place, count in ((top, bottom, row, rows), (left, right, col, cols))
        )
        grid[row, col] = np.rint(picture.read(y, x, SAMPLE_PX, SAMPLE_PX, level).mean((0, 1)))
    return np.array(Image.fromarray(grid).resize(size[::-1], Image.Resampling.NEAREST))
