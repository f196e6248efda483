"""Base class of pictures: levels, rectangles that may extend beyond the picture, thumbnails; pictures in memory."""

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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.engines.errors import AS_TENSORS, ImageError
from mpi4dl_nb.engines.formatting import format_html_table

Pixels = NDArray[np.uint8]
"""(H, W, 3), red, green, blue."""

BAND_BYTES = 1 << 24  # of temporary memory in addition to the requested pixels
WHITE = 255  # the value outside of the picture, and behind transparent pixels
LONGEST_PX = 240  # of the thumbnail that a notebook shows


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


def make_levels(shapes: Sequence[tuple[int, int]]) -> list[Level]:
    """Return levels of these heights and widths, finest first, with the mean downsample factor of their two sides."""
    rows, cols = shapes[0]
    return [Level(height, width, (rows / height + cols / width) / 2) for height, width in shapes]


@dataclass(frozen=True)
class DecodeBlock:
    """The smallest unit of decoding, and its cost, as the number of pixels that take equally long to decode."""

    rows: int = 1
    cols: int = 1
    cost_px: int = 1


class Picture(ABC):
    """A picture that can be read in tiles without being loaded whole, at one or more resolutions (levels).

    Level 0 is the finest. Rows and columns are always in pixels of the level that is read. `microns_per_px` are those
    of level 0 (times `levels[level].downsample` for another level); None if unknown. `bytes_read` are the bytes of the
    picture's own pixels that were read in this process, without white beyond its edges. Several threads may read at
    once. A subclass implements only the reading of rectangles inside a level.
    """

    channels = 3

    def __init__(self, name: str, levels: Sequence[Level], microns_per_px: float | None = None) -> None:
        self.name, self.levels, self.microns_per_px = name, tuple(levels), microns_per_px
        self.bytes_read, self._lock = 0, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bytes_read": 0, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    def shape(self, level: int = 0) -> tuple[int, int]:
        """Return height and width in pixels of one level. Raises ImageError if there is no such level."""
        if level not in range(len(self.levels)):
            raise ImageError(
                f"{getattr(self, 'path', self.name)} has no level {level}: its levels are 0 to {len(self.levels) - 1} "
                f"({', '.join(f'{resolution.height} x {resolution.width}' for resolution in self.levels)} px)."
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
            pixels = np.full((height_px, width_px, 3), WHITE, np.uint8)
        except (MemoryError, ValueError) as error:
            raise ImageError(f"{height_px} x {width_px} px of {self.name} do not fit into memory: {error}.") from error
        inside = pixels[top - y0 : bottom - y0, left - x0 : right - x0]
        if inside.size:
            self._fill(inside, top, left, level)
            with self._lock:
                self.bytes_read += inside.nbytes
        return pixels

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the unit of decoding of a level; by default single pixels, if only requested pixels are decoded."""
        return DecodeBlock()

    def thumbnail(self, longest_px: int) -> Pixels:
        """Return the picture shrunk until neither side is longer than `longest_px`; see `make_thumbnail`."""
        return make_thumbnail(self, longest_px)

    def __repr__(self) -> str:
        return f"<{self.name}: {'; '.join(self._describe().values())}>"

    def _repr_html_(self) -> str:
        buffer = io.BytesIO()
        Image.fromarray(self.thumbnail(LONGEST_PX)).save(buffer, "png")
        data = base64.b64encode(buffer.getvalue()).decode()
        image = f'<img alt="{escape(self.name)}, all of it" src="data:image/png;base64,{data}">'
        return f"{format_html_table(self.name, self._describe())}{image}"

    def _describe(self) -> dict[str, str]:
        """Return the size, levels and resolution as text."""
        sizes = [f"{level.height} rows × {level.width} columns" for level in self.levels]
        facts = {"Size in px": sizes[0]}
        if len(sizes) > 1:
            facts["Coarser levels"] = ", ".join(sizes[1:])
        if self.microns_per_px:
            facts["Resolution"] = f"{self.microns_per_px:.3g} µm per px"
        return facts

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


# Thumbnails of large pictures, made from the best level in bands, so that the whole picture is never in memory.


BAND_PX = 1 << 24  # pixels in memory at a time
MOST_PX = 1 << 29  # pixels of a level: a larger one is sampled, since reading all of it takes minutes
SAMPLES, SAMPLE_PX = 64, 16  # squares along the longer side, and the side of each
MOST_DECODED_PX = 1 << 32  # pixels decoded for one thumbnail, which takes at most ten seconds
FEWEST = 4  # squares along the longer side, whatever their cost


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
    source = level  # then the coarsest level on which the rectangle has at least `size` pixels
    for index, other in enumerate(picture.levels):
        ratios = [there / here for there, here in zip(other.shape, picture.shape(level), strict=True)]
        fits = all(side * ratio >= px for side, ratio, px in zip((rows, cols), ratios, size, strict=True))
        if fits and other.downsample > picture.levels[source].downsample:
            source = index
    ratios = [there / here for there, here in zip(picture.shape(source), picture.shape(level), strict=True)]
    top, left, bottom, right = (
        side * ratio for side, ratio in zip((y0, x0, y0 + rows, x0 + cols), ratios * 2, strict=True)
    )
    # What is decoded counts, not what is read: bands cut through tiles, and each tile is decoded for every band that it
    # lies in. A band of n tile rows may touch n + 1 of them.
    #
    #     tiles   |      |      |      |
    #     bands   |  a |  b |  c |  d |        tile 1 is decoded for a and b, tile 2 for b and c, ...
    segment, sides = picture.get_decode_block(source), (bottom - top, right - left)
    bands = max(1.0, sides[0] * sides[1] / BAND_PX)
    touched = bands * (sides[0] / bands / segment.rows + 1) * (sides[1] / segment.cols + 1)
    if sides[0] * sides[1] > MOST_PX or touched * segment.cost_px > MOST_DECODED_PX:
        return _shrink_by_sampling(picture, (top, left, bottom, right), source, size)
    return _shrink_in_bands(picture, (top, left, bottom, right), source, size)


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
    segment = picture.get_decode_block(level)
    cost_px = math.ceil(SAMPLE_PX / segment.rows) * math.ceil(SAMPLE_PX / segment.cols) * segment.cost_px
    samples = min(SAMPLES, max(FEWEST, math.isqrt(MOST_DECODED_PX // cost_px)))
    top, left, bottom, right = edges
    cell = max(bottom - top, right - left) / min(samples, *size)
    rows, cols = max(1, round((bottom - top) / cell)), max(1, round((right - left) / cell))
    grid = np.empty((rows, cols, 3), np.uint8)
    for row, col in np.ndindex(rows, cols):
        y, x = (
            int(start + (index + 0.5) * (stop - start) / count) - SAMPLE_PX // 2
            for start, stop, index, count in ((top, bottom, row, rows), (left, right, col, cols))
        )
        grid[row, col] = np.rint(picture.read(y, x, SAMPLE_PX, SAMPLE_PX, level).mean((0, 1)))
    return np.array(Image.fromarray(grid).resize(size[::-1], Image.Resampling.NEAREST))


# Pictures in memory: NumPy arrays and torch tensors.


class ArrayPicture(Picture):
    """A picture in memory, (H, W, 3)."""

    def __init__(self, name: str, pixels: Pixels) -> None:
        super().__init__(name, [Level(*pixels.shape[:2])])
        self.pixels = pixels

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        out[:] = self.pixels[y0 : y0 + out.shape[0], x0 : x0 + out.shape[1]]


def composite_on_white(rgba: Pixels) -> Pixels:
    """Composite transparent pixels on white: (H, W, 4) -> (H, W, 3)."""
    image = Image.fromarray(rgba)
    if image.getchannel("A").getextrema() != (255, 255):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"))


def convert_tensor(tensor: torch.Tensor) -> Pixels:
    """Convert a tensor to pixels: (C, H, W) -> (H, W, 3). Raises ImageError if the tensor is no picture."""
    if tensor.dim() != 3:
        raise ImageError(f"The tensor has shape {tuple(tensor.shape)}, but a picture is (C, H, W). {AS_TENSORS}")
    plain = tensor.detach().cpu()
    plain = plain.float() if plain.dtype is torch.bfloat16 else plain
    return convert_array(plain.permute(1, 2, 0).numpy(), "The tensor")


def convert_array(array: NDArray[np.generic], what: str) -> Pixels:
    """Convert an array to pixels: (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) -> (H, W, 3).

    Raises ImageError if it is no picture; `what` names the array in the message.
    """
    # Floats are taken only from 0 to 1. Scaling any other range to its own extremes would look plausible, but two
    # pictures, or two tiles of one, would then be scaled by different factors.
    floating = np.issubdtype(array.dtype, np.floating)
    if array.dtype == np.uint8:
        pixels = array.astype(np.uint8)
    elif floating and array.size and array.min() >= 0 and array.max() <= 1:
        pixels = np.rint(array.astype(np.float64) * 255).astype(np.uint8)
    else:
        bounds = f"from {array.min():g} to {array.max():g}" if floating and array.size else "of more than 8 bits"
        raise ImageError(
            f"{what} holds {array.dtype} numbers {bounds if array.dtype != bool else 'for true and false'}. "
            f"A picture has uint8 from 0 to 255, or floats from 0 to 1. {AS_TENSORS}"
        )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise ImageError(
            f"{what} has shape {array.shape}, but a picture has 1, 3 or 4 channels: "
            f"(H, W, C) as an array, (C, H, W) as a tensor. {AS_TENSORS}"
        )
    if pixels.shape[2] == 4:
        return composite_on_white(pixels)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
