"""A second opinion on a file that a decoder refuses: it is damaged only if independent decoders fail as well."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import imagecodecs
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile
from tifffile import TiffFile, TiffPage

from mpi4dl_nb.engines.images.regular_file import JPEG_HEAD, PNG_HEAD, TIFF_HEADS, open_regular

MOST_BYTES = 1 << 26  # of a file that is decoded once more, only to word an error
MOST_PX = 1 << 24  # of all of its pages: decoders allocate what the header asks for
_MOST_PAGES = 16
_JPEG_END = b"\xff\xd9"
# Compressions whose decoders are told how much may come out; a picture in a tile (JPEG) has a size of its own.
_BOUNDED = (1, 2, 3, 4, 5, 8, 32773, 32946, 50000)

_BY_PILLOW = (6, 32771, 34925)  # old JPEG, 16-bit words, LZMA


class _NoOpinionError(Exception):
    """The decoder was not tried, or says nothing about all of the file."""


def find_decoder(path: Path) -> str | None:
    """Return the name of a library that decodes a PNG, JPEG or TIFF file whole; "" if two that were tried fail.

    Returns None if there is no second opinion: the file is of another format, too large, or has pages that only one
    library reaches.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError):  # or the path is none: a zero byte
        return None
    readers: dict[str, Callable[[bytes], object]] = {"Pillow": _decode_by_pillow}
    if data.startswith(TIFF_HEADS):
        readers["tifffile"] = _decode_by_tifffile
    elif data.startswith(JPEG_HEAD):
        if _JPEG_END not in data[-1024:]:
            return ""  # bytes are missing: decoders differ in whether they make them up
        readers["imagecodecs"] = partial(_decode_by_imagecodecs, imagecodecs.jpeg8_decode)
    elif data.startswith(PNG_HEAD):
        readers["imagecodecs"] = partial(_decode_by_imagecodecs, imagecodecs.png_decode)
    else:
        return None
    failed = 0
    for name, decode in readers.items() if len(data) <= MOST_BYTES else ():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decode(data)
        except _NoOpinionError:
            continue
        except Exception:  # a decoder may raise anything
            failed += 1
        else:
            return name
    return "" if failed == len(readers) else None


def _check_size(*shapes: tuple[int, ...]) -> None:
    if sum(shape[0] * shape[1] for shape in shapes) > MOST_PX:
        raise _NoOpinionError


def _decode_by_pillow(data: bytes) -> None:
    with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "TIFF")) as image:
        for page in range(min(_MOST_PAGES, getattr(image, "n_frames", 1))):
            image.seek(page)
            _check_size(image.size)
            if isinstance(image, TiffImageFile) and 330 in image.tag_v2:  # SubIFDs, which Pillow does not reach
                raise _NoOpinionError
            image.load()


def _decode_by_tifffile(data: bytes) -> None:
    with TiffFile(io.BytesIO(data)) as file:
        pages = [page for page in islice(file.pages, _MOST_PAGES) if isinstance(page, TiffPage)]
        _check_size(*((page.imagelength, page.imagewidth) for page in pages))
        if not pages:
            raise ValueError("it has no pages")
        for page in pages:
            if page.compression in _BY_PILLOW or page.subifds:
                raise _NoOpinionError
            if page.compression not in _BOUNDED:  # tifffile, or OpenSlide, was the first decoder, which has failed
                raise ValueError("it is not decoded once more")
            page.asarray(maxworkers=1)


def _decode_by_imagecodecs(decode: Callable[[bytes], object], data: bytes) -> None:
    with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
        _check_size(image.size)
    decode(data)
