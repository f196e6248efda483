"""Random images that need no storage: each pixel is a function of the seed, the image's index and its position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.images.dataset import SingleLabelImages
from engines.spatial.rng import sample_uniform
from engines.spatial.tiles import Tile

__all__ = ["SyntheticImages"]

_CPU = torch.device("cpu")


class SyntheticImages(SingleLabelImages):
    """`count` uniformly random images of `size` = (height, width) pixels, with random classes of images and pixels.

    Each pixel is a function of the seed, the image's index and its position, so that nothing is stored.

    >>> from engines.spatial.tiles import Span
    >>> images = SyntheticImages(count=2, size=(4, 6), classes=10)
    >>> whole = images.part(1, Tile.whole(4, 6))
    >>> torch.equal(images.part(1, Tile(Span(1, 3), Span(2, 6))), whole[:, 1:3, 2:6])
    True
    """

    def __init__(self, count: int, size: tuple[int, int], classes: int, seed: int = 0) -> None:
        self.count, self.size, self.classes, self.seed = count, size, classes, seed

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        """Return a name that contains the image's index."""
        return f"random image {index}"

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width in pixels."""
        return self.size

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the pixels of a tile, (3, h, w), float32 from -1 to 1; only these are generated."""
        return self._sample_uniform(3 * index, 3, tile).mul_(2).sub_(1).float()

    def label(self, index: int) -> int:
        """Return the class of an image."""
        return math.floor(sample_uniform(self.seed, 3 * index + 1, [], _CPU).item() * self.classes)

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the classes of the pixels of a tile, (h, w), int64; only these are generated."""
        return self._sample_uniform(3 * index + 2, 1, tile)[0].mul_(self.classes).long()

    def _sample_uniform(self, number: int, channels: int, tile: Tile) -> Tensor:
        """Return uniform samples for a tile, (channels, h, w), float64 in [0, 1)."""
        spans = zip(self.size, (tile.rows, tile.cols), strict=True)
        place = [(channels, 0, channels), *((size, span.start, span.stop) for size, span in spans)]
        return sample_uniform(self.seed, number, place, _CPU)
