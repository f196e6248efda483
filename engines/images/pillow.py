"""Reader of PNG and JPEG files, and of rare kinds of TIFF, through Pillow: each file is decoded whole, once."""

from __future__ import annotations

import os
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from mpi4dl_nb.engines.errors import AS_TENSORS, ImageError
from mpi4dl_nb.engines.images.colour_profile import Transform, find_conversion, warn_of_colours
from mpi4dl_nb.engines.images.files import (
    PIXELS_PER_BYTE,
    FileCache,
    FileReader,
    check_budget,
    check_size,
    make_damaged_error,
    translate_errors,
)
from mpi4dl_nb.engines.images.jpeg_frame import read_frame
from mpi4dl_nb.engines.images.orientation import ORIENTATION
from mpi4dl_nb.engines.images.picture_reader import Level, Pixels, composite_on_white, split_row_bands
from mpi4dl_nb.engines.images.png_chunks import find_other_colours, find_transparent_shade, has_late_text
from mpi4dl_nb.engines.images.regular_file import JPEG_HEAD, open_regular

_GREY, _COLOUR, INKS = ("1", "L"), ("P", "RGB", "YCbCr"), "CMYK"
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_EXTRA_SAMPLES = 338
KEPT_BYTES = 1 << 26  # of decoded files that a cache keeps alive by itself: readers keep a larger array themselves
MOST_SCANS = 32  # of a progressive picture: programs write about 10, and a decoder visits every block in every scan
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # a marker that ends a scan: no stuffed 0, restart or padding
_SCAN, _END = 0xDA, 0xD9
TILED = "Save it as a TIFF file in tiles, which is read tile by tile (such as `vips copy IN OUT.tif[tile,pyramid]`)."
_CONVERT = "Convert it to 8-bit RGB or grey and save it again."
_COLOUR_MAP = 320
_EXIF, _INTEROPERABILITY, _COLOUR_SPACE, _ADOBE_RGB = 0x8769, 0xA005, 0xA001, 2  # tags of EXIF, and a value
_HOLDS = {INKS: "printing inks", "F": "floating-point numbers", "I": "integers of more than 8 bits"}


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
        # Of grey, one channel is kept: a page that packs well may have many pixels.
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
    """Decode a file to (H, W, 3), or (H, W, 1) if it is grey, upright and on white."""
    with translate_errors(path):
        data = read_whole_file(path)
        with allow_any_size():
            image = read_header(path, data)
            if page:
                image.seek(page)
            # The order matters: these checks look at the header only, and come before `getexif`, which for a PNG
            # decodes the image. The latter is called for its side effect: it may warn, which is switched off here.
            check_mode(path, image)
            alpha = _set_transparency(image, data)
            channels = 1 if image.mode in _GREY and not alpha else 3
            check_decoding(path, image, data, channels)
            entries = len(image.palette.palette) // 3 if image.format == "PNG" and image.palette else 256
            stated = find_stated_colours(image, BytesIO(data))
            image.getexif()
            if image.format == "TIFF":
                image.load()  # Pillow inspects the tags, and warns, only now
                _set_palette_bits(image)
        # Outside of the lock, so that other threads do not wait, and so that the warning is heard.
        conversion = choose_conversion(path, image, stated)
        ImageOps.exif_transpose(image, in_place=True)

        def read(band: Image.Image) -> Pixels:
            if band.mode == "P" and (most := int(np.asarray(band).max())) >= entries:
                raise make_damaged_error(path, f"a pixel has colour {most} of a palette of {entries}")
            if channels == 1:
                return np.array(band.convert("L"))[..., None]
            if alpha:
                return composite_on_white(np.array(_convert(band.convert("RGBA"), conversion)))
            return np.array(_convert(band, conversion).convert("RGB"))

        return map_row_bands(image, read)


def read_header(path: Path, data: bytes) -> ImageFile.ImageFile:
    """Return the image in a file's bytes, not decoded yet. Raises ImageError if it is of a kind that is not read."""
    if is_apple_png(data):
        raise ImageError(f"{path} is Apple's variant of PNG (CgBI), which is not read here. Save it as a PNG file.")
    with suppress(UnidentifiedImageError):
        return Image.open(BytesIO(data), formats=("PNG", "JPEG", "TIFF"))
    frame = read_frame(data) if data.startswith(JPEG_HEAD) else None
    if frame and frame.bits != 8:
        raise make_depth_error(path, frame.bits)
    if frame and (frame.channels not in (1, 3, 4) or frame.mode not in ("baseline", "extended", "progressive")):
        raise ImageError(
            f"{path} is a JPEG file of the kind {frame.mode} with {frame.channels} channels, which is not read here. "
            "Save it as a PNG or TIFF file."
        )
    raise ImageError(f"{path} is not a PNG, JPEG or TIFF picture that can be read.")


def is_apple_png(head: bytes) -> bool:
    """Return whether a file begins with a chunk CgBI, after which channels and packing are others than those of PNG."""
    return head[12:16] == b"CgBI"


def find_stated_colours(image: Image.Image, file: BinaryIO) -> str | None:
    """Return what says, besides an ICC profile, that an image has other colours than those of sRGB; None if nothing.

    Only the header of `file` is read.
    """
    if image.format == "PNG":
        return find_other_colours(file)
    if is_jpeg(image) and "icc_profile" not in image.info:
        with suppress(Exception):  # damaged EXIF data change no pixel
            exif = image.getexif()
            is_adobe = exif.get_ifd(_EXIF).get(_COLOUR_SPACE) == _ADOBE_RGB
            if is_adobe or str(exif.get_ifd(_INTEROPERABILITY).get(1)).startswith("R03"):
                return "its EXIF ColorSpace (Adobe RGB)"
    return None


def choose_conversion(path: Path, image: Image.Image, stated: str | None) -> Transform | None:
    """Return the conversion to sRGB of an image whose numbers are no colours by themselves, else None.

    Warns of colours, such as those that are `stated`, which are not applied; see `engines/images/colour_profile.py`.
    Raises ImageError if the numbers are inks, and it is not known which.
    """
    if stated and image.mode != INKS:
        warn_of_colours(path, stated)
        return None
    mode = "L" if image.mode in (*_GREY, "LA", "La") else image.mode if image.mode == INKS else "RGB"
    conversion = find_conversion(path, image.info.get("icc_profile"), mode)
    if mode == INKS and (conversion is None or "adobe" not in image.info):
        lacks = "no colour profile for them" if conversion is None else "no Adobe marker that says how they are stored"
        raise ImageError(f"{path} is of mode CMYK (printing inks), and has {lacks}. {_CONVERT}")
    return conversion


def _convert(image: Image.Image, conversion: Transform | None) -> Image.Image:
    """Convert the colours of an image, and keep its transparency."""
    if conversion is None:
        return image
    if image.mode == INKS:
        return conversion.apply(image)
    converted = conversion.apply(image.convert("RGB"))
    if image.mode == "RGBA":
        converted.putalpha(image.getchannel("A"))
    return converted


def _set_transparency(image: Image.Image, data: bytes) -> bool:
    """Return whether an image has transparent pixels, and set the transparent shade of a grey PNG image."""
    if isinstance(image, TiffImageFile):
        # Pillow takes any fourth channel of a TIFF file for alpha, but only the ExtraSamples tag makes it that.
        return image.mode in _WITH_ALPHA and bool({1, 2} & set(image.tag_v2.get(_EXTRA_SAMPLES, ())))
    if image.format == "PNG" and image.mode in _GREY and "transparency" in image.info:
        # The file counts it in its own bits. Pillow spreads the pixels over 0 ... 255, and leaves it as it is.
        shade = find_transparent_shade(BytesIO(data), bits=data[24])
        image.info["transparency"] = image.info["transparency"] if shade is None else shade
    return image.mode in _WITH_ALPHA or "transparency" in image.info


def _set_palette_bits(image: Image.Image) -> None:
    """Take the palette of a TIFF image for one of 8 bits if no number in it is larger.

    Numbers have 16 bits (TIFF 6.0, p. 23), of which Pillow takes the upper 8. Programs have written 8; libtiff tells
    the two apart in the same way.
    """
    if image.mode == "P" and isinstance(image, TiffImageFile):
        colours = to_8_bit_colours(np.array(image.tag_v2[_COLOUR_MAP], np.uint16).reshape(3, -1))
        image.putpalette(colours.T.tobytes())


def to_8_bit_colours(colour_map: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return the colours of a TIFF palette (3, N) in 8 bits, whether it has 16 bits or 8.

    >>> to_8_bit_colours(np.array([0, 255, 17])).tolist(), to_8_bit_colours(np.array([0, 65535, 4369])).tolist()
    ([0, 255, 17], [0, 255, 17])
    """
    return (colour_map if np.max(colour_map) < 256 else colour_map >> 8).astype(np.uint8)


def is_animated(image: Image.Image) -> bool:
    """Return whether a PNG image is an animation. (Further pictures in a JPEG are previews or depths of the first.)"""
    return image.format == "PNG" and bool(getattr(image, "is_animated", False))


def find_orientation(image: Image.Image, file: BinaryIO) -> int | None:
    """Return the EXIF orientation of the PNG or JPEG image in `file` from its header, without decoding it.

    Returns None for a PNG whose orientation may be stored after its pixels.
    """
    # For a PNG, Pillow's `getexif` decodes all pixels to reach the chunks after them.
    if image.format == "PNG" and "exif" not in image.info and has_late_text(file):
        return None
    return int(Image.Image.getexif(image).get(ORIENTATION, 1))


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
    if is_jpeg(image):
        per_byte = 8 * 64
    elif image.format == "PNG":
        per_byte = 1032 // bands if bands > 1 else 8 * 1032  # one band may have 1 bit per pixel
    check_size(path, rows, cols, per_byte)
    if is_jpeg(image) and (scans := count_jpeg_scans(data)) > MOST_SCANS:
        raise ImageError(f"{path} has more than {scans - 1} scans, where a JPEG picture has about 10. Save it again.")
    held = 1 if image.mode in ("1", "L", "P") else 4
    more = held if image.format == "TIFF" else 6 if is_jpeg(image) and image.info.get("progressive") else 0
    # A PNG whose orientation may come after its pixels counts as if it had to be turned.
    turned = held if find_orientation(image, BytesIO(data)) != 1 else 0
    wanted = len(data) + rows * cols * (held + more + turned + result_bytes)
    check_budget(path, wanted, f"its {rows} x {cols} px can only be decoded all at once", TILED)


def count_jpeg_scans(data: bytes) -> int:
    """Count the scans of JPEG data (ITU T.81, B.2.3), at most up to `MOST_SCANS` + 1."""
    # Data of a scan have no length: its end is the next marker. FF in data is followed by a stuffed 0, or by a restart
    # marker (D0 to D7), neither of which ends it.
    at, scans = 2, 0
    while scans <= MOST_SCANS and (match := _MARKER.search(data, at)) and match.end() + 2 <= len(data):
        marker, at = data[match.end() - 1], match.end()
        if marker == _END:
            break
        scans += marker == _SCAN
        (length,) = struct.unpack_from(">H", data, at)
        at += length
    return scans


def make_depth_error(path: Path, bits: int) -> ImageError:
    """Build the error for a picture of more than 8 bits per channel."""
    return ImageError(
        f"{path} has {bits} bits per channel, and pictures here have 8. Scale it to 0 ... 255 first, "
        f"for instance by skimage.util.img_as_ubyte, and pass the array. {AS_TENSORS}"
    )


def check_mode(path: Path, image: ImageFile.ImageFile) -> None:
    """Raise ImageError for an unsupported mode; only the header is looked at.

    Pillow silently drops the low bytes of 16-bit colours; only the raw mode of its decoder shows this.
    """
    stored = str([part[3] for part in image.tile])
    if ";16" in stored or image.mode.startswith("I;16"):
        raise make_depth_error(path, 16)
    known = (*_GREY, *_COLOUR, *_WITH_ALPHA, *([INKS] if is_jpeg(image) else []))
    if image.mode not in known:
        holds = _HOLDS.get(image.mode, "colours of another kind")
        raise ImageError(f"{path} is of mode {image.mode} ({holds}). {_CONVERT}")


def is_jpeg(image: Image.Image) -> bool:
    """Return whether an image is a JPEG file. (Pillow names one with further pictures behind it otherwise.)"""
    return image.format in ("JPEG", "MPO")


def map_row_bands(image: Image.Image, read: Callable[[Image.Image], NDArray[Any]]) -> NDArray[Any]:
    """Return the read-only array that `read` makes of an image.

    It is converted band by band to avoid a second copy of the whole, and shared by all readers of a file.
    """
    whole = None
    for top, bottom in split_row_bands(0, image.height, 4 * image.width):
        band = read(image.crop((0, top, image.width, bottom)))
        if whole is None:
            whole = np.empty((image.height, *band.shape[1:]), band.dtype)
        whole[top:bottom] = band
    if whole is None:
        raise ValueError(f"it has {image.height} x {image.width} px")
    whole.flags.writeable = False
    return whole


_DECODED = FileCache(_decode, attrgetter("nbytes"), KEPT_BYTES)
