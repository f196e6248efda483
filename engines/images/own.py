"""What one rank reads of the images of a step: its own pixels, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.images.ignored import IGNORED, NOT_LEFT_OUT, check_ignored
from engines.images.labelled import LabelledImages
from engines.images.order import Drawn
from engines.layer.graph import TensorSpec
from engines.program.worker import Inputs
from engines.spatial.tiles import Span, Tile

__all__ = ["OwnPart", "Piece"]

_AXES = (0, -2, -1)  # of images, rows and columns


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read at once: of the `images` or `labels` of one image the pixels of `tile`, or its one label."""

    name: str
    index: int
    tile: Tile | None
    draw: int | None


@dataclass(frozen=True)
class _Part:
    """Of the images or the labels of a micro-batch: which places of the step, and which pixels of each image.

    `rows` and `cols` are pixels of the images, in order; what has no pixels has none of them.
    """

    shape: Sequence[int]
    places: Sequence[int]
    rows: Tensor
    cols: Tensor

    @property
    def tile(self) -> Tile | None:
        """The smallest that holds its pixels; None where it has none."""
        if not len(self.rows):
            return None
        return Tile(*(Span(int(px[0]), int(px[-1]) + 1) for px in (self.rows, self.cols)))

    def pieces(self, name: str, step: Sequence[Drawn]) -> list[Piece]:
        """One for each image, in the order of its places."""
        tile = self.tile
        drawn = [step[place] for place in self.places]
        return [Piece(name, index, tile, draw if tile else None) for index, draw in drawn]


class Cuts(Protocol):
    """Something that knows which part of the whole inputs of a step is a rank's."""

    def cut(self, inputs: Mapping[str, Tensor]) -> Inputs:
        """By micro-batch and name, of a step of as many images as there are."""


class OwnPart:
    """This rank's part of the steps of a training, whose whole inputs are as `specs` say; a step may have fewer images.

    Which images and pixels that is, is asked of the training itself: places are cut as pixels are, so that there is
    one rule for who gets what. Where the model answers for each pixel, its labels are the masks of the images, of
    which a rank reads its own part too. Where it answers for fewer pixels than an image has, each answer is for the
    pixel in its middle. Pixels without a class get the label `ignored`, which the loss leaves out (None: it has none).
    Raises ImageError where masks have ignored numbers and the loss has no such label.
    """

    def __init__(
        self,
        training: Cuts,
        images: LabelledImages,
        specs: Mapping[str, TensorSpec],
        ignored: int | None = IGNORED,
    ) -> None:
        check_ignored(images, ignored)
        self.training, self.images, self.specs = training, images, specs
        self.size = specs["images"].shape[2:]
        self.dtypes = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        self.ignored = ignored if ignored is not None and _holds(self.dtypes["labels"], ignored) else None
        self._parts: dict[int, dict[int, dict[str, _Part]]] = {}
        self.parts_of(specs["images"].shape[0])

    def parts_of(self, count: int) -> dict[int, dict[str, _Part]]:
        """By micro-batch and name: this rank's part of a step of `count` images."""
        if count not in self._parts:
            specs = {name: _of_images(spec, count, self.specs["images"].shape[0]) for name, spec in self.specs.items()}
            cut = [self.training.cut(_places(specs, axis)) for axis in _AXES]
            self._parts[count] = {
                number: {name: _part(*(places[number][name] for places in cut)) for name in cut[0][number]}
                for number in cut[0]
            }
        return self._parts[count]

    def read(self, step: Sequence[int], draws: Sequence[int] | None = None) -> Inputs:
        """The parts of the images with these numbers, each augmented from its draw.

        Raises ImageError where one cannot be read.
        """
        return self.joined(list(zip(step, draws or [None] * len(step), strict=True)), self.fetch)

    def pieces(self, step: Sequence[Drawn]) -> Iterator[Piece]:
        """All that is to be read for a step."""
        for parts in self.parts_of(len(step)).values():
            for name, part in parts.items():
                yield from part.pieces(name, step)

    def fetch(self, piece: Piece) -> Tensor:
        """Read a piece: (3, h, w) or (h, w) or (). Several threads may do so. Raises ImageError."""
        if piece.tile is None:
            return torch.tensor(self.images.label(piece.index))
        if (shape := self.images.shape(piece.index)) != self.size:
            raise ImageError(
                f"{self.images.name(piece.index)} has {shape[0]} x {shape[1]} pixels, but the training was made for "
                f"{self.size[0]} x {self.size[1]}. Have the images scaled or cut to that size (size=)."
            )
        if piece.name == "images":
            return self.images.part(piece.index, piece.tile, piece.draw)
        return self._with_ignored(self.images.mask(piece.index, piece.tile, piece.draw), piece.index)

    def _with_ignored(self, labels: Tensor, index: int) -> Tensor:
        """The labels of pixels, with that of the loss for those that have no class."""
        without = labels == IGNORED
        if self.ignored == IGNORED or not without.any():
            return labels
        if self.ignored is None:
            raise ImageError(f"{self.images.name(index)} has pixels without a class. {NOT_LEFT_OUT}")
        return labels.masked_fill(without, self.ignored)

    def joined(self, step: Sequence[Drawn], read: Callable[[Piece], Tensor]) -> Inputs:
        """The parts of a step, whose pieces are what `read` says."""
        return {
            number: {name: self._joined(name, part, part.pieces(name, step), read) for name, part in parts.items()}
            for number, parts in self.parts_of(len(step)).items()
        }

    def _joined(self, name: str, part: _Part, pieces: Sequence[Piece], read: Callable[[Piece], Tensor]) -> Tensor:
        found = torch.stack([read(piece) for piece in pieces])
        if name == "labels":
            found = _spread(found, part)
        return found.to(self.dtypes[name])


def _of_images(spec: TensorSpec, count: int, full: int) -> TensorSpec:
    """The spec of a step of `full` images, for `count` of them."""
    return replace(spec, shape=(spec.shape[0] * count // full, *spec.shape[1:])) if spec.shape else spec


def _holds(dtype: torch.dtype, label: int) -> bool:
    """Whether labels of a type can be this one: uint8 would make 156 of -100."""
    return dtype.is_floating_point or torch.iinfo(dtype).min <= label <= torch.iinfo(dtype).max


def _spread(found: Tensor, part: _Part) -> Tensor:
    """(N,) classes, or (N, h, w) of all pixels, as the labels of a part have them."""
    if len(part.rows):
        found = found[:, part.rows - part.rows[0]][:, :, part.cols - part.cols[0]]
    ones = [1] * (len(part.shape) - found.dim())
    return found.view(len(found), *ones, *found.shape[1:]).expand(part.shape)


def _places(specs: Mapping[str, TensorSpec], axis: int) -> dict[str, Tensor]:
    """Whole inputs that hold each entry's place along one axis of the images, without memory of their own."""
    images, labels = specs["images"].shape, specs["labels"].shape
    of_labels = 0 if len(labels) < 3 else axis
    return {
        "images": _along((images[0], 1, *images[2:]), axis, images[axis]),
        "labels": _along(labels, of_labels, images[of_labels]),
    }


def _along(shape: Sequence[int], axis: int, size: int) -> Tensor:
    """The middles of the entries, in places of an axis that has `size`: 0, 1, 2 ... where there are as many."""
    view = [1] * len(shape)
    view[axis] = shape[axis]
    middles = (2 * torch.arange(shape[axis]) + 1) * size // (2 * shape[axis])
    return middles.view(view).expand(*shape)


def _part(places: Tensor, rows: Tensor, cols: Tensor) -> _Part:
    of_images = places[(slice(None), *[0] * (places.dim() - 1))].tolist()
    if places.dim() < 3:
        return _Part(places.shape, of_images, places[:0], places[:0])
    return _Part(places.shape, of_images, rows.flatten(0, -3)[0, :, 0], cols.flatten(0, -3)[0, 0])
