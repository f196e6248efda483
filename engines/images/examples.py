"""Data set of images in files with their annotations (class, mask, region, slide), brought to one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpi4dl_nb.engines.checks import check_choice
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.dataset import IGNORED, LabelledImages, parse_image_size, to_network_input
from mpi4dl_nb.engines.images.mask_file import Ignore, MaskFile, parse_ignored_numbers, read_mask_shape
from mpi4dl_nb.engines.images.picture import crop_picture, open_cached, read_shape
from mpi4dl_nb.engines.images.picture_reader import Picture, Pixels

# One image in a file, with its annotations.


_LARGEST = 64  # the most that a region, with white around the picture, may be larger than the picture

Shape = tuple[int, int]


class ShapeCache:
    """Heights and widths of pictures and masks, each read once: a table may name one slide in thousands of lines.

    It is used for one check and then dropped, since files may change.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Path, int | None], Shape | ImageError] = {}

    def read(self, path: Path, level: int | None) -> Shape:
        """Return the shape of one level of a picture, or of a mask (None). Raises ImageError, naming the file."""
        if (path, level) not in self._found:
            try:
                self._found[path, level] = read_mask_shape(path) if level is None else read_shape(path, level)
            except ImageError as error:
                self._found[path, level] = error
        shape = self._found[path, level]
        if isinstance(shape, ImageError):
            raise ImageError(str(shape))
        return shape


@dataclass(frozen=True, slots=True)
class Example:
    """One image: a file, or a `region` of it in pixels of `level`, with its class and mask.

    `slide` names the specimen that it was taken from: images of one slide resemble each other.
    """

    path: Path
    label: int | None = None
    mask: Path | None = None
    region: Tile | None = None
    level: int = 0
    slide: str = ""

    @property
    def name(self) -> str:
        """The path, with the region and level unless they are the whole of level 0."""
        spans = (self.region.rows, self.region.cols) if self.region else ()
        at = ", ".join(f"{span.start}:{span.stop}" for span in spans)
        return f"{self.path}" + (f"[{at}]" if at else "") + (f" of level {self.level}" if self.level else "")

    @property
    def shape(self) -> Shape:
        """Height and width in pixels. Raises ImageError, naming the file, if it cannot be read."""
        return self.region.size_px if self.region else read_shape(self.path, self.level)

    def open_picture(self) -> Picture:
        """Open the image. Raises ImageError, naming the file, if it cannot be read or has no such region."""
        picture = open_cached(self.path)
        tile = self.region or (Tile.whole(*picture.shape(self.level)) if self.level else None)
        if tile is None:
            return picture
        self._check_size(picture.shape(self.level))
        return crop_picture(picture, tile.rows.start, tile.cols.start, *tile.size_px, self.level)

    def find_mask_origin(self, mask: Shape, source: Shape, shapes: ShapeCache | None = None) -> tuple[int, int]:
        """Return the pixel of a mask of shape `mask` at the first pixel of the image, which has shape `source`.

        A mask covers the region or the whole picture. Raises ImageError if its shape is that of neither.
        """
        if mask == source:
            return 0, 0
        whole = (shapes or ShapeCache()).read(self.path, self.level)
        if self.region and mask == whole:
            return self.region.rows.start, self.region.cols.start
        of_region = f", and {self.name} has {source[0]} x {source[1]}" if self.region else ""
        raise ImageError(
            f"The mask {self.mask} has {mask[0]} x {mask[1]} pixels, but {self.path} has "
            f"{whole[0]} x {whole[1]}{of_region}. Make the mask as large as its image."
        )

    def check(self, shapes: ShapeCache) -> None:
        """Raise ImageError if the image or its mask is found unreadable without reading pixels."""
        # Of a PNG or JPEG only the header is read here, so that a table of thousands of them is checked in seconds.
        whole = source = shapes.read(self.path, self.level)
        if self.region:
            source, (rows, cols) = self.region.size_px, (self.region.rows, self.region.cols)
            if rows.stop <= 0 or cols.stop <= 0 or rows.start >= whole[0] or cols.start >= whole[1]:
                self.open_picture()  # raises the error for a region outside of the picture
            self._check_size(whole)
        if self.mask:
            self.find_mask_origin(shapes.read(self.mask, None), source, shapes)

    def _check_size(self, whole: Shape) -> None:
        """Raise ImageError if the region is far too large: with one digit too many, its white would fill the memory."""
        if self.region and self.region.pixels > _LARGEST * whole[0] * whole[1]:
            raise ImageError(
                f"The region of {self.region.shape[0]} x {self.region.shape[1]} px in {self.path} is more than "
                f"{_LARGEST} times as large as the whole, which has {whole[0]} x {whole[1]}. Make it smaller."
            )


FITS = ("scale", "crop")
"""How images are brought to one size: scaled regardless of aspect ratio, or cropped in the centre and padded white."""

_LISTED = 5  # bad images that an error lists; further ones are only counted
_SHOWN = 20  # classes in a repr


class ExampleImages(LabelledImages):
    """Examples with the class names `names`, brought to `size` = (height, width) as `fit` says (see `FITS`).

    Images are read lazily, and only the requested pixels. Without `size` each image keeps its own, for random crops.
    `mask_classes`, `threshold` and `ignore` apply to the masks, if there are any (see `MaskFile`).
    """

    names: tuple[str, ...]
    channels = 3

    def __init__(
        self,
        examples: Sequence[Example],
        names: Sequence[str],
        size: tuple[int, int] | None,
        fit: str = "scale",
        mask_classes: int | None = None,
        threshold: int | None = None,
        ignore: Ignore = None,
    ) -> None:
        size = size if size is None else parse_image_size(size)
        check_choice("fit", fit, FITS, ImageError)
        self.examples, self.names, self.size = tuple(examples), tuple(names), size
        self.fit, self.mask_classes, self.threshold = fit, mask_classes, threshold
        # Those of the masks if there are any, else of the labels, whether or not an image has them.
        self.classes, self.label_classes = mask_classes or len(names), len(names) or None
        self.ignore = parse_ignored_numbers(ignore)

    def __repr__(self) -> str:
        size = "of their own sizes" if self.size is None else f"of {self.size[0]} x {self.size[1]} px ({self.fit})"
        some = ", ".join(f"{index}: {name}" for index, name in enumerate(self.names[:_SHOWN]))
        more = ", ..." * (len(self.names) > _SHOWN)
        return f"<{len(self)} images {size}, {self.classes} classes: {some}{more}>"

    def __len__(self) -> int:
        return len(self.examples)

    def name(self, index: int) -> str:
        return self.examples[index].name

    def slide(self, index: int) -> str:
        return self.examples[index].slide or str(self.examples[index].path)

    def shape(self, index: int) -> tuple[int, int]:
        return self.size or self.examples[index].shape

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        picture = self.examples[index].open_picture()

        def read(tile: Tile, above: int = 0, before: int = 0) -> Pixels:
            return picture.read(tile.rows.start + above, tile.cols.start + before, *tile.size_px)

        source = picture.shape()
        if self.size and self.fit == "scale":
            return to_network_input(resize_tile(read, source, self.size, tile))
        return to_network_input(read(tile, *self._compute_margins(source)))

    def label(self, index: int) -> int:
        """Return the class of an image. Raises ImageError if it has only a mask."""
        label = self.examples[index].label
        if label is None:
            raise ImageError(
                f"{self.name(index)} has a mask but no label, and the model answers once for an image. "
                "Add a label, or use a model that answers for each pixel."
            )
        return label

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        """Return the classes of a tile, (h, w), int64: those of the mask, or without a mask the image's class.

        Pixels outside of the image, and those of ignored numbers, are `IGNORED`. Raises ImageError, naming the file,
        if the mask cannot be read, has a wrong size, or holds numbers that are no classes.
        """
        example = self.examples[index]
        source = example.shape
        mask = example.mask and MaskFile(example.mask, self.classes, self.threshold, self.ignore)
        covered = mask.shape if mask else source
        margins, origin = self._compute_margins(source), example.find_mask_origin(covered, source)
        # Per axis: which row (or column) of the mask each row of the tile shows, and -1 outside of the image.
        #
        #     tile  ->  image of `size`  --scale, or + margin-->  source  --+ origin-->  mask
        #
        # A mask is not interpolated: the mean of classes 1 and 3 is not class 2. Without a mask, all of the image
        # has its class.
        places = []
        for axis, span in enumerate((tile.rows, tile.cols)):
            if self.size and self.fit == "scale":
                at = find_nearest_pixels(source[axis], self.size[axis], span)
            else:
                at = np.arange(span.start, span.stop) + margins[axis]
            places.append(np.where((at >= 0) & (at < source[axis]), at + origin[axis], -1))
        # One rectangle from the first to the last wanted pixel is read, since a file is read by rectangles. Its pixels
        # are then picked, which repeats them where the image is larger than the mask's region, and skips them where it
        # is smaller.
        classes = np.full(tile.shape, IGNORED)
        inside = [(at >= 0) & (at < side) for at, side in zip(places, covered, strict=True)]
        rows, cols = (at[within] for at, within in zip(places, inside, strict=True))
        if not mask:
            classes[np.ix_(*inside)] = self.label(index)
        elif len(rows) and len(cols):
            read = mask.read(Tile(*(Span(int(at[0]), int(at[-1]) + 1) for at in (rows, cols))))
            classes[np.ix_(*inside)] = read[rows - rows[0]][:, cols - cols[0]]
        return torch.from_numpy(classes)

    def check(self) -> None:
        """Raise ImageError, naming the images, if some are found unreadable without reading their pixels."""
        bad, shapes = [], ShapeCache()
        for example in self.examples:
            try:
                example.check(shapes)
            except ImageError as error:
                bad.append(str(error))
        if bad:
            more = f"\nAnd {len(bad) - _LISTED} others." if len(bad) > _LISTED else ""
            raise ImageError("\n".join(bad[:_LISTED]) + more)

    def _compute_margins(self, source: tuple[int, int]) -> tuple[int, int]:
        """Return the source's rows and columns before the centre crop; negative if the source is smaller."""
        if self.size is None:
            return 0, 0
        return (source[0] - self.size[0]) // 2, (source[1] - self.size[1]) // 2


# Tile-wise resizing of pictures: each tile is bit-identical to the same tile of the resized whole picture. Only the
# source pixels that a tile needs are read. The filter is Pillow's bilinear one, which averages when shrinking:
# fixed-point weights, columns before rows, rounding to bytes in between. Pillow itself cannot resize a tile this way:
# it handles the borders of a box in single precision, and the order of columns and rows depends on the box's size.


_BITS = 22  # fractional bits of a weight: with the 8 bits of a pixel, a sum fits into the 31 bits of an int32

Whole = NDArray[np.int64]


def resize_tile(read: Callable[[Tile], Pixels], source: Shape, target: Shape, tile: Tile) -> Pixels:
    """Return the pixels of `tile`, (h, w, 3), of a picture of `source` = (height, width) resized to `target`.

    `read` returns the pixels of a tile of the source, (H, W, 3).
    """
    #                  tile of the target          source
    #     rows          |..####......|     ->      |....##########............|
    #                                                  ^ taps of the tile's first and last pixel
    #
    # The taps of a pixel depend on its place in the whole target only, so that tiles agree where they meet. Pillow
    # sums over columns first and rounds to bytes; the same order gives the same bytes.
    if source == target:
        return read(tile)
    rows, cols = (
        _compute_taps(size, wanted, span)
        for size, wanted, span in zip(source, target, (tile.rows, tile.cols), strict=True)
    )
    pixels = read(Tile(_compute_span(rows[0]), _compute_span(cols[0])))
    return _apply_taps(_apply_taps(pixels, *cols, axis=1), *rows, axis=0)


def find_nearest_pixels(source: int, target: int, span: Span) -> Whole:
    """Return the index of the nearest of `source` pixels for each pixel of `span` among `target`, along one axis.

    >>> find_nearest_pixels(source=6, target=3, span=Span(1, 3)).tolist()
    [3, 5]
    """
    return (2 * np.arange(span.start, span.stop) + 1) * source // (2 * target)


def _compute_taps(source: int, target: int, span: Span) -> tuple[Whole, NDArray[np.int32]]:
    """Return the source pixels that each pixel of `span` is a sum of, and their weights; both (pixels, taps).

    The operations and their order are those of `precompute_coeffs` and `normalize_coeffs_8bpc` in Pillow's Resample.c.
    """
    # Pixel i of the target is centred at (i + 1/2) * scale in the source. Its filter is a triangle of half width
    # `scale` when shrinking, so that every source pixel counts, and 1 (plain linear interpolation) when enlarging.
    scale = source / target
    support = max(scale, 1.0)
    centre = (np.arange(span.start, span.stop)[:, None] + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.int64), source)
    positions = first + np.arange(int((stop - first).max()))
    weights = np.maximum(1.0 - np.abs((positions - centre + 0.5) * (1.0 / support)), 0.0)
    weights[positions >= stop] = 0.0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # cumsum adds sequentially, as Pillow does; sum would add pairwise
    # Taps beyond `stop` have weight 0; their index is clipped so that a tile does not read pixels that it ignores.
    return np.minimum(positions, stop - 1), (0.5 + weights * (1 << _BITS)).astype(np.int32)


def _compute_span(places: Whole) -> Span:
    return Span(int(places.min()), int(places.max()) + 1)


def _apply_taps(pixels: Pixels, positions: Whole, weights: NDArray[np.int32], axis: int) -> Pixels:
    """Return the weighted sum of the pixels at `positions` along an axis, rounded to bytes."""
    shape = [-1 if dimension == axis else 1 for dimension in range(3)]
    total: NDArray[np.int32] = np.array(1 << (_BITS - 1), np.int32)  # one half, so that the shift below rounds
    for position, weight in zip((positions - positions.min()).T, weights.T, strict=True):
        total = total + np.take(pixels, position, axis) * weight.reshape(shape)
    return (total >> _BITS).astype(np.uint8)
