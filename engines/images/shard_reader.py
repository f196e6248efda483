"""Reading of one rank's shard of the images of a step: only its own pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.labels import LabelSpec
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.images.dataset import (
    IGNORED,
    NOT_LEFT_OUT,
    LabelledImages,
    cast_numbers,
    check_ignored,
    check_label_shape,
    count_classes,
    make_tensor,
    shuffle_indices,
)
from mpi4dl_nb.engines.program.rng import compute_step_seed
from mpi4dl_nb.engines.program.worker import Inputs

# Sampler of the images of each training step; it depends only on the seed, not on plan, ranks or workers.


Sample = tuple[int, int | None]
"""The index of an image and the draw of its augmentation."""

_MOST = 1 << 53


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The position of a training in its images: after `step` steps of an epoch, at `position` in the epoch's order.

    `skipped` are the indices of the images that are left out, in the order in which they were found.
    """

    seed: int
    epoch: int = 0
    step: int = 0
    position: int = 0
    skipped: tuple[int, ...] = ()

    def to_dict(self, images: int) -> dict[str, Any]:
        """Return the state as plain JSON, for a training on a given number of images.

        >>> SamplerState.of(SamplerState(seed=3, epoch=1, step=2, position=4).to_dict(images=9)).step
        2
        """
        return {**asdict(self), "skipped": list(self.skipped), "images": images}

    @classmethod
    def of(cls, state: Any) -> SamplerState:
        """Return the state from the result of `to_dict`. Raises ValueError or TypeError if it is invalid."""
        # The state comes from a checkpoint, and is checked as any file is. A step takes at least one image, so that
        # `step` never exceeds `position`.
        if not isinstance(state, dict) or not isinstance(state.get("skipped"), list):
            raise TypeError("where the training is in its images is no dict with a list of those that are left out")
        numbers: list[Any] = [state.get(name) for name in ("images", "seed", "epoch", "step", "position")]
        if wrong := [value for value in (*numbers, *state["skipped"]) if type(value) is not int]:
            raise TypeError(f"{str(wrong[0])[:20]!r} is no number of an image, epoch or step")
        images, seed, epoch, step, position = numbers
        if not (0 <= step <= position <= images and 0 <= epoch < _MOST and abs(seed) < 1 << 64):
            raise ValueError(f"there is no step {step} at image {position} of {images} in epoch {epoch}")
        skipped = tuple(state["skipped"])
        if len(set(skipped)) != len(skipped) or not all(0 <= index < images for index in skipped):
            raise ValueError(f"some of the images that are left out are none of the {images}")
        return cls(seed, epoch, step, position, skipped)

    @property
    def next_epoch(self) -> SamplerState:
        """The state at the beginning of the next epoch, with the same skipped images."""
        return SamplerState(self.seed, self.epoch + 1, skipped=self.skipped)


class Sampler:
    """Steps of `count` images out of `total`, in epochs of at most `steps` steps.

    The images left over at the end of an epoch form a smaller step, of a multiple of `unit` images; with `drop_last`
    they are dropped until the next epoch. The first step of an epoch is always full.

    >>> order, start = Sampler(total=5, count=2), SamplerState(seed=0)
    >>> step, place = order.get_step(start)
    >>> [index for index, _ in step] == list(shuffle_indices(5, 0, 0))[:2]
    True
    >>> step, last = order.get_step(place)
    >>> step, end = order.get_step(last)
    >>> len(step), order.get_step(end)
    (1, None)
    >>> Sampler(total=5, count=2, drop_last=True).get_step(last) is None
    True
    """

    def __init__(
        self, total: int, count: int, steps: int | None = None, drop_last: bool = False, unit: int = 1
    ) -> None:
        self.total, self.count, self.steps = total, count, steps
        self.drop_last, self.unit = drop_last, unit
        self._made: tuple[tuple[int, int], Sequence[int]] | None = None

    def get_step(self, place: SamplerState) -> tuple[list[Sample], SamplerState] | None:
        """Return the images of the step at `place`, each with its draw, and the state after it.

        Returns None if the epoch has no further step. An image's draw depends only on seed, epoch and image.
        """
        # An epoch's order is one permutation; a step takes the next `count` images that are not skipped. Steps are not
        # numbered in advance, so that a bad image moves the later ones and leaves no gap:
        #
        #     order      4 0 7 2 9 1 ...   count 2     after 7 has turned out to be bad
        #     steps     |4 0|7 2|9 1|                 |4 0|2 9|1 ...
        #     position   0   2   4   6                 0   2   5
        if self.steps is not None and place.step >= self.steps:
            return None
        key = place.seed, place.epoch
        if self._made is None or self._made[0] != key:
            self._made = key, shuffle_indices(self.total, *key)
        order, skipped = self._made[1], set(place.skipped)
        readable = (at for at in range(place.position, self.total) if order[at] not in skipped)
        positions = list(islice(readable, self.count))
        if (left := len(positions)) < self.count:
            positions = [] if self.drop_last or not place.step else positions[: left - left % self.unit]
        if not positions:
            return None
        seed = compute_step_seed(*key)
        samples: list[Sample] = [(order[at], compute_step_seed(seed, 1 + order[at])) for at in positions]
        return samples, replace(place, step=place.step + 1, position=positions[-1] + 1)

    def skip_finished_epoch(self, place: SamplerState) -> SamplerState:
        """Return `place`, or the beginning of the next epoch if its epoch has no step left."""
        return place.next_epoch if place.step and self.get_step(place) is None else place

    def iterate_steps(self, place: SamplerState) -> Iterator[list[Sample]]:
        """Yield the steps from `place` on, epoch after epoch, with the bad images known so far skipped."""
        while (coming := self.get_step(place)) is not None or place.step:
            if coming is None:
                place = place.next_epoch
            else:
                step, place = coming
                yield step


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One unit of reading for the input `name`, "images" or "labels".

    It is the pixels of `tile` of one image or its mask, or, if `tile` is None, the one label of the image.
    """

    name: str
    index: int
    tile: Tile | None
    draw: int | None


@dataclass(frozen=True)
class _MicroBatchShard:
    """A rank's shard of the images or labels of a micro-batch: positions in the step, and pixels of each image.

    `rows` and `cols` are ascending pixel indices of the images; both are empty for labels per image.
    """

    shape: Sequence[int]
    places: Sequence[int]
    rows: Tensor
    cols: Tensor

    @property
    def tile(self) -> Tile | None:
        """The smallest tile that contains the shard's pixels; None for labels per image."""
        if not len(self.rows):
            return None
        return Tile(*(Span(int(px[0]), int(px[-1]) + 1) for px in (self.rows, self.cols)))

    def make_read_requests(self, name: str, step: Sequence[Sample]) -> list[ReadRequest]:
        """Return one request per image, in the order of `places`."""
        tile = self.tile
        drawn = [step[position] for position in self.places]
        return [ReadRequest(name, index, tile, draw if tile else None) for index, draw in drawn]


class ShardReader:
    """Reads this rank's shard of the steps of a training; `specs` describe the whole inputs of a full step.

    The training itself determines the shard: `cut`, which returns this rank's shard of whole inputs by micro-batch and
    name, is applied to tensors of indices instead of pixels, so that a single rule distributes the data. If the model
    predicts per pixel, the labels are the images' masks, of which a rank also reads only its shard. If it predicts at a
    lower resolution, each prediction belongs to the pixel in its middle. Pixels without a class get the label
    `ignored`, which the loss ignores (None: the loss has no such label).
    Raises ImageError if masks have ignored numbers and the loss has no such label, or if the labels are no class
    numbers of images or pixels (`check_label_shape`).
    """

    def __init__(
        self,
        cut: Callable[[Mapping[str, Tensor]], Inputs],
        images: LabelledImages,
        specs: Mapping[str, TensorSpec],
        ignored: int | None = IGNORED,
    ) -> None:
        check_ignored(images, ignored)
        check_label_shape(specs["labels"].shape)
        self.cut, self.images, self.specs = cut, images, specs
        self.size = specs["images"].shape[2:]
        dtype = getattr(torch, specs["labels"].dtype)
        if ignored is not None and not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            if not limits.min <= ignored <= limits.max:  # in uint8, -100 would become class 156
                ignored = None
        self.ignored = ignored
        self._parts: dict[int, dict[int, dict[str, _MicroBatchShard]]] = {}
        self.get_shards(specs["images"].shape[0])

    def get_shards(self, count: int) -> dict[int, dict[str, _MicroBatchShard]]:
        """Return this rank's shard of a step of `count` images, by micro-batch and name; cached per `count`."""
        if count not in self._parts:
            # Three whole inputs, whose entries are their own image, row and column, are cut as pixels would be. What
            # arrives in this rank's shard are the places that it has to read. Say, of two images of 4 x 4 px:
            #
            #     rows                columns             cut: a rank has the lower right quarter of image 1
            #     0 0 0 0             0 1 2 3
            #     1 1 1 1             0 1 2 3             images 1 1    rows 2 2    columns 2 3
            #     2 2 2 2             0 1 2 3                    1 1         3 3            2 3
            #     3 3 3 3             0 1 2 3
            #
            # The inputs are expanded views, so that those of any size take no memory.
            full = self.specs["images"].shape[0]
            shapes = {name: spec.shape for name, spec in self.specs.items()}
            shapes = {name: (of[0] * count // full, *of[1:]) if of else of for name, of in shapes.items()}
            images, labels = shapes["images"], shapes["labels"]
            cut = []
            for axis in (0, -2, -1):
                of_labels = 0 if len(labels) < 3 else axis  # one label per image has no rows and columns
                cut.append(
                    self.cut(
                        {
                            "images": _make_axis_index((images[0], 1, *images[2:]), axis, images[axis]),
                            "labels": _make_axis_index(labels, of_labels, images[of_labels]),
                        }
                    )
                )
            self._parts[count] = {
                micro_batch: {
                    name: _make_shard(*(places[micro_batch][name] for places in cut)) for name in cut[0][micro_batch]
                }
                for micro_batch in cut[0]
            }
        return self._parts[count]

    def make_read_requests(self, step: Sequence[Sample]) -> Iterator[ReadRequest]:
        """Yield everything that is to be read for a step."""
        for parts in self.get_shards(len(step)).values():
            for name, part in parts.items():
                yield from part.make_read_requests(name, step)

    def fetch(self, piece: ReadRequest) -> Tensor:
        """Read one piece, (3, h, w), (h, w) or (), in the type of its input. Thread-safe.

        Raises ImageError if it cannot be read, or is not what the training takes: an image of another size or number of
        channels, numbers of another kind, or a label that is none of the classes.
        """
        images, index, tile = self.images, piece.index, piece.tile
        if tile is None:
            return self._convert_labels(index, images.label(index), ())
        if (shape := tuple(images.shape(index))) != self.size:
            raise ImageError(
                f"{images.name(index)} has {' x '.join(map(str, shape))} pixels, but the training was made for "
                f"{self.size[0]} x {self.size[1]}. Have the images scaled or cut to that size (size=)."
            )
        if piece.name == "labels":
            return self._convert_labels(index, images.mask(index, tile, piece.draw), tile.shape)
        pixels = make_tensor(images.part(index, tile, piece.draw))
        wanted = self.specs["images"].shape[1]
        if pixels.dim() == 3 and len(pixels) != wanted:  # one channel would be copied into each without an error
            raise ImageError(
                f"{images.name(index)} has {len(pixels)} channels, but the training was made for {wanted}: its images "
                f"must have {wanted}, or the model and image_shape {len(pixels)}."
            )
        self._check_shape(index, pixels, (wanted, *tile.shape))
        return self._cast(index, "images", pixels)

    def _convert_labels(self, index: int, labels: Any, shape: tuple[int, ...]) -> Tensor:
        """Return labels in the type of their input; those without a class become the label that the loss ignores.

        Raises ImageError for another shape, for class numbers beyond the classes, or if the loss or the type has no
        such label.
        """
        labels, spec, name = make_tensor(labels), self.specs["labels"], self.images.name(index)
        self._check_shape(index, labels, shape)
        if labels.is_floating_point() or labels.is_complex():
            return self._cast(index, "labels", labels)  # amounts, and no class numbers
        labels = labels.long()  # before -100 is compared with: in uint8, that would be 156
        without = labels == IGNORED
        if self.ignored is None and without.any():
            raise ImageError(f"{name} has {'pixels without a' if shape else 'no'} class. {NOT_LEFT_OUT}")
        if self.ignored not in (None, IGNORED):
            labels = labels.masked_fill(without, self.ignored)
        classes = count_classes(self.images, spec.shape)
        if (wrong := LabelSpec(classes, self.ignored).find_invalid(labels)).numel():
            raise ImageError(
                f"{name} has the label {int(wrong.max())}, but its data set has {classes} classes, 0 to {classes - 1}. "
                "Change the label, or the data set's number of classes; if it is an amount, give it as a float."
            )
        return self._cast(index, "labels", labels)

    def _cast(self, index: int, name: str, numbers: Tensor) -> Tensor:
        try:
            return cast_numbers(name, numbers, self.specs[name])
        except ImageError as error:
            raise ImageError(f"{self.images.name(index)}: {error}") from None

    def _check_shape(self, index: int, found: Tensor, wanted: tuple[int, ...]) -> None:
        if tuple(found.shape) != wanted:  # of a whole image in place of a tile, the corner would be trained on
            what = "the pixels of the tile that was asked for" if wanted else "one number"
            raise ImageError(
                f"{self.images.name(index)}: {type(self.images).__name__} has returned numbers of the shape "
                f"{tuple(found.shape)}, but {wanted} is wanted: {what}."
            )

    def assemble(self, step: Sequence[Sample], read: Callable[[ReadRequest], Tensor]) -> Inputs:
        """Return this rank's shard of a step from the pieces that `read` returns."""
        shards: dict[int, dict[str, Tensor]] = {}
        for micro_batch, parts in self.get_shards(len(step)).items():
            shards[micro_batch] = {}
            for name, part in parts.items():
                tensor = torch.stack([read(piece) for piece in part.make_read_requests(name, step)])
                if name == "labels":
                    if len(part.rows):
                        # A model of lower resolution uses some pixels of the tile that was read.
                        tensor = tensor[:, part.rows - part.rows[0]][:, :, part.cols - part.cols[0]]
                    # (N,) or (N, h, w) is broadcast to the loss's shape, such as (N, 1, h, w).
                    ones = [1] * (len(part.shape) - tensor.dim())
                    tensor = tensor.view(len(tensor), *ones, *tensor.shape[1:]).expand(part.shape)
                shards[micro_batch][name] = tensor
        return shards


def _make_axis_index(shape: Sequence[int], axis: int, size: int) -> Tensor:
    """Return the index of the pixel in the middle of each entry along `axis`, for an image axis of `size` pixels.

    The indices are 0, 1, 2 ... if the axis has `size` entries.
    """
    view = [1] * len(shape)
    view[axis] = shape[axis]
    middles = (2 * torch.arange(shape[axis]) + 1) * size // (2 * shape[axis])
    return middles.view(view).expand(*shape)


def _make_shard(places: Tensor, rows: Tensor, cols: Tensor) -> _MicroBatchShard:
    first: tuple[slice | int, ...] = (slice(None), *[0] * (places.dim() - 1))
    of_images = places[first].tolist()
    if places.dim() < 3:
        return _MicroBatchShard(places.shape, of_images, places[:0], places[:0])
    return _MicroBatchShard(places.shape, of_images, rows.flatten(0, -3)[0, :, 0], cols.flatten(0, -3)[0, 0])
