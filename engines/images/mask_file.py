"""Reader of masks, which give the class of each pixel, by rectangles."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.errors import ImageError
from engines.images.dataset import IGNORED
from engines.images.picture import FileCache
from engines.images.raw_image import RawImage, open_raw_image
from engines.spatial.tiles import Tile

__all__ = ["Classes", "Ignore", "MaskFile", "parse_ignored_numbers", "read_mask_shape"]

Classes = NDArray[np.int64]

Ignore = int | Iterable[int] | None
"""The numbers in a mask that are no class, such as 255 for void: one, several or none."""

_NEARLY_GREY = 16  # the most that channels of a grey mask may differ after it was saved as a colour JPEG

_open_mask: FileCache[RawImage] = FileCache(open_raw_image)


class MaskFile:
    """A mask in a picture file (grey or with a palette), or an (H, W) array in a `.npy` file.

    The stored numbers are the classes, from 0 to `classes` - 1; palette colours, white-is-zero and transparency do not
    change them. Numbers in `ignore` become `IGNORED`. With a `threshold`, numbers above it are class 1 and all others
    class 0, so that a mask can be a JPEG, which does not preserve numbers exactly. Numbers of 1, 2 or 4 bits are spread
    over 0 ... 255 before the comparison with the threshold.
    Raises ImageError, naming the file, if it cannot be read, or has a palette of colours and a threshold.
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

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self._source.shape

    def read(self, tile: Tile) -> Classes:
        """Return the classes of a tile, (h, w). Raises ImageError, naming file and pixel, if a number is no class."""
        found = self._select_channel(self._source.read(tile), tile)
        ignored = np.isin(found, self.ignore)
        if self.threshold is not None:
            # A threshold is a shade from 0 to 255, so that a mask saved with 1, 2 or 4 bits means the same.
            bits = self._source.bits
            shades = found.astype(np.int64) * (255 // ((1 << bits) - 1)) if bits in (1, 2, 4) else found
            found = np.where(np.isnan(found), found, shades > self.threshold)
        valid = (found >= 0) & (found < self.classes) & (found == np.floor(found))  # every comparison with NaN is false
        if not (valid | ignored).all():
            row, col = np.argwhere(~(valid | ignored))[0]
            raise ImageError(
                f"The mask {self.path} holds {found[row, col]:g} at {_describe_pixel(tile, row, col)}, which is no "
                f"class: there are {self.classes}, numbered from 0. Mend the mask, say which number means that a pixel "
                "has no class (ignore=), or give a threshold where its numbers are shades."
            )
        return np.where(ignored, IGNORED, np.where(ignored, 0, found).astype(np.int64))

    def _select_channel(self, found: NDArray[Any], tile: Tile) -> NDArray[Any]:
        """Select the channel of classes: (h, w, channels) -> (h, w). Raises ImageError if that is ambiguous."""
        # Programs that save grey as RGB or RGBA lose nothing: the three channels are equal, and all is opaque. Anything
        # else has lost the class numbers, and a guess would train on wrong labels without a sign of it.
        channel = self._source.alpha
        if channel is not None:
            alpha = found[..., channel]
            full = np.iinfo(alpha.dtype).max if alpha.dtype.kind in "iu" else 1
            if (alpha != full).any():
                row, col = np.argwhere(alpha != full)[0]
                raise ImageError(
                    f"The mask {self.path} is transparent at {_describe_pixel(tile, row, col)}, and it is not known "
                    "which class that is. Save it as grey; if what is opaque is class 1, save its alpha channel alone, "
                    "by PIL.Image.open(...).getchannel('A').save(...), and give threshold=127."
                )
            found = np.delete(found, channel, axis=2)
        if found.shape[2] not in (1, 3):
            raise ImageError(
                f"The mask {self.path} has {found.shape[2]} channels, and it is not known which of them holds the "
                "classes. Save that one by itself."
            )
        if found.shape[2] == 1:
            return found[..., 0]
        self._check_grey(found, tile)
        return found[..., 0] if self.threshold is None else found.sum(2, dtype=np.float64) // 3

    def _check_grey(self, found: NDArray[Any], tile: Tile) -> None:
        """Raise ImageError unless the three channels are equal.

        With a threshold, they may also differ by up to `_NEARLY_GREY`, or be all three on the same side of it.
        """
        low, high = found.min(2), found.max(2)
        odd = low != high
        if self.threshold is not None:
            far = high.astype(np.float64) - low > _NEARLY_GREY
            odd = far & ((low > self.threshold) != (high > self.threshold))
        if odd.any():
            row, col = np.argwhere(odd)[0]
            raise ImageError(
                f"The mask {self.path} is coloured, {tuple(found[row, col].tolist())} at "
                f"{_describe_pixel(tile, row, col)}, and it is not known which class a colour is. Save it as grey, or "
                "with a palette, so that numbers are classes."
            )


def parse_ignored_numbers(ignore: Ignore) -> tuple[int, ...]:
    """Return the ignored numbers as a tuple. Raises ImageError if they are not integers.

    >>> parse_ignored_numbers(None), parse_ignored_numbers(255), parse_ignored_numbers([254, 255])
    ((), (255,), (254, 255))
    """
    given = () if ignore is None else ignore if isinstance(ignore, Iterable) else (ignore,)
    try:
        return tuple(operator.index(number) for number in given)
    except TypeError:
        raise ImageError(f"ignore={ignore!r} must be a whole number of the masks, such as 255, or several.") from None


def read_mask_shape(path: Path) -> tuple[int, int]:
    """Return a mask's height and width in pixels. Raises ImageError, naming the file, if it is no mask."""
    return _open_mask(path).shape


def _describe_pixel(tile: Tile, row: int, col: int) -> str:
    return f"row {tile.rows.start + row}, column {tile.cols.start + col}"
