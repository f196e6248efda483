"""Reader of TIFF, BigTIFF and OME-TIFF, including pyramids, with tifffile's parser and imagecodecs' decoders.

Only the tiles or strips (segments) that intersect a rectangle are decoded.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffFile, TiffPage

from engines.errors import ImageError
from engines.images.colour_profile import check_stored_colours
from engines.images.files import (
    FileReader,
    check_budget,
    check_size,
    make_changed_error,
    make_damaged_error,
    translate_errors,
)
from engines.images.picture_reader import (
    WHITE,
    DecodeBlock,
    Level,
    Pixels,
    composite_on_white,
    make_levels,
    split_row_bands,
)
from engines.images.tiff_layout import (
    ALPHA,
    DECODED,
    JPEG,
    JPEG_2000,
    MULTIPLIED,
    PLAIN,
    check_picture,
    find_picture,
    list_pages,
    list_sub_pages,
)
from engines.spatial.tiles import Span, Tile

MOST_BYTES = 1 << 26  # of one decoded segment; with larger ones, decoding the whole picture once is no worse
LARGE_TILE_PX = 1 << 24  # 4096 x 4096: programs write small pages in the tiles of large ones
TILE_PX = 1 << 14  # pixels that take as long to decode as a tile takes to find
_GREY, _RGB, _YCBCR = 1, 2, 6


def is_plain(page: TiffPage) -> bool:
    """Return whether a page is 8-bit grey or colour, upright, and in segments small enough to decode one by one.

    Fax pages, palettes, rotated photographs and the like are not; nor are more than 8 bits, which no reader supports.
    """
    colours = (_GREY, _RGB, _YCBCR) if page.compression in (JPEG, *JPEG_2000) else (_GREY, _RGB)
    grey = page.photometric == _GREY
    rows, cols = _get_segment_shape(page)
    return (
        page.compression in DECODED
        and page.photometric in colours
        and page.samplesperpixel in ((1, 2) if grey else (3, 4))
        and (page.bitspersample, page.sampleformat, page.imagedepth, page.fillorder) == (8, 1, 1, 1)
        and page.tags.valueof(274, 1) == 1
        and (page.compression == PLAIN or rows * cols * int(page.samplesperpixel) <= MOST_BYTES)
    )


def check_segment_size(path: Path, page: TiffPage) -> None:
    """Raise ImageError if a tile is far larger than the picture and than any program writes: a decoder would obey."""
    (rows, cols), (height, width) = _get_segment_shape(page), (int(page.imagelength), int(page.imagewidth))
    if rows * cols > max(LARGE_TILE_PX, 4 * height * width):
        raise make_damaged_error(path, f"its tiles have {rows} x {cols} px, and all of it has {height} x {width}")


def _get_segment_shape(page: TiffPage) -> tuple[int, int]:
    """Return the rows and columns of a tile or strip."""
    if page.is_tiled:
        return int(page.tilelength), int(page.tilewidth)
    return min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth)


def to_rgb(pixels: NDArray[np.uint8], alpha: int) -> Pixels:
    """Convert grey or colours, with or without an extra last channel, to RGB on white: (H, W, 1 to 4) -> (H, W, 3).

    `alpha` is TIFF's ExtraSamples value of the extra channel: 1 for premultiplied alpha, 2 for alpha; it is dropped
    for any other value.
    """
    last = pixels.shape[2] - 1
    if last in (0, 1):
        pixels = pixels[..., [0, 0, 0, *range(1, last + 1)]]
    if pixels.shape[2] == 3:
        return pixels
    if alpha == MULTIPLIED:
        paper = WHITE - pixels[..., 3:]
        return np.minimum(pixels[..., :3], WHITE - paper) + paper
    return composite_on_white(pixels) if alpha == ALPHA else np.ascontiguousarray(pixels[..., :3])


def open_descriptor(path: Path, owner: object) -> int:
    """Return a bare descriptor of a file, closed when `owner` goes; for `TiffPageReader.fill`.

    `pread` takes the position as an argument, so that any number of threads read through one descriptor without a lock.
    """
    with translate_errors(path):
        fd = os.open(path, os.O_RDONLY)
    weakref.finalize(owner, os.close, fd)
    return fd


class TiffPageReader:
    """Reader of a page's segments: their offsets in the file and their decoder. Any number of threads may use it.

    It returns the stored numbers as `dtype`, whether they are shades, colours or classes.
    Raises ImageError if segments that the header lists are not in the file.
    """

    def __init__(self, path: Path, page: TiffPage) -> None:
        self.path, self.shape = path, (int(page.imagelength), int(page.imagewidth))
        self.channels, self.alpha = int(page.samplesperpixel), int(next(iter(page.extrasamples), 0))
        self._planes = self.channels if page.planarconfig == 2 else 1
        self.dtype = np.dtype(page.dtype)
        self._stored = self.dtype.newbyteorder(page.parent.byteorder)
        whole = page.bitspersample == 8 * self.dtype.itemsize and page.fillorder == 1
        self._stored_plainly = page.compression == PLAIN and page.predictor == 1 and whole
        self.segment, self._compression = _get_segment_shape(page), int(page.compression)
        if min(*self.shape, *self.segment) < 1:
            raise make_damaged_error(path, f"it has {self.shape[0]} x {self.shape[1]} px in segments of {self.segment}")
        check_size(path, *self.shape)
        check_segment_size(path, page)
        self._offsets = np.asarray(page.dataoffsets, np.int64)
        self._counts = np.asarray(page.databytecounts, np.int64)
        # A truncated file lacks its last segments, which should fail here and not in the middle of a training.
        self._grid = tuple(-(-side // part) for side, part in zip(self.shape, self.segment, strict=True))
        expected, file_bytes = math.prod(self._grid) * self._planes, path.stat().st_size
        if not len(self._offsets) == len(self._counts) == expected:
            reason = f"{expected} segments are needed, but it lists {len(self._offsets)} of {len(self._counts)} lengths"
            raise make_damaged_error(path, reason)
        beyond = (self._offsets < 0) | (self._counts < 0) | (self._offsets + self._counts > file_bytes)
        if beyond.any():
            raise make_damaged_error(path, f"{beyond.sum()} of its {expected} segments lie beyond its end")
        size = math.prod(self.segment) * self.channels // self._planes * self.dtype.itemsize
        if self._compression == PLAIN and self._counts.max() > size:
            raise make_damaged_error(path, f"a segment of {self._counts.max()} bytes cannot lie in {size}")
        if not self._stored_plainly:
            reason = f"its tiles or strips of {' x '.join(map(str, self.segment))} px are decoded whole"
            check_budget(path, 3 * size, reason, "Save it in smaller tiles, such as 512 x 512.")
        self._decode: Callable[..., Any] = page.decode
        self._tables = {"jpegtables": page.jpegtables} if self._compression == JPEG else {}

    @property
    def decode_block(self) -> DecodeBlock:
        """The unit of decoding and its cost."""
        if self._stored_plainly:
            return DecodeBlock()
        return DecodeBlock(*self.segment, max(TILE_PX, self.segment[0] * self.segment[1]))

    def fill(self, fd: int, out: NDArray[Any], y0: int, x0: int) -> None:
        """Fill `out`, (h, w, channels), with the rectangle at (y0, x0), which must be inside the page.

        Pixels of empty segments (of 0 bytes) are left as they are.
        """
        #     segments (tiles, or strips as wide as the page)
        #     +-----+-----+-----+     `part` is what a segment and the rectangle have in common; `inner` is the same in
        #     |   +-|-----|-+   |     pixels of the segment. The segments of one plane follow each other in rows. With
        #     +---|-+-----+-|---+     planarconfig 2, each channel is a plane of its own, and the planes follow each
        #     |   +-|-----|-+   |     other.
        #     +-----+-----+-----+
        wanted, (rows, cols) = Tile(Span(y0, y0 + out.shape[0]), Span(x0, x0 + out.shape[1])), self.segment
        hit_rows = range(wanted.rows.start // rows, -(-wanted.rows.stop // rows))
        hit_cols = range(wanted.cols.start // cols, -(-wanted.cols.stop // cols))
        for plane, row, col in product(range(self._planes), hit_rows, hit_cols):
            index = (plane * self._grid[0] + row) * self._grid[1] + col
            if not self._counts[index]:
                continue
            segment = Tile(Span(row * rows, (row + 1) * rows), Span(col * cols, (col + 1) * cols))
            part = segment & wanted
            inner = part.to_slices(segment)
            pixels = (
                self._read_rows(fd, index, *inner) if self._stored_plainly else self._decode_segment(fd, index)[inner]
            )
            channels = slice(None) if self._planes == 1 else slice(plane, plane + 1)
            out[(*part.to_slices(wanted), channels)] = pixels

    def _read_rows(self, fd: int, index: int, rows: slice, cols: slice) -> NDArray[Any]:
        """Read only the wanted bytes of an uncompressed segment."""
        deep, wide = self.channels // self._planes, self.segment[1]
        found = np.empty((rows.stop - rows.start, cols.stop - cols.start, deep), self.dtype)
        for number, row in enumerate(range(rows.start, rows.stop)):
            start = (row * wide + cols.start) * deep * self.dtype.itemsize
            if start + found[number].nbytes > self._counts[index]:
                raise make_damaged_error(self.path, f"segment {index} ends in row {row}")
            line = os.pread(fd, found[number].nbytes, int(self._offsets[index]) + start)
            found[number] = np.frombuffer(line, self._stored).reshape(found[number].shape)
        return found

    def _decode_segment(self, fd: int, index: int) -> NDArray[Any]:
        data = os.pread(fd, int(self._counts[index]), int(self._offsets[index]))
        # A JPEG or JPEG 2000 segment has a header of its own, and the decoder trusts the size in it, up to
        # 65535 x 65535 for JPEG.
        size = None
        if self._compression == JPEG:
            size = read_jpeg_size(data)
        elif self._compression in JPEG_2000:
            size = read_jpeg_2000_size(data)
        if size is not None and size[0] * size[1] > 2 * self.segment[0] * self.segment[1]:
            reason = f"segment {index} says that it holds {size[0]} x {size[1]} px, where there is room for"
            raise make_damaged_error(self.path, f"{reason} {self.segment[0]} x {self.segment[1]}")
        pixels, *_ = self._decode(data, index, **self._tables)
        return np.asarray(pixels[0], self.dtype)


# ---- the size in the header of a segment: decoders trust it, so it is checked before decoding


def read_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return rows and columns from the frame header of JPEG data (ITU T.81, B.2.2), or None if there is none."""
    #     FFD8 | FFE0 length ... | FFDB length ... | FFC0 length, precision, rows, columns, ... | FFDA length ... | data
    #
    # FFC0 to FFCF begin a frame, except C4 (Huffman tables), C8 (reserved) and CC (arithmetic coding tables). A marker
    # may be preceded by any number of FF.
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            rows, cols = struct.unpack_from(">HH", data, at + 5)
            return rows, cols
        at += 1 if marker == 0xFF else 2 + length
    return None


def read_jpeg_2000_size(data: bytes) -> tuple[int, int] | None:
    """Return rows and columns of a JPEG 2000 code stream (ITU T.800, A.5.1), with or without enclosing boxes."""
    at = data.find(b"\xff\x4f\xff\x51")
    if at < 0 or at + 24 > len(data):
        return None
    right, bottom, left, top = struct.unpack_from(">4I", data, at + 8)
    return bottom - top, right - left


# ---- the picture of a file


TiffHandle = tuple[int, list[tuple[TiffPageReader, ...]]]
"""The descriptor of a file, and for each level its pages: one with all channels, or one per channel."""


def detect_vendor(path: Path) -> str | None:
    """Return the vendor of a slide in a TIFF file, which OpenSlide reads best; None for a file of no vendor format.

    Raises ImageError if tiles that an Aperio file lists are not in it, because it is truncated or damaged: OpenSlide
    would allocate whatever its header asks for.
    """
    with translate_errors(path), TiffFile(path) as file:
        maker = next((name for name in ("svs", "ndpi", "scn", "bif", "philips") if getattr(file, f"is_{name}")), None)
        for page in list_pages(path, file) if maker == "svs" else ():
            if page.is_tiled:
                TiffPageReader(path, page)
        return maker


def find_whole_page(path: Path) -> int | None:
    """Return the index of the page that has to be decoded whole, or None if `TiffPicture` can read the file.

    Raises ImageError if the file is no TIFF, is damaged, or holds anything but one 8-bit picture.
    """
    with translate_errors(path), TiffFile(path) as file:
        layout = find_picture(path, file)
        check_picture(path, layout)
        for page in layout.base:
            check_segment_size(path, page)
        if all(map(is_plain, layout.base)):
            return None
        if layout.number is None or len(layout.base) > 1:
            where = "in a page within a page" if layout.number is None else "one channel to a page"
            raise ImageError(
                f"{path} holds its picture {where}, and in a kind (palette, fax, turned) that is not read there. "
                "Save it as 8-bit RGB or grey."
            )
        return layout.number


class TiffPicture(FileReader[TiffHandle]):
    """The picture of a TIFF file (see `find_picture`), with the levels in its SubIFDs or other pages.

    A read decodes only the tiles or strips that it intersects; of uncompressed data it reads only the wanted bytes.
    Raises ImageError if a file holds a stack of several pictures.
    """

    def _open(self) -> tuple[TiffHandle, Sequence[Level], float | None]:
        path = self.path
        with translate_errors(path), TiffFile(path) as file:
            layout = find_picture(path, file)
            check_picture(path, layout)
            base = layout.base
            if not all(map(is_plain, base)):
                raise make_changed_error(path)
            check_stored_colours(path, base[0].tags.valueof(34675), "L" if base[0].photometric == _GREY else "RGB")
            # The levels are the SubIFDs of the base page, or other pages of the file that look like copies of it.
            #
            #     page 0  base -- SubIFD 0  1/2          page 0  base        page 1  label, other aspect ratio: no level
            #                  -- SubIFD 1  1/4          page 2  1/4         page 3  1/16
            #
            # A level has as many pages as the base: with a page per channel, each of them lists its own SubIFDs.
            named = [list_sub_pages(path, page) for page in base]  # one list of levels for each channel's page
            coarser = [group for group in zip(*named, strict=False) if group] or [(page,) for page in layout.others]
            levels = [tuple(TiffPageReader(path, page) for page in base)]
            for group in sorted(coarser, key=lambda group: -group[0].imagewidth):
                if all(map(_is_reduced_copy, group, base)) and group[0].imagewidth < levels[-1][0].shape[1]:
                    levels.append(tuple(TiffPageReader(path, page) for page in group))
        # tifffile has parsed the tags; from here on only offsets and a bare descriptor are needed.
        handle = open_descriptor(path, levels[0][0]), levels
        return handle, make_levels([planes[0].shape for planes in levels]), layout.microns_per_px

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the unit of decoding of a level: a tile or strip, or single pixels if it is uncompressed."""
        return self.handle[1][level][0].decode_block

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        (fd, levels), (height_px, width_px) = self.handle, out.shape[:2]
        planes = levels[level]
        with translate_errors(self.path):
            if [page.channels for page in planes] == [3]:  # red, green and blue: straight into the result
                planes[0].fill(fd, out, y0, x0)
                return
            channels = sum(page.channels for page in planes)
            for top, bottom in split_row_bands(y0, y0 + height_px, width_px * channels, planes[0].segment[0]):
                band = np.full((bottom - top, width_px, channels), WHITE, np.uint8)
                for number, page in enumerate(planes):
                    page.fill(fd, band[..., number : number + page.channels], top, x0)
                out[top - y0 : bottom - y0] = to_rgb(band, planes[0].alpha)


def _is_reduced_copy(page: TiffPage, base: TiffPage) -> bool:
    """Return whether a page is a reduced copy of the base: the same channels, and the same aspect ratio up to rounding.

    The label and macro images that slides contain have other aspect ratios.
    """
    alike = is_plain(page) and not page.is_mask and page.samplesperpixel == base.samplesperpixel
    if not alike or page.imagewidth >= base.imagewidth:
        return False
    scale = base.imagewidth / page.imagewidth
    return bool(page.is_tiled or page.is_reduced) and abs(base.imagelength / scale - page.imagelength) <= 2
