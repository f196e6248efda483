"""What one rank reads of the images of a step: its own pixels, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.images.labelled import LabelledImages
from engines.layer.graph import TensorSpec
from engines.program.worker import Inputs
from engines.spatial.tiles import Span, Tile
from engines.training import RankTraining

__all__ = ["OwnPart"]


@dataclass(frozen=True)
class _Part:
    """Of one micro-batch: the images of the step, by their place in it, and the pixels of each; the labels likewise."""

    images: Sequence[int] = ()
    tile: Tile | None = None
    labels: Tensor | None = None


class OwnPart:
    """This rank's part of the steps of a training, whose whole inputs are as `specs` say.

    Which images and pixels that is, is asked of the training itself: places are cut as pixels are, so that there is
    one rule for who gets what. Where the model answers for each pixel, all pixels of an image have its class.
    """

    def __init__(self, training: RankTraining, images: LabelledImages, specs: Mapping[str, TensorSpec]) -> None:
        self.images = images
        self.dtype = getattr(torch, specs["images"].dtype)
        numbers, rows, cols = (training.cut(_places(specs, axis)) for axis in (0, 2, 3))
        self.parts = {number: _part(numbers[number], rows[number], cols[number]) for number in numbers}

    def read(self, step: Sequence[int]) -> Inputs:
        """The parts of the images with these numbers. Raises ImageError where one cannot be read."""
        return {number: self._read(part, step) for number, part in self.parts.items()}

    def _read(self, part: _Part, step: Sequence[int]) -> dict[str, Tensor]:
        found = {}
        if part.tile is not None:
            pixels = [self.images.part(step[place], part.tile) for place in part.images]
            found["images"] = torch.stack(pixels).to(self.dtype)
        if part.labels is not None:
            found["labels"] = torch.tensor([self.images.label(number) for number in step])[part.labels]
        return found


def _places(specs: Mapping[str, TensorSpec], axis: int) -> dict[str, Tensor]:
    """Whole inputs of one channel that hold each pixel's place along one axis, without memory of their own."""
    images, labels = specs["images"].shape, specs["labels"].shape
    return {"images": _along((images[0], 1, *images[2:]), axis), "labels": _along(labels, 0)}


def _along(shape: Sequence[int], axis: int) -> Tensor:
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return torch.arange(shape[axis], dtype=torch.int32).view(view).expand(*shape)


def _part(numbers: Mapping[str, Tensor], rows: Mapping[str, Tensor], cols: Mapping[str, Tensor]) -> _Part:
    labels = numbers.get("labels")
    if "images" not in numbers:
        return _Part(labels=labels)
    tile = Tile(_span(rows["images"][0, 0, :, 0]), _span(cols["images"][0, 0, 0, :]))
    return _Part(numbers["images"][:, 0, 0, 0].tolist(), tile, labels)


def _span(places: Tensor) -> Span:
    return Span(int(places[0]), int(places[-1]) + 1)
