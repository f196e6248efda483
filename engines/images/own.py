"""What one rank reads of the images of a step: its own pixels, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engines.images.labelled import LabelledImages
from engines.spatial.tiles import Span, Tile
from engines.training import RankTraining

__all__ = ["OwnPart"]


class OwnPart:
    """This rank's part of steps of `count` images.

    Which images and pixels that is, is asked of the training itself: numbers in place of pixels are cut
    as pixels are, so that there is one rule for who gets what. Where the model answers for each pixel, all pixels of
    an image have the class of the image.
    """

    def __init__(self, training: RankTraining, images: LabelledImages, count: int) -> None:
        self.images = images
        self.dtype = getattr(torch, training.graph.inputs["images"].dtype)
        numbers, rows, cols = (_numbered(training, count, axis) for axis in (0, 2, 3))
        self.labels_from = numbers.get("labels")
        self.images_from: Sequence[int] = []
        if "images" in numbers:
            self.images_from = numbers["images"][:, 0, 0, 0].tolist()
            self.tile = Tile(_span(rows["images"][0, 0, :, 0]), _span(cols["images"][0, 0, 0, :]))

    def read(self, step: Sequence[int]) -> dict[str, Tensor]:
        """The part of the images with these numbers. Raises ImageError where one cannot be read."""
        found = {}
        if self.images_from:
            parts = [self.images.part(step[index], self.tile) for index in self.images_from]
            found["images"] = torch.stack(parts).to(self.dtype)
        if self.labels_from is not None:
            found["labels"] = torch.tensor([self.images.label(number) for number in step])[self.labels_from]
        return found


def _numbered(training: RankTraining, count: int, axis: int) -> dict[str, Tensor]:
    """This rank's part of whole inputs that hold the place of each pixel along one axis."""
    shapes = {name: (count, *spec.shape[1:]) for name, spec in training.graph.inputs.items()}
    shapes["images"] = (count, 1, *shapes["images"][2:])
    return training.cut({name: _places(shape, axis) for name, shape in shapes.items()})


def _places(shape: Sequence[int], axis: int) -> Tensor:
    """A whole input without memory of its own."""
    axis = axis if axis < len(shape) else 0
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis], dtype=torch.int32).view(view).expand(*shape)


def _span(places: Tensor) -> Span:
    return Span(int(places[0]), int(places[-1]) + 1)
