"""Masks, which give the class of each pixel: the unmodified numbers that a file stores, read by rectangles.

A picture's numbers mean light, so a picture reader inverts them if white is 0, looks them up in a palette, composites
transparency on white and stretches few bits to 0 ... 255. The readers here do none of that. Only the position of pixels
is changed: an image with an orientation (EXIF, TIFF's Orientation) is turned upright, as pictures are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tifffile import TiffPage

from mpi4dl_nb.engines.errors import ImageError, make_absolute
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import IGNORED
from mpi4dl_nb.engines.images.files import FileCache, make_changed_error, read_head, translate_errors
from mpi4dl_nb.engines.images.foreign_formats import describe_format
from mpi4dl_nb.engines.images.orientation import ORIENTATION, SWAPPED, turn_upright
from mpi4dl_nb.engines.images.pillow import (
    KEPT_BYTES,
    allow_any_size,
    check_decoding,
    map_row_bands,
    read_header,
    read_whole_file,
)
from mpi4dl_nb.engines.images.regular_file import JPEG_HEAD, PNG_HEAD, TIFF_HEADS
from mpi4dl_nb.engines.images.tiff_colours import read_palette
from mpi4dl_nb.engines.images.tiff_layout import (
    DECODED,
    JPEG,
    JPEG_2000,
    check_predictor,
    find_alpha_channel,
    open_layout,
)
from mpi4dl_nb.engines.images.tiff_page import Descriptor, TiffPageReader, check_segment_size
from mpi4dl_nb.engines.images.zarr import is_zarr

Numbers = NDArray[Any]

Ignore = int | Iterable[int] | None
"""The numbers in a mask that are no class, such as 255 for void: one, several or none."""

_NEARLY_GREY = 16  # the most that channels of a grey mask may differ after it was saved as a colour JPEG


class MaskFile:
    """A mask in a picture file (grey or with a palette), or an (H, W) array in a `.npy` file.

    The stored numbers are the classes, from 0 to `classes` - 1; palette colours, white-is-zero and transparency do not
    change them. Numbers in `ignore` become `IGNORED`. With a `threshold`, numbers above it are class 1 and all others
    class 0, so that a mask can be a JPEG, which does not preserve numbers exactly. Numbers of 1, 2 or 4 bits are spread
    over 0 ... 255 before the comparison with the threshold.
    Raises ImageError, naming the file, if it cannot be read, has a palette of colours and a threshold, or is a JPEG
    without a threshold or with ignored numbers.
    """

    def __init__(self, path: Path, classes: int, threshold: int | None = None, ignore: Ignore = None) -> None:
        self.path, self.classes, self.threshold = path, classes, threshold
        self.ignore = parse_ignored_numbers(ignore)
        self._source = _open_mask(path)
        if threshold is not None and self._source.is_indexed:
            raise ImageError(
                f"The mask {path} has a palette: its numbers are places in a list of colours, for which a threshold of "
                "shades means nothing. Leave the threshold away and say how many classes there are (classes=), or "
                "save the mask as grey."
            )
        if threshold is not None and self._source.bits <= 8 and threshold >= 255:
            raise ImageError(
                f"The mask {path} holds numbers up to 255, none of which is above threshold={threshold}: all pixels "
                "would be of class 0. Give a lower threshold, such as 127."
            )
        # Around an edge between classes 0 and 2, a JPEG has ones: a valid class, so that no number would be refused.
        if self._source.is_lossy and (threshold is None or self.ignore):
            raise ImageError(
                f"The mask {path} is compressed as JPEG or JPEG 2000, which changes numbers a little: they are neither "
                "exact classes nor exact numbers to ignore (ignore=). Export it anew as a PNG or TIFF file; or, if its "
                "shades are two classes, give threshold=127 and no ignore."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self._source.shape

    def read(self, tile: Tile) -> NDArray[np.int64]:
        """Return the classes of a tile, (h, w). Raises ImageError, naming file and pixel, if a number is no class."""
        # Turned masks are views with a negative stride, and NumPy before 2.3 crashes when it compares bytes of such a
        # view with a number that no byte has.
        mask = np.ascontiguousarray(self._select_channel(self._source.read(tile), tile))
        self._check_validity(tile)
        ignored = np.isin(mask, self.ignore)
        if self.threshold is not None:
            # A threshold is a shade from 0 to 255, so that a mask saved with 1, 2 or 4 bits means the same.
            bits = self._source.bits
            shades = mask.astype(np.int64) * (255 // ((1 << bits) - 1)) if bits in (1, 2, 4) else mask
            mask = np.where(np.isnan(mask), mask, shades > self.threshold)
        valid = (mask >= 0) & (mask < self.classes) & (mask == np.floor(mask))  # every comparison with NaN is false
        if not (valid | ignored).all():
            row, col = np.argwhere(~(valid | ignored))[0]
            raise ImageError(
                f"The mask {self.path} holds {mask[row, col]:g} at {_describe_pixel(tile, row, col)}, which is no "
                f"class: there are {self.classes}, numbered from 0. Mend the mask, say which number means that a pixel "
                "has no class (ignore=), or give a threshold where its numbers are shades."
            )
        return np.where(ignored, IGNORED, np.where(ignored, 0, mask).astype(np.int64))

    def _check_validity(self, tile: Tile) -> None:
        """Raise ImageError if a mask within the file says that there are no pixels here."""
        valid = self._source.read_validity(tile) if self._source.read_validity else np.ones(1)
        if not valid.all():
            row, col = np.argwhere(valid == 0)[0][:2]
            raise ImageError(
                f"The mask {self.path} has no pixel at {_describe_pixel(tile, row, col)}, as a transparency mask in it "
                "says, and it is not known which class that is. Burn it in as a number and give that as ignore=: "
                "gdal_translate -mask none IN OUT.tif, after gdal_calc or rasterio has set these pixels."
            )

    def _select_channel(self, numbers: Numbers, tile: Tile) -> Numbers:
        """Select the channel of classes: (h, w, channels) -> (h, w). Raises ImageError if that is ambiguous."""
        # Programs that save grey as RGB or RGBA lose nothing: the three channels are equal, and all is opaque. Anything
        # else has lost the class numbers, and a guess would train on wrong labels without a sign of it.
        channel = self._source.alpha
        if channel is not None:
            alpha = numbers[..., channel]
            full = np.iinfo(alpha.dtype).max if alpha.dtype.kind in "iu" else 1
            if (alpha != full).any():
                row, col = np.argwhere(alpha != full)[0]
                raise ImageError(
                    f"The mask {self.path} is transparent at {_describe_pixel(tile, row, col)}, and it is not known "
                    "which class that is. Save it as grey; if what is opaque is class 1, save its alpha channel alone, "
                    "by PIL.Image.open(...).getchannel('A').save(...), and give threshold=127."
                )
            numbers = np.delete(numbers, channel, axis=2)
        if numbers.shape[2] not in (1, 3):
            raise ImageError(
                f"The mask {self.path} has {numbers.shape[2]} channels, and it is not known which of them holds the "
                "classes. Save that one by itself."
            )
        if numbers.shape[2] == 1:
            return numbers[..., 0]
        # With a threshold, channels may also differ by up to `_NEARLY_GREY`, or be all three on the same side of it.
        low, high = numbers.min(2), numbers.max(2)
        odd = low != high
        if self.threshold is not None:
            far = high.astype(np.float64) - low > _NEARLY_GREY
            odd = far & ((low > self.threshold) != (high > self.threshold))
        if odd.any():
            row, col = np.argwhere(odd)[0]
            raise ImageError(
                f"The mask {self.path} is coloured, {tuple(numbers[row, col].tolist())} at "
                f"{_describe_pixel(tile, row, col)}, and it is not known which class a colour is. Save it as grey, or "
                "with a palette, so that numbers are classes."
            )
        return numbers[..., 0] if self.threshold is None else numbers.sum(2, dtype=np.float64) // 3


def parse_ignored_numbers(ignore: Ignore) -> tuple[int, ...]:
    """Return the ignored numbers as a tuple. Raises ImageError if they are not integers.

    >>> parse_ignored_numbers(None), parse_ignored_numbers(255), parse_ignored_numbers([254, 255])
    ((), (255,), (254, 255))
    """
    ignored = () if ignore is None else ignore if isinstance(ignore, Iterable) else (ignore,)
    try:
        return tuple(map(operator.index, ignored))
    except TypeError:
        raise ImageError(f"ignore={ignore!r} must be a whole number of the masks, such as 255, or several.") from None


def read_mask_shape(path: Path) -> tuple[int, int]:
    """Return a mask's height and width in pixels. Raises ImageError, naming the file, if it is no mask."""
    return _open_mask(path).shape


def _describe_pixel(tile: Tile, row: int, col: int) -> str:
    return f"row {tile.rows.start + row}, column {tile.cols.start + col}"


# The numbers that a file stores for its pixels.


_FAX = (2, 3, 4)
_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _MASK, _YCBCR = 0, 1, 2, 3, 4, 6
_SAVE = "Save it as a grey PNG or TIFF file, or as an (H, W) array in a .npy file, whose numbers are the classes."


@dataclass(frozen=True, eq=False)
class RawImage:
    """A file of numbers, with one or more channels; `read` returns a tile of them, (h, w, channels), in their own type.

    `shape` is in pixels. `bits` is the number of bits of a number; as shades, fewer than 8 would be spread over
    0 ... 255. `alpha` is the index of the alpha channel, if any. `is_indexed` is true if the numbers are indices into a
    palette of colours, and `is_lossy` if the compression may have changed them. `read_validity` reads the transparency
    mask within a TIFF file, which is 0 where there are no pixels.
    """

    shape: tuple[int, int]
    bits: int
    read: Callable[[Tile], Numbers]
    alpha: int | None = None
    is_indexed: bool = False
    is_lossy: bool = False
    read_validity: Callable[[Tile], Numbers] | None = None


def open_raw_image(path: Path) -> RawImage:
    """Open a PNG, JPEG, TIFF or `.npy` file, recognised by its content (or the ending `.npy`), for its raw numbers.

    No pixels are decoded yet. Raises ImageError, naming the file, if its numbers cannot be obtained.
    """
    if is_zarr(path):
        raise ImageError(f"{path} is a Zarr store, and masks are not read from these. {_SAVE}")
    head = read_head(path, 8)
    if path.suffix.lower() == ".npy" or head.startswith(b"\x93NUMPY"):
        with translate_errors(path):
            values = np.load(path, mmap_mode="r", allow_pickle=False)
            if values.ndim != 2 or not values.size or values.dtype.kind not in "biuf":
                raise ImageError(f"{path} holds {values.dtype} of shape {values.shape}, but a mask is (H, W) numbers.")
        bits = 1 if values.dtype == bool else 8 * values.dtype.itemsize
        return RawImage(values.shape, bits, lambda tile: np.array(_cut(values, tile))[..., None])
    if head.startswith(TIFF_HEADS):
        return _open_tiff(path)
    if head.startswith((PNG_HEAD, JPEG_HEAD)):
        return _open_whole(path)
    what, _ = describe_format(path)
    raise ImageError(f"{path} is not a PNG, JPEG or TIFF file, nor a NumPy array, so it is no mask: {what} {_SAVE}")


_open_mask: FileCache[RawImage] = FileCache(open_raw_image)


def _open_whole(path: Path) -> RawImage:
    """Open a PNG or JPEG file."""
    path = make_absolute(path)
    with translate_errors(path):
        image, bits, orientation = _open_checked(path)
        shape = image.size if orientation in SWAPPED else image.size[::-1]
        whole_numbers = image.mode.startswith("I")
        if bits > 8 and not whole_numbers:
            raise ImageError(
                f"The mask {path} has several channels of {bits} bits ({image.mode}), and it is not known "
                f"which of them are classes. {_SAVE}"
            )
        if not whole_numbers and image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
            raise ImageError(f"The mask {path} is of mode {image.mode}, whose numbers are no classes. {_SAVE}")
        palette = np.array(image.getpalette("RGB") if image.mode == "P" else [], np.int64).reshape(-1, 3).T
        alpha, is_lossy = {"LA": 1, "RGBA": 3}.get(image.mode), image.format != "PNG"

    def read(tile: Tile) -> Numbers:
        values = _WHOLE(path)
        if values.shape[:2] != shape:
            raise make_changed_error(path)
        return _cut(values, tile)

    return RawImage(shape, bits, read, alpha, not _is_grey_ramp(palette), is_lossy)


def _open_checked(path: Path) -> tuple[Image.Image, int, int]:
    """Return a PNG or JPEG image that is not decoded yet, its bits per channel, and its orientation."""
    data = read_whole_file(path)
    with allow_any_size():
        image = read_header(path, data)
        # The cost is checked before any access that makes Pillow decode the image, such as `getexif`.
        bytes_per_pixel = np.dtype(np.int32).itemsize if image.mode == "I" else len(image.getbands())
        check_decoding(path, image, data, bytes_per_pixel)
        bits = data[24] if image.format == "PNG" else 8  # in the header chunk (PNG, 11.2.2)
        return image, bits, int(image.getexif().get(ORIENTATION, 1))


def _decode(path: Path) -> Numbers:
    """Decode a PNG or JPEG file to (H, W, channels), upright."""
    with translate_errors(path):
        image, bits, orientation = _open_checked(path)
        # Pillow spreads 2 and 4 bits of grey over 0 ... 255. It has multiplied them by 255 / (2**bits - 1), a whole
        # number: the division is exact.
        factor = 255 // ((1 << bits) - 1) if image.mode == "L" and bits in (2, 4) else 1
        values = map_row_bands(image, lambda band: np.array(band) // factor if factor > 1 else np.array(band))
        return turn_upright(np.atleast_3d(values), orientation)


_WHOLE = FileCache(_decode, operator.attrgetter("nbytes"), KEPT_BYTES)


def _open_tiff(path: Path) -> RawImage:
    """Open a TIFF file; only the tiles or strips that intersect a rectangle are decoded."""
    path = make_absolute(path)
    with open_layout(path) as layout:
        for page in layout.base:
            _check_page(path, page)
        first = layout.base[0]
        files = {path: Descriptor(path) for path in set(layout.paths)}
        pages = [TiffPageReader(path, page, files[path]) for path, page in zip(layout.paths, layout.base, strict=True)]
        alpha = find_alpha_channel(first)
        is_indexed = first.photometric == _PALETTE and not _is_grey_ramp(read_palette(first).T.astype(np.int64))
        is_lossy = first.compression in (JPEG, *JPEG_2000)
        validity = layout.validity and TiffPageReader(path, layout.validity, files[path], first)

    def read(tile: Tile, pages: Sequence[TiffPageReader] = pages) -> Numbers:
        with translate_errors(path):
            numbers = np.empty((*tile.shape, sum(page.channels for page in pages)), pages[0].dtype)
            for index, page in enumerate(pages):
                page.fill(numbers[..., index : index + page.channels], tile.rows.start, tile.cols.start)
            return numbers

    read_validity = None if validity is None else partial(read, pages=[validity])
    return RawImage(pages[0].shape, int(first.bitspersample), read, alpha, is_indexed, is_lossy, read_validity)


def _check_page(path: Path, page: TiffPage) -> None:
    check_segment_size(path, page)
    check_predictor(path, page)
    kind = np.dtype(page.dtype).kind if page.dtype else ""
    if np.ndim(page.bitspersample) or kind not in tuple("biuf") or page.imagedepth != 1:
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


def _cut(values: Numbers, tile: Tile) -> Numbers:
    return values[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]


def _is_grey_ramp(palette: NDArray[np.integer[Any]]) -> bool:
    """Return whether a palette, (3, N), maps each index to the grey of the same number, so that indices are shades."""
    return bool((palette == np.arange(palette.shape[1])).all())
