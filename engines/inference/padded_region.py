"""A rectangle of a picture as what a model takes for its whole image: read window by window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.images import region_picture
from engines.images.dataset import to_network_input
from engines.images.picture import Picture
from engines.spatial.tiles import Tile

__all__ = ["PaddedRegion", "make_padded_region"]

_MOST_SIDE_PX, _MOST_PX = 1 << 24, 1 << 40


@dataclass(frozen=True)
class PaddedRegion:
    """All of `picture`; `size_px` is what is computed: with white below and at the right, if the model needs that."""

    picture: Picture
    size_px: tuple[int, int]

    @property
    def picture_px(self) -> tuple[int, int]:
        """Height and width of the picture."""
        return self.picture.shape()

    def pad_to_multiple(self, px: int) -> PaddedRegion:
        """The same, both sides of what is computed being multiples of `px`."""
        height, width = (-(-side // px) * px for side in self.picture_px)
        return replace(self, size_px=(height, width))

    def read_tile(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """(1, 3, h, w), from -1 to 1: the pixels of `tile`. Raises ImageError where they cannot be read."""
        pixels = self.picture.read(tile.rows.start, tile.cols.start, *tile.shape)
        part = to_network_input(pixels)
        return part[None].to(dtype, memory_format=torch.channels_last)


def make_padded_region(picture: Picture, box: Sequence[int] | None = None, level: int = 0) -> PaddedRegion:
    """The rectangle (y0, x0, height, width) of a level, in pixels of that level, white outside; None is all of it.

    Raises ImageError where it has no pixels, or none in common with the picture, or more than any slide.
    """
    rows, cols = picture.shape(level)
    if box is not None and (len(box) != 4 or not all(isinstance(px, int) for px in box)):
        raise ImageError(f"region={box!r} must be four whole numbers of pixels: y0, x0, height, width.")
    if box is not None and (max(box[2:]) > _MOST_SIDE_PX or box[2] * box[3] > _MOST_PX):
        raise ImageError(
            f"region={box!r}: {box[2]:,} x {box[3]:,} px are more than any slide has. Ask for a smaller one."
        )
    cut = region_picture.crop_picture(picture, *((0, 0, rows, cols) if box is None else box), level)
    return PaddedRegion(cut, cut.shape())
