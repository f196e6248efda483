"""A rectangle of a picture that serves as a model's whole input image, read window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.images.dataset import to_network_input
from engines.images.picture import Picture, crop_picture
from engines.spatial.tiles import Tile

__all__ = ["PaddedRegion", "make_padded_region"]

_MOST_SIDE_PX, _MOST_PX = 1 << 24, 1 << 40


@dataclass(frozen=True)
class PaddedRegion:
    """All of `picture`, with white below and at the right up to `size_px` (height, width) if the model needs that."""

    #     +-----------+...+
    #     |  picture  |   :      picture_px: what is asked for, and what is written
    #     |           |   :      size_px: what the model computes, for instance a multiple of 32; white is read as any
    #     +-----------+   :               other pixels, and never stored
    #     :               :
    #     +...............+
    picture: Picture
    size_px: tuple[int, int]

    @property
    def picture_px(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.picture.shape()

    def pad_to_multiple(self, px: int) -> PaddedRegion:
        """Return the region padded to multiples of `px` on both sides."""
        height, width = (-(-side // px) * px for side in self.picture_px)
        return replace(self, size_px=(height, width))

    def read_tile(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Return the pixels of `tile` as (1, 3, h, w), from -1 to 1. Raises ImageError if they cannot be read."""
        pixels = self.picture.read(tile.rows.start, tile.cols.start, *tile.shape)
        part = to_network_input(pixels)
        return part[None].to(dtype, memory_format=torch.channels_last)


def make_padded_region(picture: Picture, box: Sequence[int] | None = None, level: int = 0) -> PaddedRegion:
    """Return the rectangle (y0, x0, height, width) in pixels of `level`, white outside the picture; None: all of it.

    Raises ImageError if the rectangle is empty, does not overlap the picture, or is larger than any slide.
    """
    rows, cols = picture.shape(level)
    if box is not None and (len(box) != 4 or not all(isinstance(px, int) for px in box)):
        raise ImageError(f"region={box!r} must be four whole numbers of pixels: y0, x0, height, width.")
    if box is not None and (max(box[2:]) > _MOST_SIDE_PX or box[2] * box[3] > _MOST_PX):
        raise ImageError(
            f"region={box!r}: {box[2]:,} x {box[3]:,} px are more than any slide has. Ask for a smaller one."
        )
    cut = crop_picture(picture, *((0, 0, rows, cols) if box is None else box), level)
    return PaddedRegion(cut, cut.shape())
