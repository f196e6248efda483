"""Reader of PNG and JPEG files, and of rare kinds of TIFF, through Pillow: each file is decoded whole, once."""

from __future__ import annotations

import os
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from engines.errors import ImageError
from engines.images.files import (
    PIXELS_PER_BYTE,
    FileCache,
    FileReader,
    check_budget,
    check_size,
    translate_errors,
)
from engines.images.picture_reader import Level, Pixels, composite_on_white, split_row_bands
from engines.images.regular_file import open_regular

_GREY, _COLOUR = ("1", "L"), ("P", "RGB", "YCbCr")
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_EXTRA_SAMPLES = 338
ORIENTATION = 0x0112  # the tag of EXIF and TIFF
KEPT_BYTES = 1 << 26  # of decoded files that a cache keeps alive by itself: readers keep a larger array themselves
MOST_SCANS = 32  # of a progressive picture: programs write about 10, and a decoder visits every block in every scan
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # a marker that ends a scan: no stuffed 0, restart or padding
_SCAN, _END = 0xDA, 0xD9
TILED = "Save it as a TIFF file in tiles, which is read tile by tile (such as `vips copy IN OUT.tif[tile,pyramid]`)."
_HOLDS = {"CMYK": "printing inks", "F": "floating-point numbers", "I": "integers of more than 8 bits"}


class PillowPicture(FileReader[Pixels]):
    """A file that can only be decoded whole. Its pixels are cached and shared by all readers of the file.

    `page` is the index of the TIFF page that holds the picture. Raises ImageError, naming the file and the reason, if
    the file is damaged or of an unsupported kind.
    """

    def __init__(self, path: Path, page: int = 0) -> None:
        self.page = page
        super().__init__(path)

    def _open(self) -> tuple[Pixels, Sequence[Level], float | None]:
        pixels = _DECODED(self.path, self.page)
        return pixels, [Level(*pixels.shape[:2])], None

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        out[:] = self.handle[y0 : y0 + out.shape[0], x0 : x0 + out.shape[1]]


_SETTINGS = threading.Lock()  # Pillow's limit and Python's warning filters are process-wide


@contextmanager
def allow_any_size() -> Iterator[None]:
    """Disable Pillow's size limit and warnings: it takes 180 million pixels for an attack, but ours may be large.

    What Pillow warns of (a damaged EXIF block, a short read) either leads to an error or loses no pixels.
    """
    with _SETTINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _decode(path: Path, page: int) -> Pixels:
    with translate_errors(path):
        data = read_whole_file(path)
        with allow_any_size():
            try:
                image = Image.open(BytesIO(data), formats=("PNG", "JPEG", "TIFF"))
            except UnidentifiedImageError:
                raise ImageError(f"{path} is not a PNG, JPEG or TIFF picture that can be read.") from None
            if page:
                image.seek(page)
            # The order matters: both checks look at the header only, and come before `getexif`, which for a PNG decodes
            # the image. The latter is called for its side effect: it may warn, which is switched off here.
            _check_mode(path, image)
            check_decoding(path, image, data, 3)
            image.getexif()
            if image.format == "TIFF":
                image.load()  # Pillow inspects the tags, and warns, only now
        # Outside of the lock, so that other threads do not wait.
        alpha = image.mode in _WITH_ALPHA
        if isinstance(image, TiffImageFile):
            # Pillow takes any fourth channel of a TIFF file for alpha, but only the ExtraSamples tag makes it that.
            alpha = alpha and bool({1, 2} & set(image.tag_v2.get(_EXTRA_SAMPLES, ())))
        else:
            alpha = alpha or "transparency" in image.info
        ImageOps.exif_transpose(image, in_place=True)
        if alpha:
            return map_row_bands(image, lambda band: composite_on_white(np.array(band.convert("RGBA"))))
        return map_row_bands(image, lambda band: np.array(band.convert("RGB")))


def is_animated(image: Image.Image) -> bool:
    """Return whether a PNG image is an animation. (Further pictures in a JPEG are previews or depths of the first.)"""
    return image.format == "PNG" and bool(getattr(image, "is_animated", False))


def find_orientation(image: Image.Image, file: BinaryIO) -> int | None:
    """Return the EXIF orientation of the PNG or JPEG image in `file` from its header, without decoding it.

    Returns None for a PNG whose orientation may be stored after its pixels.
    """
    # For a PNG, Pillow's `getexif` decodes all pixels to reach the chunks after them.
    if image.format == "PNG" and "exif" not in image.info and _has_late_text(file):
        return None
    return int(Image.Image.getexif(image).get(ORIENTATION, 1))


def _has_late_text(file: BinaryIO) -> bool:
    """Return whether chunks after the pixels of a PNG file may hold its orientation."""
    file.seek(8)  # after the signature
    after = False
    while len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"IEND":
            break
        after |= kind == b"IDAT"
        if after and kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            return True
        file.seek(length + 4, os.SEEK_CUR)  # a checksum follows
    return False


def read_whole_file(path: Path) -> bytes:
    """Return a file's bytes. From these, unlike from a file, a decoder never allocates more than there are.

    Raises ImageError if the file is larger than may be read at once.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_budget(path, size, f"it has {size:,} bytes and is read whole", TILED)
        return file.read()


def check_decoding(path: Path, image: Image.Image, data: bytes, result_bytes: int) -> None:
    """Raise ImageError if decoding an image to `result_bytes` per pixel would take too much time or memory.

    An animation is refused too. Pillow holds one byte per grey pixel and four per colour pixel; libjpeg six more for
    progressive files; libtiff a strip or a tile, which may be the whole image.
    """
    if is_animated(image):
        raise ImageError(f"{path} is an animation of several pictures. Save the one you want by itself.")
    rows, cols = image.height, image.width
    # The most pixels that a format stores per byte of file. JPEG needs at least a bit per block of 8 x 8 (T.81, F.1.2);
    # deflate, in a PNG, packs 258 bytes into 2 bits (RFC 1951).
    bands, per_byte = len(image.getbands()), PIXELS_PER_BYTE
    if image.format == "JPEG":
        per_byte = 8 * 64
    elif image.format == "PNG":
        per_byte = 1032 // bands if bands > 1 else 8 * 1032  # one band may have 1 bit per pixel
    check_size(path, rows, cols, per_byte)
    if image.format == "JPEG" and (scans := count_jpeg_scans(data)) > MOST_SCANS:
        raise ImageError(f"{path} has more than {scans - 1} scans, where a JPEG picture has about 10. Save it again.")
    held = 1 if image.mode in ("1", "L", "P") else 4
    more = {"TIFF": held, "JPEG": 6 if image.info.get("progressive") else 0}.get(str(image.format), 0)
    # `getexif` would decode a PNG, so a PNG always counts as if it had to be turned.
    turned = held if image.format == "PNG" or image.getexif().get(ORIENTATION, 1) != 1 else 0
    wanted = len(data) + rows * cols * (held + more + turned + result_bytes)
    check_budget(path, wanted, f"its {rows} x {cols} px can only be decoded all at once", TILED)


def count_jpeg_scans(data: bytes) -> int:
    """Count the scans of JPEG data (ITU T.81, B.2.3), at most up to `MOST_SCANS` + 1."""
    # Data of a scan have no length: its end is the next marker. FF in data is followed by a stuffed 0, or by a restart
    # marker (D0 to D7), neither of which ends it.
    at, scans = 2, 0
    while scans <= MOST_SCANS and (found := _MARKER.search(data, at)) and found.end() + 2 <= len(data):
        marker, at = data[found.end() - 1], found.end()
        if marker == _END:
            break
        scans += marker == _SCAN
        (length,) = struct.unpack_from(">H", data, at)
        at += length
    return scans


def _check_mode(path: Path, image: Image.Image) -> None:
    """Raise ImageError for an unsupported mode.

    Pillow silently drops the low bytes of 16-bit colours; only the raw mode of its decoder shows this.
    """
    stored = str([part[3] for part in image.tile])
    if ";16" in stored or image.mode.startswith("I;16"):
        raise ImageError(
            f"{path} has 16 bits per channel, and pictures here have 8. Scale it to 0 ... 255 first, "
            "for instance by skimage.util.img_as_ubyte, and pass the array."
        )
    if image.mode not in (*_GREY, *_COLOUR, *_WITH_ALPHA):
        holds = _HOLDS.get(image.mode, "colours of another kind")
        raise ImageError(
            f"{path} is of mode {image.mode} ({holds}). Convert it to 8-bit RGB or grey and save it again."
        )


def map_row_bands(image: Image.Image, read: Callable[[Image.Image], NDArray[Any]]) -> NDArray[Any]:
    """Return the read-only array that `read` makes of an image.

    It is converted band by band to avoid a second copy of the whole, and shared by all readers of a file.
    """
    found = None
    for top, bottom in split_row_bands(0, image.height, 4 * image.width):
        band = read(image.crop((0, top, image.width, bottom)))
        if found is None:
            found = np.empty((image.height, *band.shape[1:]), band.dtype)
        found[top:bottom] = band
    if found is None:
        raise ValueError(f"it has {image.height} x {image.width} px")
    found.flags.writeable = False
    return found


_DECODED = FileCache(_decode, attrgetter("nbytes"), KEPT_BYTES)
