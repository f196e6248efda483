"""Some of the images of a set, and how a set is parted into those to train on and those to judge by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engines.errors import ImageError
from engines.images.dataset import LabelledImages
from engines.images.split import split_indices
from engines.spatial.tiles import Tile

__all__ = ["Subset", "split_by_slide"]


class Subset:
    """The images with these `numbers`, in that order: images like others.

    Raises ImageError where a number is not one of theirs.
    """

    def __init__(self, images: LabelledImages, numbers: Sequence[int]) -> None:
        wrong = [number for number in numbers if not 0 <= number < len(images)]
        if wrong:
            raise ImageError(f"There is no image {wrong[0]} among {len(images)}: they go from 0 to {len(images) - 1}.")
        self.images, self.numbers, self.classes = images, tuple(numbers), images.classes

    @property
    def ignore(self) -> Sequence[int]:
        """The numbers of masks that are no class."""
        return getattr(self.images, "ignore", ())

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        """As it is called in the set."""
        return self.images.name(self.numbers[index])

    def slide(self, index: int) -> str:
        """What it was taken from."""
        return self.images.slide(self.numbers[index])

    def shape(self, index: int) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.images.shape(self.numbers[index])

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(3, h, w)."""
        return self.images.part(self.numbers[index], tile, draw)

    def label(self, index: int) -> int:
        """Its class."""
        return self.images.label(self.numbers[index])

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """(h, w)."""
        return self.images.mask(self.numbers[index], tile, draw)


def split_by_slide(images: LabelledImages, share: float, seed: int = 0) -> tuple[Subset, Subset]:
    """(those to train on, those held out): about `share` of all slides, drawn by the seed. See `split`.

    Raises ImageError where one of the two would be empty.
    """
    everyone = range(len(images))
    slides, labels = [images.slide(index) for index in everyone], [_get_label(images, index) for index in everyone]
    train, held = split_indices(slides, labels, share, seed)
    return Subset(images, train), Subset(images, held)


def _get_label(images: LabelledImages, index: int) -> int | None:
    """None where an image has a mask only."""
    try:
        return images.label(index)
    except ImageError:
        return None
