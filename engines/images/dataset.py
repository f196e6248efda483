"""The interface of data sets for training: labelled images that are read in tiles, their subsets and their split."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Sequence
from operator import index as to_int
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.labels import find_label_specs, find_unchanged_labels, has_binary_labels
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Ref, TensorSpec
from mpi4dl_nb.engines.images.picture_reader import Pixels
from mpi4dl_nb.engines.program.rng import compute_step_seed, sample_uniform


class LabelledImages(ABC):
    """A data set of labelled images. It is the same on every rank, whichever tiles a rank reads.

    All images have one size, except in sets that random crops are taken from. `draw` is the random number that alone
    determines the augmentation of an image: tiles read with the same draw, on any ranks, belong to the same augmented
    image. None means no augmentation. A set needs neither masks nor slides: by default, each pixel has the class of its
    image, and each image is its own slide. Several threads at once may call `shape`, `part`, `mask` and `label`, those
    that read ahead (`workers`).
    """

    classes: int  # the number of classes
    label_classes: int | None = None  # of labels of whole images, if the masks have other classes
    names: Sequence[str] | None = None  # of the classes of whole images, in their order; None: they have none
    channels: int | None = None  # of what `part` returns; None: unknown before an image is read
    ignore: Sequence[int] = ()  # the numbers in masks that stand for no class

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of an image for messages, such as its path."""

    def slide(self, index: int) -> str:
        """Return a name of the specimen that an image was taken from: images of one slide resemble each other."""
        return self.name(index)

    @abstractmethod
    def shape(self, index: int) -> tuple[int, int]:
        """Return height and width in pixels of one image."""

    @abstractmethod
    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the pixels of `tile` of one image: (3, h, w), float32 from -1 to 1.

        Raises ImageError if the image cannot be read.
        """

    @abstractmethod
    def label(self, index: int) -> int:
        """Return the class of one image, from 0 to `classes` - 1."""

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the class of each pixel of `tile` of one image: (h, w), int64.

        Raises ImageError if the mask cannot be read.
        """
        return torch.full(tile.shape, self.label(index))

    def split(self, held_out: float = 0.2, seed: int = 0) -> tuple[Subset, Subset]:
        """Split into (training images, held-out images), with about a `held_out` share of the slides held out.

        See `split_indices`. Raises ImageError if one of the two would be empty.
        """
        slides = [self.slide(index) for index in range(len(self))]
        labels: list[int | None] = []
        for index in range(len(self)):
            try:
                labels.append(self.label(index))
            except ImageError:  # an image with only a mask has none
                labels.append(None)
        train, held = split_indices(slides, labels, held_out, seed)
        return Subset(self, train), Subset(self, held)


def shuffle_indices(count: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the shuffled image indices of one epoch; they depend only on count, seed and epoch.

    >>> shuffle_indices(5, seed=0, epoch=0) == shuffle_indices(5, seed=0, epoch=0)
    True
    """
    random = torch.Generator().manual_seed(compute_step_seed(seed, epoch))
    return torch.randperm(count, generator=random).tolist()


def parse_image_size(size: Any) -> tuple[int, int]:
    """Return (height, width) in pixels as whole numbers. Raises ImageError if it is no such pair.

    >>> parse_image_size([32, 48])
    (32, 48)
    """
    try:
        height, width = size
        sides = to_int(height), to_int(width)
    except (TypeError, ValueError):
        sides = 0, 0
    if min(sides) < 1:
        remedy = f"size=({size}, {size})" if isinstance(size, int) and size > 0 else "size=(32, 48)"
        raise ImageError(
            f"size={size!r} must be (height, width), two whole numbers of pixels, to which all images are brought: "
            f"such as {remedy}."
        )
    return sides


def check_channels(images: LabelledImages, channels: int) -> None:
    """Raise ImageError if a model takes images of another number of channels than these have."""
    of_images = getattr(images, "channels", None)
    if of_images not in (None, channels):
        raise ImageError(
            f"The images have {of_images} channels (red, green, blue; grey ones too), but the training was made for "
            f"{channels}. Give the model {of_images} input channels, and image_shape=(N, {of_images}, H, W)."
        )


def to_network_input(pixels: Pixels) -> Tensor:
    """Normalise bytes with mean and deviation 0.5, as in the predecessor: (h, w, 3) -> (3, h, w), float32."""
    part = np.array(pixels.transpose(2, 0, 1), order="C")  # a writable copy, which torch requires
    return torch.from_numpy(part).float().div_(255).sub_(0.5).div_(0.5)


# The label of pixels without a class, as determined by the training loss.


IGNORED = -100
"""The internal label of pixels outside of a mask or with an ignored number: PyTorch's default `ignore_index`."""


def find_ignored_label(graph: ModelGraph) -> int | None:
    """Return the label that a traced loss ignores; None if there is none, or several.

    It is the `ignore_index` of a cross-entropy or negative log-likelihood of the labels themselves, or a number that is
    no class and that the loss compares its labels with; `labels >= 0` ignores `IGNORED`.
    """
    shape = graph.specs[graph.prediction].shape
    classes = range(max(2, shape[1] if len(shape) > 1 else 2))
    ignored = {numbers.ignored for numbers in find_label_specs(graph)}
    # A loss may also compute its mask itself: `labels != 255`, or `labels >= 0`. An equality names the number, unless
    # it is a class. An inequality leaves out `IGNORED` if that is on another side of the bound than class 0.
    labels = find_unchanged_labels(graph)
    for node in graph.nodes:
        read, other = node.arguments.get("self"), node.arguments.get("other")
        if not isinstance(read, Ref) or read.name not in labels or not isinstance(other, int | float):
            continue
        operator = node.operator.split(".")[1]
        if operator in ("eq", "ne") and int(other) not in classes:
            ignored.add(int(other))
        elif (operator in ("ge", "lt") and IGNORED < other <= 0) or (operator in ("gt", "le") and IGNORED <= other < 0):
            ignored.add(IGNORED)
    return ignored.pop() if len(ignored) == 1 else None


def check_ignored(images: LabelledImages, label: int | None) -> None:
    """Raise ImageError if masks have ignored numbers (`ignore=`) but the loss has no ignored label."""
    if getattr(images, "ignore", ()) and label is None:
        raise ImageError(f"The masks have pixels without a class, ignore={images.ignore}. {NOT_LEFT_OUT}")


def check_label_shape(shape: Sequence[int]) -> None:
    """Raise ImageError if the labels of a training have axes besides batch, rows and columns, or have no axis.

    >>> check_label_shape((2,)), check_label_shape((2, 1)), check_label_shape((2, 1, 32, 48))
    (None, None, None)
    """
    # A class number would be broadcast along another axis, as that of one-hot labels: class 2 would become (2, 2, 2)
    # instead of (0, 0, 1).
    if not shape or any(size > 1 for size in (shape[1:-2] if len(shape) > 2 else shape[1:])):
        numbers = "(N,) or (N, 1)" if len(shape) < 3 else "(N, H, W) or (N, 1, H, W)"
        raise ImageError(
            f"The training was made for labels of shape {tuple(shape)}, but images of files have one class number per "
            f"image or pixel. Make the Training with labels= of shape {numbers} and a loss of class numbers, such as "
            "torch.nn.CrossEntropyLoss, or encode them in the loss (torch.nn.functional.one_hot)."
        )


def count_classes(images: LabelledImages, shape: Sequence[int]) -> int:
    """Return the number of classes of labels of `shape`, which are those of pixels or of whole images."""
    of_images = getattr(images, "label_classes", None)
    return images.classes if len(shape) > 2 or of_images is None else of_images


def check_classes(images: LabelledImages, graph: ModelGraph) -> None:
    """Raise ImageError if images have other channels than the model takes, or other classes than the loss takes."""
    labels = graph.inputs["labels"].shape
    check_channels(images, graph.inputs["images"].shape[1])
    check_ignored(images, find_ignored_label(graph))
    check_label_shape(labels)
    classes = count_classes(images, labels)
    if classes > 2 and has_binary_labels(graph):
        raise ImageError(
            f"The images have {classes} classes, but the binary cross-entropy takes labels from 0 to 1. Use "
            "torch.nn.CrossEntropyLoss, or change the labels in the loss, such as (labels == 2)."
        )
    few = min((numbers.classes for numbers in find_label_specs(graph)), default=classes)
    if few < classes:
        raise ImageError(
            f"The images have {classes} classes, but the loss takes numbers of {few}. Change the model's num_classes."
        )


def make_tensor(numbers: object) -> Tensor:
    """Return a tensor of numbers: a tensor itself, an array, nested lists. Raises what PyTorch raises for others.

    An array that PyTorch does not take as it lies in memory is copied: a flipped one, or one in the byte order of
    another machine, as files of astronomy have it.
    """
    if isinstance(numbers, np.ndarray) and (min(numbers.strides, default=0) < 0 or not numbers.dtype.isnative):
        numbers = numbers.astype(numbers.dtype.newbyteorder("="), order="C")
    return torch.as_tensor(numbers)


def cast_numbers(name: str, tensor: Tensor, spec: TensorSpec) -> Tensor:
    """Return the "images" or "labels" in the dtype of `spec`. Raises ImageError if a cast would change their meaning:

    for floats in place of integers or the reverse, or for complex numbers in place of real ones.
    """
    if tensor.is_floating_point() and not spec.is_floating:
        raise ImageError(
            f"{name} are {tensor.dtype}, but the training was made for {spec.dtype}. Give whole numbers, or "
            "make a Training with labels=EXAMPLE, a tensor like the labels of a batch."
        )
    if tensor.is_complex() and not spec.dtype.startswith("complex"):
        raise ImageError(
            f"{name} are {tensor.dtype}, but the training was made for {spec.dtype}: the imaginary parts would be "
            f"lost. Give {name}.abs(), or torch.view_as_real({name}) with its last axis as channels."
        )
    # A picture's bytes could be cast without an error; that they are not scaled would only show as poor learning.
    if name == "images" and spec.is_floating and not (tensor.is_floating_point() or tensor.is_complex()):
        scaled = "images.float() / 127.5 - 1, as images of files are given"
        if tensor.dtype not in (torch.uint8, torch.bool):
            scaled = f"images.float() / {torch.iinfo(tensor.dtype).max} (or by the largest number that yours can have)"
        raise ImageError(
            f"images are {tensor.dtype}, but the training computes in {spec.dtype}, and a cast would not scale "
            f"them. Give {scaled}, or images.float() for the numbers as they are."
        )
    cast = tensor.detach().to(getattr(torch, spec.dtype))
    # A whole number beyond the narrower type would wrap around in silence: -1 becomes 255 of uint8.
    if cast.dtype != tensor.dtype and not (spec.is_floating or cast.is_complex() or tensor.is_complex()):
        wrong = tensor.long()[cast.long() != tensor.long()]
        if wrong.numel():
            raise ImageError(
                f"{name} have the number {wrong[0].item()} as {tensor.dtype}, which does not fit into {spec.dtype}, "
                "for which the training was made. Change it, or make a Training with labels=EXAMPLE, a tensor like the "
                "labels of a batch."
            )
    return cast


NOT_LEFT_OUT = (
    "The loss does not leave these out: it would take their label for a class or a number. Use one with an "
    f"ignore_index, such as torch.nn.CrossEntropyLoss, or leave out where labels == {IGNORED} in the loss."
)


# Random images that need no storage: each pixel is a function of the seed, the image's index and its position.


_CPU = torch.device("cpu")


class SyntheticImages(LabelledImages):
    """`count` uniformly random images of `size` = (height, width) pixels, with random classes of images and pixels.

    Each pixel is a function of the seed, the image's index and its position, so that nothing is stored, and only the
    pixels of a tile are generated.

    >>> from mpi4dl_nb.engines.geometry.tiles import Span
    >>> images = SyntheticImages(count=2, size=(4, 6), classes=10)
    >>> whole = images.part(1, Tile.whole(4, 6))
    >>> torch.equal(images.part(1, Tile(Span(1, 3), Span(2, 6))), whole[:, 1:3, 2:6])
    True
    """

    channels = 3

    def __init__(self, count: int, size: tuple[int, int], classes: int, seed: int = 0) -> None:
        self.count, self.size, self.classes, self.seed = count, parse_image_size(size), classes, seed

    def __len__(self) -> int:
        return self.count

    def name(self, index: int) -> str:
        return f"random image {index}"

    def shape(self, index: int) -> tuple[int, int]:
        return self.size

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        return self._sample_uniform(3 * index, 3, tile).mul_(2).sub_(1).float()

    def label(self, index: int) -> int:
        return math.floor(sample_uniform(self.seed, 3 * index + 1, [], _CPU).item() * self.classes)

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        return self._sample_uniform(3 * index + 2, 1, tile)[0].mul_(self.classes).long()

    def _sample_uniform(self, number: int, channels: int, tile: Tile) -> Tensor:
        """Return uniform samples for a tile, (channels, h, w), float64 in [0, 1)."""
        spans = zip(self.size, (tile.rows, tile.cols), strict=True)
        ranges = [(channels, 0, channels), *((size, span.start, span.stop) for size, span in spans)]
        return sample_uniform(self.seed, number, ranges, _CPU)


# Split into training and held-out images by slide, so that no slide is used for both training and evaluation.


def split_indices(
    slides: Sequence[str], labels: Sequence[Hashable] | None = None, held_out: float = 0.2, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Return the indices of the training images and of the held-out images; about a `held_out` share of the slides.

    Image i belongs to slide `slides[i]` and class `labels[i]`. All images of a slide are on the same side, so that no
    slide is used for both training and evaluation. The split is stratified: the same share of the slides with the same
    set of classes is held out, at least one of two or more. The same slides, labels and seed give the same sides, in
    any order of the images. Raises ImageError if a side would be empty.

    >>> split_indices(["a", "a", "b", "c"], held_out=0.3)
    ([0, 1, 2], [3])
    """
    if not 0 < held_out < 1:
        raise ImageError(f"held_out={held_out} must be a share of the slides, between 0 and 1.")
    classes: dict[str, set[str]] = defaultdict(set)
    for slide, label in zip(slides, labels or [None] * len(slides), strict=True):
        classes[slide].add(str(label))
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for slide in sorted(classes):
        alike[tuple(sorted(classes[slide]))].append(slide)
    # Everything is sorted before it is shuffled, so that the order in which files were listed makes no difference.
    judged: set[str] = set()
    for group_index, (_, group) in enumerate(sorted(alike.items())):
        count = min(max(round(held_out * len(group)), 1), len(group) - 1)
        judged |= {group[index] for index in shuffle_indices(len(group), seed, group_index)[:count]}
    if not judged:
        raise ImageError(
            f"The images are of {len(classes)} slides, no two of them of the same classes, so none can be held out. "
            "Add slides, or name the slides of the images where their files are not one slide each."
        )
    sides = [[index for index, slide in enumerate(slides) if (slide in judged) == side] for side in (False, True)]
    return sides[0], sides[1]


# Subsets of a data set.


class Subset(LabelledImages):
    """The data set of the images with the indices `numbers`, in that order.

    Raises ImageError if an index is out of range.
    """

    def __init__(self, images: LabelledImages, numbers: Sequence[int]) -> None:
        wrong = [index for index in numbers if not 0 <= index < len(images)]
        if wrong:
            raise ImageError(f"There is no image {wrong[0]} among {len(images)}: they go from 0 to {len(images) - 1}.")
        self.images, self.numbers = images, tuple(numbers)
        self.classes, self.ignore = images.classes, getattr(images, "ignore", ())
        for name in ("names", "channels", "label_classes"):  # which not every set has
            setattr(self, name, getattr(images, name, None))

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, index: int) -> str:
        return self.images.name(self.numbers[index])

    def slide(self, index: int) -> str:
        return self.images.slide(self.numbers[index])

    def shape(self, index: int) -> tuple[int, int]:
        return self.images.shape(self.numbers[index])

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        return self.images.part(self.numbers[index], tile, draw)

    def label(self, index: int) -> int:
        return self.images.label(self.numbers[index])

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        return self.images.mask(self.numbers[index], tile, draw)
