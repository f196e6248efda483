"""Masks: the class of each pixel, read rectangle by rectangle."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engines.errors import ImageError
from engines.images.files import beginning, check_size, reasons
from engines.images.opened import opened, shape_of
from engines.images.pillow import quiet_at_any_size
from engines.spatial.tiles import Tile

__all__ = ["IGNORED", "Classes", "Mask", "mask_shape"]

Classes = NDArray[np.int64]

IGNORED = -100
"""The class of pixels outside of a mask, which `torch.nn.CrossEntropyLoss` leaves out."""

_VALUES = ("P", "I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # modes of numbers that are no shades of a picture


class Mask:
    """A mask in a picture file (grey, or of a palette), or an (H, W) array in a `.npy` file.

    The numbers are the classes, from 0 to `classes` - 1. With a `threshold`, whatever is above it is class 1 and the
    rest class 0: so a mask can be a JPEG, whose numbers are not quite those that were saved.
    Raises ImageError, which names the file, where it cannot be read.
    """

    def __init__(self, path: Path, classes: int, threshold: int | None = None) -> None:
        self.path, self.classes, self.threshold = path, classes, threshold
        values = _values(path)
        self._source = opened(path) if values is None else values

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        source = self._source
        rows, cols = source.shape if isinstance(source, np.ndarray) else source.shape()
        return rows, cols

    def read(self, tile: Tile) -> Classes:
        """(h, w): raises ImageError, which names file and pixel, where a number is no class."""
        found = self._numbers(tile)
        if self.threshold is not None and not np.isnan(found).any():
            return (found > self.threshold).astype(np.int64)
        wrong = ~((found >= 0) & (found < self.classes) & (found == np.floor(found)))  # of NaN nothing is true
        if wrong.any():
            row, col = np.argwhere(wrong)[0]
            raise ImageError(
                f"The mask {self.path} holds {found[row, col]:g} at row {tile.rows.start + row}, column "
                f"{tile.cols.start + col}, which is no class: there are {self.classes}, numbered from 0. "
                "Mend the mask, or give a threshold where its numbers are shades."
            )
        return found.astype(np.int64)

    def _numbers(self, tile: Tile) -> NDArray[Any]:
        source = self._source
        if isinstance(source, np.ndarray):
            return np.array(source[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop])
        pixels = source.read(tile.rows.start, tile.cols.start, *tile.shape)
        if self.threshold is None and (pixels != pixels[..., :1]).any():
            raise ImageError(
                f"The mask {self.path} is coloured, and it is not known which class a colour is. Save it as grey, or "
                "with a palette, so that numbers are classes; or give a threshold above which a pixel is of class 1."
            )
        shades: NDArray[np.uint64] = pixels.sum(2, dtype=np.uint64) // 3
        return shades


def mask_shape(path: Path) -> tuple[int, int]:
    """Height and width in pixels. Raises ImageError, which names the file, where it is no mask."""
    return shape_of(path) if path.suffix.lower() in (".png", ".jpg", ".jpeg") else Mask(path, classes=1).shape


def _values(path: Path) -> NDArray[Any] | None:
    """(H, W), or None where the mask is a picture of shades, which has a reader already."""
    beginning(path, 1)
    if path.suffix.lower() == ".npy":
        with reasons(path):
            values: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            if values.ndim != 2 or not values.size or values.dtype.kind not in "biuf":
                raise ImageError(f"{path} holds {values.dtype} of shape {values.shape}, but a mask is (H, W) numbers.")
            return values
    if not _holds_values(path):
        return None
    with reasons(path):
        file = BytesIO(path.read_bytes())  # which, unlike a file, makes no room for more than there is
        with quiet_at_any_size(), Image.open(file) as image:
            check_size(path, image.height, image.width)
            return np.array(image)


def _holds_values(path: Path) -> bool:
    """Whether a file's header says that its numbers are no shades."""
    try:
        with quiet_at_any_size(), Image.open(path) as image:
            return image.mode in _VALUES
    except Exception:  # a damaged header fails in any way; and whoever reads the picture has the words for it
        return False
