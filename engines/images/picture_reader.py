"""Base class of picture readers: levels, rectangles that may extend beyond the picture, thumbnails, display."""

from __future__ import annotations

import base64
import io
import math
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.errors import ImageError
from engines.formatting import format_html_table

if TYPE_CHECKING:
    from engines.images.picture import Picture

__all__ = [
    "WHITE",
    "DecodeBlock",
    "Level",
    "PictureReader",
    "Pixels",
    "describe_picture",
    "make_picture_html",
    "make_thumbnail",
    "split_row_bands",
]

# Display of a picture in a notebook: its properties and a thumbnail.


LONGEST_PX = 240


def describe_picture(picture: Picture) -> dict[str, str]:
    """Return the size, levels and resolution of a picture as text."""
    sizes = [f"{level.height} rows × {level.width} columns" for level in picture.levels]
    facts = {"Size in px": sizes[0]}
    if len(sizes) > 1:
        facts["Coarser levels"] = ", ".join(sizes[1:])
    if picture.microns_per_px:
        facts["Resolution"] = f"{picture.microns_per_px:.3g} µm per px"
    return facts


def make_picture_html(picture: Picture) -> str:
    """Return HTML of the picture's properties and a thumbnail. Raises ImageError if the picture cannot be read."""
    buffer = io.BytesIO()
    Image.fromarray(picture.thumbnail(LONGEST_PX)).save(buffer, "png")
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{escape(picture.name)}, all of it" src="data:image/png;base64,{data}">'
    return f"{format_html_table(picture.name, describe_picture(picture))}{image}"


# Thumbnails of large pictures, made from the best level in bands, so that the whole picture is never in memory.


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


Pixels = NDArray[np.uint8]
"""(H, W, 3), red, green, blue."""

BAND_BYTES = 1 << 24  # of temporary memory in addition to the requested pixels
WHITE = 255  # the value outside of the picture, and behind transparent pixels


@dataclass(frozen=True)
class Level:
    """One resolution of a picture: its size in pixels, and its downsample factor relative to level 0 (per side)."""

    height: int
    width: int
    downsample: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.height, self.width


class ByteCounter:
    """A thread-safe counter of bytes. A pickled copy starts at 0."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add to the count."""
        with self._lock:
            self.count += count

    def __reduce__(self) -> tuple[type[ByteCounter], tuple[()]]:
        return ByteCounter, ()


class PictureReader(ABC):
    """A picture that is read by rectangles; a subclass implements only the reading of rectangles inside a level.

    Several threads may read at once. A pickled reader of a file contains only its path: the copy opens the file again
    on its first read, so that every rank has its own handle.
    """

    def __init__(self, name: str, levels: Sequence[Level], microns_per_px: float | None = None) -> None:
        self.name, self.levels, self.microns_per_px = name, tuple(levels), microns_per_px
        self._tally = ByteCounter()

    @property
    def bytes_read(self) -> int:
        """Bytes of the picture's own pixels that `read` has returned so far, without white beyond its edges."""
        return self._tally.count

    def shape(self, level: int = 0) -> tuple[int, int]:
        """Return height and width in pixels of one level. Raises ImageError if there is no such level."""
        if level not in range(len(self.levels)):
            raise ImageError(
                f"{getattr(self, 'path', self.name)} has no level {level}: its levels are 0 to {len(self.levels) - 1} "
                f"({', '.join(f'{each.height} x {each.width}' for each in self.levels)} px)."
            )
        return self.levels[level].shape

    def read(self, y0: int, x0: int, height_px: int, width_px: int, level: int = 0) -> Pixels:
        """Return a new (height_px, width_px, 3) array of a rectangle of one level, in pixels of that level.

        Pixels outside of the picture are white. Raises ImageError if the rectangle has no pixels, or the file cannot
        be read.
        """
        rows, cols = self.shape(level)
        box = y0, x0, height_px, width_px
        try:
            y0, x0, height_px, width_px = map(operator.index, box)
        except TypeError as error:
            raise ImageError(f"A rectangle of {self.name} is given in whole pixels, not as {box}.") from error
        if min(height_px, width_px) < 1:
            raise ImageError(
                f"A rectangle of {height_px} x {width_px} px of {self.name}, from row {y0}, column {x0}, has no "
                "pixels. Ask for at least 1 x 1."
            )
        # A rectangle may lie partly, or all, outside of the level. Only the part inside is read; clamped edges make
        # that part empty where there is none.
        #
        #     (y0, x0) +----------------+
        #              | white          |
        #              |     +----------|----- level
        #              |     | inside   |
        #              +-----|----------+
        top, bottom = (min(max(edge, 0), rows) for edge in (y0, y0 + height_px))
        left, right = (min(max(edge, 0), cols) for edge in (x0, x0 + width_px))
        try:
            found = np.full((height_px, width_px, 3), WHITE, np.uint8)
        except (MemoryError, ValueError) as error:
            raise ImageError(f"{height_px} x {width_px} px of {self.name} do not fit into memory: {error}.") from error
        inside = found[top - y0 : bottom - y0, left - x0 : right - x0]
        if inside.size:
            self._fill(inside, top, left, level)
            self._tally.add(inside.nbytes)
        return found

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the unit of decoding of a level; by default single pixels, if only requested pixels are decoded."""
        return DecodeBlock()

    def thumbnail(self, longest_px: int) -> Pixels:
        """Return the picture shrunk until neither side is longer than `longest_px`; see `make_thumbnail`."""
        return make_thumbnail(self, longest_px)

    def __repr__(self) -> str:
        return f"<{self.name}: {'; '.join(describe_picture(self).values())}>"

    def _repr_html_(self) -> str:
        return make_picture_html(self)

    @abstractmethod
    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        """Fill `out`, (h, w, 3), initially white, with the rectangle at (y0, x0), which is inside the level.

        `out` may be as large as the whole picture: an implementation that needs temporary memory works in bands, see
        `split_row_bands`.
        """


def split_row_bands(start: int, stop: int, row_bytes: int, step: int = 1) -> Iterator[tuple[int, int]]:
    """Split rows `start` to `stop` into bands of about `BAND_BYTES`, cut at multiples of `step` (the rows of a tile).

    >>> list(split_row_bands(5, 40, row_bytes=BAND_BYTES // 20, step=8))
    [(5, 16), (16, 32), (32, 40)]
    """
    step *= max(1, BAND_BYTES // (row_bytes * step))
    for first in range(start - start % step, stop, step):
        yield max(first, start), min(first + step, stop)
