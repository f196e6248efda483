"""Readers of the unmodified numbers that a file stores for its pixels, as needed for masks.

A picture's numbers mean light, so a picture reader inverts them if white is 0, looks them up in a palette, composites
transparency on white and stretches few bits to 0 ... 255. The readers here do none of that. Only the position of pixels
is changed: an image with an orientation (EXIF, TIFF's Orientation) is turned upright, as pictures are.
"""

from __future__ import annotations

import math
import os
import struct
import weakref
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffFile, TiffPage

from engines.errors import ImageError, make_absolute
from engines.images.files import (
    JPEG_HEAD,
    PNG_HEAD,
    TIFF_HEADS,
    DecodeCache,
    check_budget,
    make_changed_error,
    read_head,
    translate_errors,
)
from engines.images.pillow import ORIENTATION, allow_any_size, check_decoding, map_row_bands, read_whole_file
from engines.images.tiff_layout import find_picture
from engines.images.tiff_page import DECODED, JPEG, TiffPageReader, check_segment_size, find_alpha_channel
from engines.images.zarr import is_zarr
from engines.spatial.tiles import Tile

__all__ = ["RawImage", "open_raw_image"]

Numbers = NDArray[Any]
_FAX = (2, 3, 4)
_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _MASK, _YCBCR = 0, 1, 2, 3, 4, 6
_SAVE = "Save it as a grey PNG or TIFF file, or as an (H, W) array in a .npy file, whose numbers are the classes."


class RawImage(Protocol):
    """A file of numbers, with one or more channels.

    `bits` is the number of bits of a number; as shades, fewer than 8 would be spread over 0 ... 255. `alpha` is the
    index of the alpha channel, if any. `is_indexed` is true if the numbers are indices into a palette of colours.
    """

    shape: tuple[int, int]
    bits: int
    alpha: int | None
    is_indexed: bool

    def read(self, tile: Tile) -> Numbers:
        """Return (h, w, channels) in the file's own dtype. Raises ImageError, naming the file, if it cannot be read."""


def open_raw_image(path: Path) -> RawImage:
    """Open a PNG, JPEG, TIFF or `.npy` file, recognised by its content (or the ending `.npy`), for its raw numbers.

    No pixels are decoded yet. Raises ImageError, naming the file, if its numbers cannot be obtained.
    """
    with translate_errors(path):
        if is_zarr(path):
            raise ImageError(f"{path} is a Zarr store, and masks are not read from these. {_SAVE}")
    head = read_head(path, 8)
    if path.suffix.lower() == ".npy" or head.startswith(b"\x93NUMPY"):
        return _RawNpy(path)
    if head.startswith(TIFF_HEADS):
        return _RawTiff(path)
    if head.startswith((PNG_HEAD, JPEG_HEAD)):
        return _RawPillow(path)
    raise ImageError(f"{path} is not a PNG, JPEG or TIFF file, nor a NumPy array, so it is no mask. {_SAVE}")


class _RawNpy:
    """A memory-mapped (H, W) array in a `.npy` file."""

    alpha: int | None = None
    is_indexed = False

    def __init__(self, path: Path) -> None:
        with translate_errors(path):
            values = np.load(path, mmap_mode="r", allow_pickle=False)
            if values.ndim != 2 or not values.size or values.dtype.kind not in "biuf":
                raise ImageError(f"{path} holds {values.dtype} of shape {values.shape}, but a mask is (H, W) numbers.")
        self._values, self.shape = values, (int(values.shape[0]), int(values.shape[1]))
        self.bits = 1 if values.dtype == bool else 8 * values.dtype.itemsize

    def read(self, tile: Tile) -> Numbers:
        return np.array(_cut(self._values, tile))[..., None]


class _RawPillow:
    """A PNG or JPEG file. Pillow returns the stored numbers, but spreads 2 and 4 bits of grey over 0 ... 255."""

    def __init__(self, path: Path) -> None:
        self.path = make_absolute(path)
        data = read_whole_file(path)
        with translate_errors(path), allow_any_size(), _open_bytes(data) as image:
            _check_decoding(path, image, data)
            turned = image.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
            self.shape = image.size if turned else (image.height, image.width)
            self.bits = _read_png_bits(path) if image.format == "PNG" else 8
            whole_numbers = image.mode.startswith("I")
            if self.bits > 8 and not whole_numbers:
                raise ImageError(
                    f"The mask {path} has several channels of {self.bits} bits ({image.mode}), and it is not known "
                    f"which of them are classes. {_SAVE}"
                )
            if not whole_numbers and image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
                raise ImageError(f"The mask {path} is of mode {image.mode}, whose numbers are no classes. {_SAVE}")
            self.alpha = {"LA": 1, "RGBA": 3}.get(image.mode)
            self.is_indexed = False
            if image.mode == "P":
                palette = np.array(image.getpalette("RGB"), np.int64).reshape(-1, 3).T
                self.is_indexed = not _is_grey_ramp(palette)

    def read(self, tile: Tile) -> Numbers:
        values = _WHOLE.get_pixels(self.path)
        if values.shape[:2] != self.shape:
            raise make_changed_error(self.path)
        return _cut(values, tile)


class _RawTiff:
    """A TIFF file; only the tiles or strips that intersect a rectangle are decoded."""

    def __init__(self, path: Path) -> None:
        self.path = make_absolute(path)
        with translate_errors(path), TiffFile(path) as file:
            base = find_picture(path, file).base
            for page in base:
                _check_page(path, page)
            first = base[0]
            self._pages = [TiffPageReader(path, page) for page in base]
            self._orientation = int(first.tags.valueof(ORIENTATION, 1))
            self.bits, self.alpha = int(first.bitspersample), find_alpha_channel(first)
            self.is_indexed = first.photometric == _PALETTE and not _is_grey_ramp(np.asarray(first.colormap) >> 8)
        self._channels = sum(page.channels for page in self._pages)
        rows, cols = self._pages[0].shape
        self.shape = (cols, rows) if self._orientation in (5, 6, 7, 8) else (rows, cols)
        # A bare descriptor, read by `pread`: the position is an argument, so that threads need no lock.
        with translate_errors(path):
            self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def read(self, tile: Tile) -> Numbers:
        if self._orientation in range(2, 9):
            # Hardly any mask is turned, so that a mapping of rectangles through each orientation is not worth its code.
            wanted = 2 * math.prod(self.shape) * self._channels * self._pages[0].dtype.itemsize
            check_budget(self.path, wanted, "it is turned, so that it is read all at once", "Save it upright.")
            return _cut(_apply_orientation(self._read(Tile.whole(*self._pages[0].shape)), self._orientation), tile)
        return self._read(tile)

    def _read(self, tile: Tile) -> Numbers:
        with translate_errors(self.path):
            found = np.zeros((*tile.shape, self._channels), self._pages[0].dtype)
            for number, page in enumerate(self._pages):
                part = found[..., number : number + page.channels]
                page.fill(self._fd, part, tile.rows.start, tile.cols.start)
            return found


def _cut(values: Numbers, tile: Tile) -> Numbers:
    return values[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]


def _apply_orientation(values: Numbers, orientation: int) -> Numbers:
    """Turn (H, W, ...) values upright by the file's Orientation (TIFF 6.0, p. 36)."""
    # The eight symmetries of a rectangle: 5 to 8 swap rows and columns, and each of the four corners may come first.
    turned = values.swapaxes(0, 1) if orientation in (5, 6, 7, 8) else values
    rows, cols = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return turned[:: -1 if rows else 1, :: -1 if cols else 1]


# ---- PNG and JPEG


def _open_bytes(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data), formats=("PNG", "JPEG"))


def _read_png_bits(path: Path) -> int:
    """Return the bits per channel from the header chunk of the file (PNG, 11.2.2)."""
    with path.open("rb") as file:
        (bits,) = struct.unpack(">B", file.read(25)[24:])
    return int(bits)


def _is_grey_ramp(palette: NDArray[np.integer[Any]]) -> bool:
    """Return whether a palette, (3, N), maps each index to the grey of the same number, so that indices are shades."""
    return bool((palette == np.arange(palette.shape[1])).all())


def _decode(path: Path, _page: int) -> Numbers:
    """Decode a PNG or JPEG file to (H, W, channels), upright."""
    with translate_errors(path):
        data = read_whole_file(path)
        with allow_any_size():
            image = _open_bytes(data)
            _check_decoding(path, image, data)
            orientation = int(image.getexif().get(ORIENTATION, 1))
        bits = _read_png_bits(path) if image.format == "PNG" else 8
        # Pillow has multiplied these by 255 / (2**bits - 1), a whole number: the division is exact.
        factor = 255 // ((1 << bits) - 1) if image.mode == "L" and bits in (2, 4) else 1
        values = map_row_bands(image, lambda band: np.array(band) // factor if factor > 1 else np.array(band))
        return _apply_orientation(np.atleast_3d(values), orientation)


def _check_decoding(path: Path, image: Image.Image, data: bytes) -> None:
    """Check the cost of decoding before any access that makes Pillow decode the image, such as `getexif`."""
    bytes_per_pixel = np.dtype(np.int32).itemsize if image.mode == "I" else len(image.getbands())
    check_decoding(path, image, data, bytes_per_pixel)


_WHOLE = DecodeCache(_decode)


# ---- TIFF


def _check_page(path: Path, page: TiffPage) -> None:
    check_segment_size(path, page)
    kind = np.dtype(page.dtype).kind if page.dtype else ""
    if not isinstance(page.bitspersample, int) or kind not in tuple("biuf") or page.imagedepth != 1:
        raise ImageError(f"The mask {path} holds no plain numbers, one for each pixel. {_SAVE}")
    if page.compression in _FAX:
        raise ImageError(
            f"The mask {path} is compressed as a fax is, for which programs differ in whether ink is 0 or 1. {_SAVE}"
        )
    if page.compression not in DECODED:
        raise ImageError(f"The mask {path} is compressed in a way that is not read here ({page.compression}). {_SAVE}")
    decoded_to_rgb = page.photometric == _YCBCR and page.compression == JPEG
    if page.photometric not in (_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _MASK) and not decoded_to_rgb:
        raise ImageError(f"The mask {path} holds colours of another kind than RGB ({page.photometric}). {_SAVE}")
