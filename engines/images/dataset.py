"""The interface of data sets for training: labelled images that are read in tiles, their subsets and their split."""

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
    """A data set of labelled images. It is the same on every rank, whichever tiles a rank reads.

    All images have one size, except in sets that random crops are taken from. `draw` is the random number that alone
    determines the augmentation of an image: tiles read with the same draw, on any ranks, belong to the same augmented
    image. None means no augmentation.
    """

    @property
    def classes(self) -> int:
        """Number of classes."""

    def __len__(self) -> int:
        """Return the number of images."""

    def name(self, index: int) -> str:
        """Return the name of an image for messages, such as its path."""

    def slide(self, index: int) -> str:
        """Return a name of the specimen that an image was taken from: images of one slide resemble each other."""

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width in pixels of one image."""

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the pixels of `tile` of one image: (3, h, w), float32 from -1 to 1.

        Raises ImageError if the image cannot be read.
        """

    def label(self, index: int) -> int:
        """Return the class of one image, from 0 to `classes` - 1."""

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the class of each pixel of `tile` of one image: (h, w), int64.

        Raises ImageError if the mask cannot be read.
        """


class SingleLabelImages(ABC):
    """Base class for images without masks: each pixel has the class of its image, and each image is its own slide."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image for messages."""

    def slide(self, index: int) -> str:
        """Return the name of the image as that of its slide."""
        return self.name(index)

    @abstractmethod
    def label(self, index: int) -> int:
        """Return the class of one image."""

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the image's class for each pixel of a tile: (h, w), int64."""
        return torch.full(tile.shape, self.label(index))


def shuffle_indices(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the shuffled image indices of one epoch; they depend only on count, seed and epoch.

    >>> shuffle_indices(5, seed=0, epoch=0) == shuffle_indices(5, seed=0, epoch=0)
    True
    """
    random = torch.Generator().manual_seed(compute_step_seed(seed, epoch))
    order: list[int] = torch.randperm(count, generator=random).tolist()
    return order


def to_network_input(pixels: Pixels) -> Tensor:
    """Normalise bytes with mean and deviation 0.5, as in the predecessor: (h, w, 3) -> (3, h, w), float32."""
    part = np.array(pixels.transpose(2, 0, 1), order="C")  # a writable copy, which torch requires
    return torch.from_numpy(part).float().div_(255).sub_(0.5).div_(0.5)
