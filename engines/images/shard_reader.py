"""What one rank reads of the images of a step: its own pixels, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engines.errors import ImageError
from engines.images.dataset import LabelledImages
from engines.images.ignored_label import IGNORED, NOT_LEFT_OUT, check_ignored
from engines.images.sampler import Sample
from engines.layer.graph import TensorSpec
from engines.program.worker import Inputs
from engines.spatial.tiles import Span, Tile

__all__ = ["ReadRequest", "ShardReader"]

_AXES = (0, -2, -1)  # of images, rows and columns


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What is read at once: of the `images` or `labels` of one image the pixels of `tile`, or its one label."""

    name: str
    index: int
    tile: Tile | None
    draw: int | None


@dataclass(frozen=True)
class _MicroBatchShard:
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

    def make_read_requests(self, name: str, step: Sequence[Sample]) -> list[ReadRequest]:
        """One for each image, in the order of its places."""
        tile = self.tile
        drawn = [step[place] for place in self.places]
        return [ReadRequest(name, index, tile, draw if tile else None) for index, draw in drawn]


class InputCutter(Protocol):
    """Something that knows which part of the whole inputs of a step is a rank's."""

    def cut(self, inputs: Mapping[str, Tensor]) -> Inputs:
        """By micro-batch and name, of a step of as many images as there are."""


class ShardReader:
    """This rank's part of the steps of a training, whose whole inputs are as `specs` say; a step may have fewer images.

    Which images and pixels that is, is asked of the training itself: places are cut as pixels are, so that there is
    one rule for who gets what. Where the model answers for each pixel, its labels are the masks of the images, of
    which a rank reads its own part too. Where it answers for fewer pixels than an image has, each answer is for the
    pixel in its middle. Pixels without a class get the label `ignored`, which the loss leaves out (None: it has none).
    Raises ImageError where masks have ignored numbers and the loss has no such label.
    """

    def __init__(
        self,
        training: InputCutter,
        images: LabelledImages,
        specs: Mapping[str, TensorSpec],
        ignored: int | None = IGNORED,
    ) -> None:
        check_ignored(images, ignored)
        self.training, self.images, self.specs = training, images, specs
        self.size = specs["images"].shape[2:]
        self.dtypes = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        self.ignored = ignored if ignored is not None and _can_hold(self.dtypes["labels"], ignored) else None
        self._parts: dict[int, dict[int, dict[str, _MicroBatchShard]]] = {}
        self.get_shards(specs["images"].shape[0])

    def get_shards(self, count: int) -> dict[int, dict[str, _MicroBatchShard]]:
        """By micro-batch and name: this rank's part of a step of `count` images."""
        if count not in self._parts:
            specs = {
                name: _with_batch_size(spec, count, self.specs["images"].shape[0]) for name, spec in self.specs.items()
            }
            cut = [self.training.cut(_make_index_inputs(specs, axis)) for axis in _AXES]
            self._parts[count] = {
                number: {name: _make_shard(*(places[number][name] for places in cut)) for name in cut[0][number]}
                for number in cut[0]
            }
        return self._parts[count]

    def read(self, step: Sequence[int], draws: Sequence[int] | None = None) -> Inputs:
        """The parts of the images with these numbers, each augmented from its draw.

        Raises ImageError where one cannot be read.
        """
        return self.assemble(list(zip(step, draws or [None] * len(step), strict=True)), self.fetch)

    def make_read_requests(self, step: Sequence[Sample]) -> Iterator[ReadRequest]:
        """All that is to be read for a step."""
        for parts in self.get_shards(len(step)).values():
            for name, part in parts.items():
                yield from part.make_read_requests(name, step)

    def fetch(self, piece: ReadRequest) -> Tensor:
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

    def assemble(self, step: Sequence[Sample], read: Callable[[ReadRequest], Tensor]) -> Inputs:
        """The parts of a step, whose pieces are what `read` says."""
        return {
            number: {
                name: self._assemble_input(name, part, part.make_read_requests(name, step), read)
                for name, part in parts.items()
            }
            for number, parts in self.get_shards(len(step)).items()
        }

    def _assemble_input(
        self, name: str, part: _MicroBatchShard, pieces: Sequence[ReadRequest], read: Callable[[ReadRequest], Tensor]
    ) -> Tensor:
        found = torch.stack([read(piece) for piece in pieces])
        if name == "labels":
            found = _expand_labels(found, part)
        return found.to(self.dtypes[name])


def _with_batch_size(spec: TensorSpec, count: int, full: int) -> TensorSpec:
    """The spec of a step of `full` images, for `count` of them."""
    return replace(spec, shape=(spec.shape[0] * count // full, *spec.shape[1:])) if spec.shape else spec


def _can_hold(dtype: torch.dtype, label: int) -> bool:
    """Whether labels of a type can be this one: uint8 would make 156 of -100."""
    return dtype.is_floating_point or torch.iinfo(dtype).min <= label <= torch.iinfo(dtype).max


def _expand_labels(found: Tensor, part: _MicroBatchShard) -> Tensor:
    """(N,) classes, or (N, h, w) of all pixels, as the labels of a part have them."""
    if len(part.rows):
        found = found[:, part.rows - part.rows[0]][:, :, part.cols - part.cols[0]]
    ones = [1] * (len(part.shape) - found.dim())
    return found.view(len(found), *ones, *found.shape[1:]).expand(part.shape)


def _make_index_inputs(specs: Mapping[str, TensorSpec], axis: int) -> dict[str, Tensor]:
    """Whole inputs that hold each entry's place along one axis of the images, without memory of their own."""
    images, labels = specs["images"].shape, specs["labels"].shape
    of_labels = 0 if len(labels) < 3 else axis
    return {
        "images": _make_axis_index((images[0], 1, *images[2:]), axis, images[axis]),
        "labels": _make_axis_index(labels, of_labels, images[of_labels]),
    }


def _make_axis_index(shape: Sequence[int], axis: int, size: int) -> Tensor:
    """The middles of the entries, in places of an axis that has `size`: 0, 1, 2 ... where there are as many."""
    view = [1] * len(shape)
    view[axis] = shape[axis]
    middles = (2 * torch.arange(shape[axis]) + 1) * size // (2 * shape[axis])
    return middles.view(view).expand(*shape)


def _make_shard(places: Tensor, rows: Tensor, cols: Tensor) -> _MicroBatchShard:
    of_images = places[(slice(None), *[0] * (places.dim() - 1))].tolist()
    if places.dim() < 3:
        return _MicroBatchShard(places.shape, of_images, places[:0], places[:0])
    return _MicroBatchShard(places.shape, of_images, rows.flatten(0, -3)[0, :, 0], cols.flatten(0, -3)[0, 0])
