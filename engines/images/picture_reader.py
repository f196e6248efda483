"""Base class of picture readers: levels, rectangles that may extend beyond the picture, thumbnails, display."""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.errors import ImageError
from engines.images.display import describe_picture, make_picture_html
from engines.images.thumbnails import DecodeBlock, make_thumbnail

__all__ = ["WHITE", "DecodeBlock", "Level", "PictureReader", "Pixels", "split_row_bands"]

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
