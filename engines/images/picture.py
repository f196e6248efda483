"""Pictures: whatever the user has (a file, an array, a tensor), read rectangle by rectangle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from engines.errors import ImageError

__all__ = ["ArrayPicture", "Picture", "Pixels", "Source", "open_image"]

Pixels = NDArray[np.uint8]
"""(H, W, 3), red, green, blue."""

FORMATS = ("PNG", "JPEG", "TIFF")
PIXELS_PER_BYTE = 4096  # no compression of these formats does better, but that of blank fax pages
_GREY, _COLOUR = ("1", "L"), ("P", "RGB", "YCbCr")
_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_HOLDS = {"CMYK": "printing inks", "F": "floating-point numbers", "I": "integers of more than 8 bits"}


@runtime_checkable
class Picture(Protocol):
    """Something that can be cut into tiles without being read whole."""

    @property
    def name(self) -> str:
        """For titles and messages."""

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""

    def read(self, y0: int, x0: int, height_px: int, width_px: int) -> Pixels:
        """The rectangle whose first pixel is row `y0`, column `x0`: a fresh (height_px, width_px, 3) array.

        Raises ImageError where it reaches outside the picture.
        """

    def thumbnail(self, longest_px: int) -> Pixels:
        """The whole picture, shrunk until neither side is longer than `longest_px`."""


Source = str | PathLike[str] | NDArray[np.generic] | torch.Tensor | Picture


def open_image(source: Source) -> Picture:
    """The picture in a PNG, JPEG or TIFF file, an (H, W, C) array, or a (C, H, W) tensor.

    Grey becomes three equal channels, and what is transparent is laid on white. Numbers are uint8, or
    floats from 0 to 1. Raises ImageError, which names the file and the reason.

    >>> open_image(np.zeros((4, 6), np.uint8)).shape
    (4, 6)
    """
    if isinstance(source, str | PathLike):
        return ArrayPicture(Path(source).name, _read_file(Path(source)))
    if isinstance(source, torch.Tensor):
        return ArrayPicture("picture", _from_array(_channels_last(source), "The tensor"))
    if isinstance(source, np.ndarray):
        return ArrayPicture("picture", _from_array(source, "The array"))
    if isinstance(source, Picture):
        return source
    raise ImageError(
        f"No picture can be read from a value of type {type(source).__name__}. "
        f"Give the path of a {_spoken(FORMATS)} file, an (H, W, C) NumPy array or a (C, H, W) tensor."
    )


@dataclass(frozen=True)
class ArrayPicture:
    """A picture that lies in memory."""

    name: str
    pixels: Pixels = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def read(self, y0: int, x0: int, height_px: int, width_px: int) -> Pixels:
        """A copy of one rectangle."""
        rows, cols = self.shape
        inside = 0 <= y0 < y0 + height_px <= rows and 0 <= x0 < x0 + width_px <= cols
        if not inside:
            raise ImageError(
                f"{self.name} has {rows} x {cols} pixels: {height_px} x {width_px} of them "
                f"from row {y0}, column {x0} do not lie inside it."
            )
        return self.pixels[y0 : y0 + height_px, x0 : x0 + width_px].copy()

    def thumbnail(self, longest_px: int) -> Pixels:
        """A copy, shrunk by averaging; never enlarged."""
        image = Image.fromarray(self.pixels)
        image.thumbnail((longest_px, longest_px), Image.Resampling.BOX)
        return np.array(image)


def _spoken(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


@contextmanager
def _any_size() -> Iterator[None]:
    """Pillow takes a picture of 180 million pixels for an attack; ours are meant to be large."""
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _read_file(path: Path) -> Pixels:
    try:
        with _any_size(), Image.open(path, formats=FORMATS) as image:
            _check_mode(path, image)
            _check_size(path, image)
            return _from_pillow(image)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist (looked for in {Path.cwd()}).") from None
    except IsADirectoryError:
        raise ImageError(f"{path} is a folder. Give the path of one picture in it.") from None
    except UnidentifiedImageError:
        raise ImageError(f"{path} is not a {_spoken(FORMATS)} picture that can be read.") from None
    except PermissionError:
        raise ImageError(f"{path} may not be read by this user.") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow's words for a broken file
        raise ImageError(f"{path} is damaged: {error}. Copy or export it again.") from error


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


def _check_size(path: Path, image: Image.Image) -> None:
    """A damaged header can ask for more memory than there is, and the system would end the process."""
    there, (cols, rows) = path.stat().st_size, image.size
    if rows * cols > there * PIXELS_PER_BYTE:
        raise ImageError(
            f"{path} is damaged: it says that it holds {rows} x {cols} pixels, but it has only "
            f"{there} bytes. Copy or export it again."
        )


def _from_pillow(image: Image.Image) -> Pixels:
    upright = ImageOps.exif_transpose(image)
    if upright.mode in _WITH_ALPHA or "transparency" in upright.info:
        return _on_white(np.array(upright.convert("RGBA")))
    return np.array(upright.convert("RGB"))


def _on_white(rgba: Pixels) -> Pixels:
    """(H, W, 4) -> (H, W, 3)."""
    paper = Image.new("RGBA", (rgba.shape[1], rgba.shape[0]), "white")
    return np.array(Image.alpha_composite(paper, Image.fromarray(rgba)).convert("RGB"))


def _channels_last(tensor: torch.Tensor) -> NDArray[np.generic]:
    if tensor.dim() != 3:
        raise ImageError(f"The tensor has shape {tuple(tensor.shape)}, but a picture is (C, H, W).")
    plain = tensor.detach().cpu()
    return (plain.float() if plain.dtype is torch.bfloat16 else plain).permute(1, 2, 0).numpy()


def _from_array(array: NDArray[np.generic], what: str) -> Pixels:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4) -> (H, W, 3)."""
    pixels = _as_bytes(array[..., None] if array.ndim == 2 else array, what)
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or not pixels.size:
        raise ImageError(
            f"{what} has shape {array.shape}, but a picture has 1, 3 or 4 channels: "
            "(H, W, C) as an array, (C, H, W) as a tensor."
        )
    if pixels.shape[2] == 4:
        return _on_white(pixels)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _as_bytes(array: NDArray[np.generic], what: str) -> Pixels:
    if array.dtype == np.uint8:
        return array.astype(np.uint8)
    floating = np.issubdtype(array.dtype, np.floating)
    if floating and array.size and array.min() >= 0 and array.max() <= 1:
        return np.rint(array.astype(np.float64) * 255).astype(np.uint8)
    found = f"from {array.min():g} to {array.max():g}" if floating and array.size else "of more than 8 bits"
    raise ImageError(
        f"{what} holds {array.dtype} numbers {found if array.dtype != bool else 'for true and false'}. "
        "A picture has uint8 from 0 to 255, or floats from 0 to 1."
    )
