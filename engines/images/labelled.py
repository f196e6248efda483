"""Images with a class each, read part by part: what a training goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from engines.images.picture import Pixels
from engines.spatial.draws import step_seed
from engines.spatial.tiles import Tile

__all__ = ["LabelledImages", "in_order", "network_input", "resized"]


class LabelledImages(Protocol):
    """All of one size. The same on every rank, whichever parts a rank reads."""

    @property
    def classes(self) -> int:
        """How many classes there are."""

    def __len__(self) -> int:
        """How many there are."""

    def part(self, index: int, tile: Tile) -> Tensor:
        """(3, h, w), float32 from -1 to 1: the pixels of `tile` of one image.

        Raises ImageError where the image cannot be read.
        """

    def label(self, index: int) -> int:
        """The class of one image, from 0 to `classes` - 1."""


def in_order(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The images of one epoch, shuffled by the seed; nothing else changes the order.

    >>> in_order(5, seed=0, epoch=0) == in_order(5, seed=0, epoch=0)
    True
    """
    random = torch.Generator().manual_seed(step_seed(seed, epoch))
    order: list[int] = torch.randperm(count, generator=random).tolist()
    return order


def resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """(H, W, 3) -> (height, width, 3) by Pillow's bilinear filter, which averages where it shrinks."""
    if pixels.shape[:2] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR))


def network_input(pixels: Pixels, tile: Tile) -> Tensor:
    """(H, W, 3) bytes -> (3, h, w), the pixels of `tile`: mean and deviation 0.5, as the predecessor has them."""
    rows, cols = tile.rows, tile.cols
    part = np.ascontiguousarray(pixels[rows.start : rows.stop, cols.start : cols.stop].transpose(2, 0, 1))
    return torch.from_numpy(part).float().div_(255).sub_(0.5).div_(0.5)
