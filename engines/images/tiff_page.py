"""Reader of one page of a TIFF file: its segments (tiles or strips), decoded only where they intersect a rectangle."""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffPage

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.files import (
    check_budget,
    check_size,
    make_damaged_error,
    make_undecoded_error,
    translate_errors,
)
from mpi4dl_nb.engines.images.jpeg_frame import read_frame
from mpi4dl_nb.engines.images.orientation import ORIENTATION, SWAPPED, find_stored_tile, turn_back
from mpi4dl_nb.engines.images.picture_reader import DecodeBlock
from mpi4dl_nb.engines.images.tiff_layout import JPEG, JPEG_2000, PLAIN

LARGE_TILE_PX = 1 << 24  # 4096 x 4096: programs write small pages in the tiles of large ones
TILE_PX = 1 << 14  # pixels that take as long to decode as a tile takes to find
_PREDICTED = (5, 8, 32946, 34925, 50000)  # compressions that may follow a predictor: LZW, deflate, LZMA, Zstandard
GDAL_NODATA = 42113


def check_segment_size(path: Path, page: TiffPage) -> None:
    """Raise ImageError if a tile is far larger than the picture and than any program writes: a decoder would obey."""
    (rows, cols), (height, width) = get_segment_shape(page), (int(page.imagelength), int(page.imagewidth))
    if rows * cols > max(LARGE_TILE_PX, 4 * height * width):
        raise make_damaged_error(path, f"its tiles have {rows} x {cols} px, and all of it has {height} x {width}")


def get_segment_shape(page: TiffPage) -> tuple[int, int]:
    """Return the rows and columns of a tile or strip."""
    if page.is_tiled:
        return int(page.tilelength), int(page.tilewidth)
    return min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth)


class Descriptor:
    """A bare descriptor of a file, closed when the object goes.

    `pread` takes the position as an argument, so that any number of threads read through one descriptor without a lock.
    """

    def __init__(self, path: Path) -> None:
        with translate_errors(path):
            self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


def find_empty_segments(page: TiffPage) -> NDArray[np.bool_]:
    """Return for each segment whether it is not in the file (offset or byte count 0): programs leave out blank ones."""
    count = min(len(page.dataoffsets), len(page.databytecounts))
    offsets, counts = (np.asarray(listed[:count]) for listed in (page.dataoffsets, page.databytecounts))
    return (offsets == 0) | (counts == 0)


def find_empty_number(path: Path, page: TiffPage, base: TiffPage) -> float:
    """Return the number of pixels in segments that are not in the file: GDAL's NODATA if there is one, else 0.

    `base` is the full-size page, whose tag holds for a level without one. Raises ImageError if a pixel cannot hold it.
    """
    stated = page.tags.valueof(GDAL_NODATA, base.tags.valueof(GDAL_NODATA))
    if stated is None:
        return 0
    text, dtype = str(stated).strip("\0 \n"), np.dtype(page.dtype)
    try:
        nodata = int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        nodata = math.nan
    most = (1 << int(page.bitspersample)) - 1 if dtype.kind in "bu" else np.iinfo(dtype).max if dtype.kind == "i" else 0
    least = np.iinfo(dtype).min if dtype.kind == "i" else 0
    if dtype.kind == "f" or (least <= nodata <= most and nodata == int(nodata)):
        return nodata
    raise ImageError(
        f"{path} leaves out blank tiles, whose pixels are NODATA = {text[:40]!r} (tag 42113), and its pixels of "
        f"{page.bitspersample} bits hold no such number. Write its tiles out: "
        "gdal_translate -a_nodata none -co SPARSE_OK=FALSE IN OUT.tif."
    )


class TiffPageReader:
    """Reader of a page's segments: their offsets in the file and their decoder. Any number of threads may use it.

    It returns the stored numbers as `dtype`, whether they are shades, colours or classes, upright (`shape`). `base` is
    the full-size page if this one is a level of it: its orientation and NODATA hold for a level that has no such tags.
    Raises ImageError if segments that the header lists are not in the file.
    """

    def __init__(
        self, path: Path, page: TiffPage, file: Descriptor | None = None, base: TiffPage | None = None
    ) -> None:
        base = page if base is None else base
        self.path, self._file = path, file
        self.orientation = int(page.tags.valueof(ORIENTATION, base.tags.valueof(ORIENTATION, 1)))
        self._stored_shape = rows, cols = int(page.imagelength), int(page.imagewidth)
        self.shape = (cols, rows) if self.orientation in SWAPPED else (rows, cols)
        self.channels = int(page.samplesperpixel)
        self._planes = self.channels if page.planarconfig == 2 else 1
        self.dtype = np.dtype(page.dtype)
        self._stored = self.dtype.newbyteorder(page.parent.byteorder)
        whole = page.bitspersample == 8 * self.dtype.itemsize and page.fillorder == 1
        self.segment, self._compression = get_segment_shape(page), int(page.compression)
        if self._compression not in _PREDICTED:
            page.predictor = 1  # libtiff ignores it there; tifffile would apply it
        self._stored_plainly = page.compression == PLAIN and whole
        self._check_segments(page)
        self._empty_number = find_empty_number(path, page, base) if not self._counts.all() else 0
        self._decode: Callable[..., Any] = page.decode
        self._tables = {"jpegtables": page.jpegtables} if self._compression == JPEG else {}

    def _check_segments(self, page: TiffPage) -> None:
        """Set the offsets and byte counts of the segments, 0 for empty ones, and check them against the file."""
        path, shape = self.path, self._stored_shape
        if min(*shape, *self.segment) < 1:
            raise make_damaged_error(path, f"it has {shape[0]} x {shape[1]} px in segments of {self.segment}")
        check_size(path, *shape)
        check_segment_size(path, page)
        # A truncated file lacks its last segments, which should fail here and not in the middle of a training.
        self._grid = tuple(-(-side // part) for side, part in zip(shape, self.segment, strict=True))
        expected, file_bytes = math.prod(self._grid) * self._planes, path.stat().st_size
        if not len(page.dataoffsets) == len(page.databytecounts) == expected:
            listed = f"{len(page.dataoffsets)} of {len(page.databytecounts)} lengths"
            raise make_undecoded_error(path, f"{expected} segments are needed, but it lists {listed}")
        there = ~find_empty_segments(page)
        self._offsets = np.asarray(page.dataoffsets, np.int64) * there
        self._counts = np.asarray(page.databytecounts, np.int64) * there
        beyond = (self._offsets < 0) | (self._counts < 0) | (self._offsets + self._counts > file_bytes)
        if beyond.any():
            raise make_damaged_error(path, f"{beyond.sum()} of its {expected} segments lie beyond its end")
        size = math.prod(self.segment) * self.channels // self._planes * self.dtype.itemsize
        if self._compression == PLAIN and self._counts.max() > size:
            raise make_undecoded_error(path, f"a segment of {self._counts.max()} bytes cannot lie in {size}")
        if not self._stored_plainly:
            reason = f"its tiles or strips of {' x '.join(map(str, self.segment))} px are decoded whole"
            check_budget(path, 3 * size, reason, "Save it in smaller tiles, such as 512 x 512.")

    @property
    def _fd(self) -> int:
        if self._file is None:
            self._file = Descriptor(self.path)
        return self._file.number

    @property
    def decode_block(self) -> DecodeBlock:
        """The unit of decoding and its cost."""
        if self._stored_plainly:
            return DecodeBlock()
        rows, cols = self.segment[:: -1 if self.orientation in SWAPPED else 1]
        return DecodeBlock(rows, cols, max(TILE_PX, rows * cols))

    def fill(self, out: NDArray[Any], y0: int, x0: int) -> None:
        """Fill `out`, (h, w, channels), with the rectangle at (y0, x0) of the upright page, which must be inside it."""
        upright = Tile(Span(y0, y0 + out.shape[0]), Span(x0, x0 + out.shape[1]))
        wanted = find_stored_tile(upright, self.shape, self.orientation)
        self._fill_stored(turn_back(out, self.orientation), wanted)

    def _fill_stored(self, out: NDArray[Any], wanted: Tile) -> None:
        #     segments (tiles, or strips as wide as the page)
        #     +-----+-----+-----+     `part` is what a segment and the rectangle have in common; `inner` is the same in
        #     |   +-|-----|-+   |     pixels of the segment. The segments of one plane follow each other in rows. With
        #     +---|-+-----+-|---+     planarconfig 2, each channel is a plane of its own, and the planes follow each
        #     |   +-|-----|-+   |     other.
        #     +-----+-----+-----+
        rows, cols = self.segment
        hit_rows = range(wanted.rows.start // rows, -(-wanted.rows.stop // rows))
        hit_cols = range(wanted.cols.start // cols, -(-wanted.cols.stop // cols))
        for plane, row, col in product(range(self._planes), hit_rows, hit_cols):
            index = (plane * self._grid[0] + row) * self._grid[1] + col
            segment = Tile(Span(row * rows, (row + 1) * rows), Span(col * cols, (col + 1) * cols))
            part = segment & wanted
            channels = slice(None) if self._planes == 1 else slice(plane, plane + 1)
            out[(*part.to_slices(wanted), channels)] = self._read_part(index, *part.to_slices(segment))

    def _read_part(self, index: int, rows: slice, cols: slice) -> NDArray[Any] | float:
        """Return the numbers of a part of a segment, or the one number of an empty segment."""
        if not self._counts[index]:
            return self._empty_number
        return self._read_rows(index, rows, cols) if self._stored_plainly else self._decode_segment(index)[rows, cols]

    def _read_rows(self, index: int, rows: slice, cols: slice) -> NDArray[Any]:
        """Read only the wanted bytes of an uncompressed segment."""
        deep, wide = self.channels // self._planes, self.segment[1]
        pixels = np.empty((rows.stop - rows.start, cols.stop - cols.start, deep), self.dtype)
        for out_row, row in enumerate(range(rows.start, rows.stop)):
            start = (row * wide + cols.start) * deep * self.dtype.itemsize
            if start + pixels[out_row].nbytes > self._counts[index]:
                raise make_damaged_error(self.path, f"segment {index} ends in row {row}")
            line = os.pread(self._fd, pixels[out_row].nbytes, int(self._offsets[index]) + start)
            pixels[out_row] = np.frombuffer(line, self._stored).reshape(pixels[out_row].shape)
        return pixels

    def _decode_segment(self, index: int) -> NDArray[Any]:
        data = os.pread(self._fd, int(self._counts[index]), int(self._offsets[index]))
        # A JPEG or JPEG 2000 segment has a header of its own, and the decoder trusts the size in it, up to
        # 65535 x 65535 for JPEG.
        size = None
        if self._compression == JPEG and (frame := read_frame(data)):
            size = frame.rows, frame.cols
        elif self._compression in JPEG_2000:
            size = read_jpeg_2000_size(data)
        if size is not None and size[0] * size[1] > 2 * self.segment[0] * self.segment[1]:
            reason = f"segment {index} says that it holds {size[0]} x {size[1]} px, where there is room for"
            raise make_damaged_error(self.path, f"{reason} {self.segment[0]} x {self.segment[1]}")
        pixels, *_ = self._decode(data, index, **self._tables)
        return np.asarray(pixels[0], self.dtype)


def read_jpeg_2000_size(data: bytes) -> tuple[int, int] | None:
    """Return rows and columns of a JPEG 2000 code stream (ITU T.800, A.5.1), with or without enclosing boxes."""
    at = data.find(b"\xff\x4f\xff\x51")
    if at < 0 or at + 24 > len(data):
        return None
    right, bottom, left, top = struct.unpack_from(">4I", data, at + 8)
    return bottom - top, right - left
