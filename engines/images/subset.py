"""Subsets of a data set, and its split into training and held-out images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engines.errors import ImageError
from engines.images.dataset import LabelledImages
from engines.images.split import split_indices
from engines.spatial.tiles import Tile

__all__ = ["Subset", "split_by_slide"]


class Subset:
    """The data set of the images with the indices `numbers`, in that order.

    Raises ImageError if an index is out of range.
    """

    def __init__(self, images: LabelledImages, numbers: Sequence[int]) -> None:
        wrong = [number for number in numbers if not 0 <= number < len(images)]
        if wrong:
            raise ImageError(f"There is no image {wrong[0]} among {len(images)}: they go from 0 to {len(images) - 1}.")
        self.images, self.numbers, self.classes = images, tuple(numbers), images.classes

    @property
    def ignore(self) -> Sequence[int]:
        """The numbers in masks that stand for no class."""
        return getattr(self.images, "ignore", ())

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        """Return the name of an image in the full set."""
        return self.images.name(self.numbers[index])

    def slide(self, index: int) -> str:
        """Return the slide of an image."""
        return self.images.slide(self.numbers[index])

    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width in pixels."""
        return self.images.shape(self.numbers[index])

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the pixels of a tile, (3, h, w)."""
        return self.images.part(self.numbers[index], tile, draw)

    def label(self, index: int) -> int:
        """Return the class of an image."""
        return self.images.label(self.numbers[index])

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the classes of a tile, (h, w)."""
        return self.images.mask(self.numbers[index], tile, draw)


def split_by_slide(images: LabelledImages, share: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Split into (training images, held-out images), with about `share` of the slides held out; see `split_indices`.

    Raises ImageError if one of the two would be empty.
    """
    slides = [images.slide(index) for index in range(len(images))]
    labels: list[int | None] = []
    for index in range(len(images)):
        try:
            labels.append(images.label(index))
        except ImageError:  # an image with only a mask has none
            labels.append(None)
    train, held = split_indices(slides, labels, share, seed)
    return Subset(images, train), Subset(images, held)
