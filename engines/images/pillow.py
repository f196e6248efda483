"""PNG and JPEG files, and TIFF files of rare kinds, through Pillow: decoded whole, once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from engines.errors import ImageError
from engines.images.arrays import on_white
from engines.images.decoded import Decoded
from engines.images.files import changed, check_size, reasons
from engines.images.reader import Level, Pixels, Reader
from engines.working import absolute

__all__ = ["FORMATS", "PillowPicture", "quiet_at_any_size"]

FORMATS = ("PNG", "JPEG", "TIFF")
_GREY, _COLOUR = ("1", "L"), ("P", "RGB", "YCbCr")
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_EXTRA_SAMPLES = 338
_HOLDS = {"CMYK": "printing inks", "F": "floating-point numbers", "I": "integers of more than 8 bits"}


class PillowPicture(Reader):
    """A file that can only be decoded whole. Its pixels are kept, and shared with whoever opens it again.

    `page` is the number of the page of a TIFF file that is the picture. Raises ImageError, which names the file and
    the reason, where it is damaged or of a kind that is not taken.
    """

    def __init__(self, path: Path, page: int = 0) -> None:
        self.path, self.page = absolute(path), page
        self._pixels: Pixels | None = _DECODED.pixels(self.path, page)
        super().__init__(path.name, [Level(*self._pixels.shape[:2])])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pixels": None}

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        pixels = self._pixels
        if pixels is None:
            pixels = self._pixels = _DECODED.pixels(self.path, self.page)
        if pixels.shape[:2] != self.shape():
            raise changed(self.path)
        out[:] = pixels[y0 : y0 + out.shape[0], x0 : x0 + out.shape[1]]


_SETTINGS = threading.Lock()  # Pillow's limit and Python's warnings are settings of the whole process


@contextmanager
def quiet_at_any_size() -> Iterator[None]:
    """Pillow takes a picture of 180 million pixels for an attack; ours are meant to be large.

    What it warns of (an EXIF block that is damaged, a short read) either ends in an error or takes nothing away.
    """
    with _SETTINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _decode(path: Path, page: int) -> Pixels:
    try:
        with reasons(path):
            file = BytesIO(path.read_bytes())  # which, unlike a file, makes no room for more than there is
            with quiet_at_any_size():
                image = Image.open(file, formats=FORMATS)
                if page:
                    image.seek(page)
                _check_mode(path, image)
                check_size(path, image.height, image.width)
                image.getexif()
                if image.format == "TIFF":
                    image.load()  # only now are its tags looked at, and warned of
            return _from_pillow(image)  # not while other threads wait
    except ImageError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            raise ImageError(
                f"{path} is not a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} picture that can be read."
            ) from None
        raise


def _check_mode(path: Path, image: Image.Image) -> None:
    """Pillow drops the lower half of a 16-bit colour picture without a word; its decoder's name tells."""
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


def _from_pillow(image: Image.Image) -> Pixels:
    upright = ImageOps.exif_transpose(image)
    if _has_alpha(image):
        return on_white(np.array(upright.convert("RGBA")))
    return np.array(upright.convert("RGB"))


def _has_alpha(image: Image.Image) -> bool:
    """Of a TIFF file without ExtraSamples, Pillow takes a fourth channel for alpha, which the file does not say."""
    if isinstance(image, TiffImageFile):
        return image.mode in _WITH_ALPHA and bool({1, 2} & set(image.tag_v2.get(_EXTRA_SAMPLES, ())))
    return image.mode in _WITH_ALPHA or "transparency" in image.info


_DECODED = Decoded(_decode)
