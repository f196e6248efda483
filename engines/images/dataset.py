"""Images with a class each, read part by part: what a training goes through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engines.images.picture import Pixels
from engines.spatial.rng import compute_step_seed
from engines.spatial.tiles import Tile

__all__ = ["LabelledImages", "SingleLabelImages", "shuffle_indices", "to_network_input"]


class LabelledImages(Protocol):
    """Of one size, but for those that crops are taken from. The same on every rank, whichever parts a rank reads.

    `draw` is the number that everything random in the augmentation of an image follows from, and nothing else:
    the parts of an image that ranks read with one number belong together. None is the image as it is.
    """

    @property
    def classes(self) -> int:
        """How many classes there are."""

    def __len__(self) -> int:
        """How many there are."""

    def name(self, index: int) -> str:
        """For messages: which image that is, such as its path."""

    def slide(self, index: int) -> str:
        """What it was taken from, by any name: images of one slide resemble each other."""

    def shape(self, index: int) -> tuple[int, int]:
        """Height and width in pixels of one image."""

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(3, h, w), float32 from -1 to 1: the pixels of `tile` of one image.

        Raises ImageError where the image cannot be read.
        """

    def label(self, index: int) -> int:
        """The class of one image, from 0 to `classes` - 1."""

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(h, w), int64: the class of each pixel of `tile` of one image.

        Raises ImageError where the mask cannot be read.
        """


class SingleLabelImages(ABC):
    """For images without masks: each pixel of an image has the class of the image, and each is a slide of its own."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Which image that is."""

    def slide(self, index: int) -> str:
        """Its name."""
        return self.name(index)

    @abstractmethod
    def label(self, index: int) -> int:
        """The class of one image."""

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(h, w), int64."""
        return torch.full(tile.shape, self.label(index))


def shuffle_indices(count: int, seed: int, epoch: int) -> Sequence[int]:
    """The images of one epoch, shuffled by the seed; nothing else changes the order.

    >>> shuffle_indices(5, seed=0, epoch=0) == shuffle_indices(5, seed=0, epoch=0)
    True
    """
    random = torch.Generator().manual_seed(compute_step_seed(seed, epoch))
    order: list[int] = torch.randperm(count, generator=random).tolist()
    return order


def to_network_input(pixels: Pixels) -> Tensor:
    """(h, w, 3) bytes -> (3, h, w): mean and deviation 0.5, as the predecessor has them."""
    part = np.array(pixels.transpose(2, 0, 1), order="C")  # of its own, and writable
    return torch.from_numpy(part).float().div_(255).sub_(0.5).div_(0.5)
