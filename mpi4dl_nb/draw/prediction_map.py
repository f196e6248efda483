"""A predicted map of classes over its slide: where it lies, its colours and names, and a figure of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from matplotlib.axes import Axes
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.draw.figure import BarStyle, Drawing, draw_legend, format_size
from mpi4dl_nb.draw.navigation import encode_pixels
from mpi4dl_nb.draw.tilemap import draw_label, draw_scale_bar
from mpi4dl_nb.engines.errors import ImageError, PlanError, make_path
from mpi4dl_nb.engines.formatting import format_percent
from mpi4dl_nb.engines.geometry.tiles import Span
from mpi4dl_nb.engines.images.examples import find_nearest_pixels
from mpi4dl_nb.engines.images.files import read_head, translate_errors
from mpi4dl_nb.engines.images.picture import Source, open_image
from mpi4dl_nb.engines.images.picture_reader import Picture, make_thumbnail
from mpi4dl_nb.engines.images.pillow import allow_any_size
from mpi4dl_nb.engines.images.regular_file import PNG_HEAD, TIFF_HEADS
from mpi4dl_nb.engines.inference.class_map import ClassMap, find_pitch, find_pitches, make_colours

SHOWN_PX = 1600  # longer side of a map as it is drawn; more than a screen shows
MOST_COUNTED_PX = 1 << 28  # of a file; of a larger one, a coarser level is counted
LISTED = 12  # classes in a legend, the most frequent ones
BLOCKS = 16  # along each side of a map, among which the place of a label is looked for

PredictedMap = str | PathLike[str] | NDArray[Any]
Edges = tuple[float, float, float, float]
"""Top, left, bottom and right in pixels of the slide's finest level."""


@dataclass(frozen=True, eq=False)
class PredictionLayer:
    """A map of classes as it is drawn over a slide.

    `numbers` are the classes of (h, w) pixels, spread evenly over `edges`. `shares` are the parts of all pixels that
    each class has, and `names` and `colours`, (K, 3), are those of the classes.
    """

    numbers: NDArray[Any]
    edges: Edges
    names: tuple[str, ...]
    shares: tuple[float, ...]

    @property
    def colours(self) -> NDArray[np.uint8]:
        """Red, green and blue of each class."""
        return make_colours(len(self.names))

    @property
    def listed(self) -> list[int]:
        """The classes that occur, the most frequent ones first, as many as a legend has."""
        order = sorted(range(len(self.names)), key=lambda index: -self.shares[index])
        return [index for index in order[:LISTED] if self.shares[index]]

    def describe_class(self, index: int) -> str:
        """Return a text such as `1 tumour 23%`; a class without a name has its number only."""
        name = "" if self.names[index] == str(index) else f" {self.names[index]}"
        return f"{index}{name} {format_percent(self.shares[index])}"

    def describe(self) -> dict[str, Any]:
        """Return what a page says of the map: its edges, and of each listed class a text and a colour."""
        colours = [f"#{bytes(colour).hex()}" for colour in self.colours]
        classes = [{"text": self.describe_class(index), "colour": colours[index]} for index in self.listed]
        return {"edges": list(self.edges), "classes": classes}

    def encode(self) -> bytes:
        """Return the map in its colours as a PNG file."""
        return encode_pixels(self.colours[self.numbers], exact=True)


def read_prediction(
    picture: Picture,
    predicted: PredictedMap,
    class_names: Sequence[str] | None = None,
    region: Sequence[int] | None = None,
    level: int = 0,
) -> PredictionLayer:
    """Read a map of classes, a file or (H, W) whole numbers, and find where it lies in the picture.

    A file of `predict` says so, and the names of its classes. Otherwise `region` is (y0, x0, height, width) in pixels
    of `level`; without it, the map is of the whole picture. Raises ImageError if the file cannot be read, and
    PlanError if the numbers are no classes or their place is not known.
    """
    if isinstance(predicted, str | PathLike):
        numbers, total, counted, known = _read_file(make_path(predicted))
    else:
        numbers = counted = _check_numbers(np.asarray(predicted))
        total, known = numbers.shape, ClassMap()
    count = int(counted.max(initial=0)) + 1
    names = tuple(class_names or known.names or map(str, range(count)))
    if len(names) < count:
        raise PlanError(f"The map has class {count - 1}, but {len(names)} class names are known. Name all classes.")
    edges = _find_edges(picture, total, known, region, level)
    shown = [(side, min(side, SHOWN_PX)) for side in numbers.shape]
    rows, cols = (find_nearest_pixels(side, px, Span(0, px)) for side, px in shown)
    shares = np.bincount(counted.ravel(), minlength=len(names)) / counted.size
    return PredictionLayer(numbers[np.ix_(rows, cols)], edges, names, tuple(shares.tolist()))


def _check_numbers(numbers: NDArray[Any]) -> NDArray[Any]:
    if numbers.ndim != 2 or not numbers.size:
        raise PlanError(
            f"A map of classes is (H, W), but this one has shape {numbers.shape}. Of several labels, choose one: "
            "predicted[..., 0]."
        )
    if numbers.dtype == bool:
        return numbers.astype(np.uint8)
    if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() > 65535:
        raise PlanError(
            f"A map of classes holds whole numbers from 0 to 65535, but this one has {numbers.dtype} from "
            f"{numbers.min():g} to {numbers.max():g}. Predict with kind='classes'."
        )
    return numbers


def _read_file(path: Path) -> tuple[NDArray[Any], tuple[int, int], NDArray[Any], ClassMap]:
    """Return the numbers to draw, the size of the whole map, the numbers to count, and what the file says of itself."""
    head = read_head(path, 8)
    if head.startswith(PNG_HEAD):
        with translate_errors(path), allow_any_size(), Image.open(path, formats=("PNG",)) as image:
            drawn = counted = np.asarray(image)
            text = getattr(image, "text", {}).get("Description", "")
        shape = drawn.shape
    elif head.startswith(TIFF_HEADS):
        with translate_errors(path), tifffile.TiffFile(path) as file:
            levels, text = file.series[0].levels, file.pages.first.description
            shape = levels[0].shape
            # The coarsest level with as many pixels as are drawn: levels of classes are not shifted against each other.
            enough = [level for level in levels if max(level.shape) >= min(SHOWN_PX, max(shape))][-1]
            drawn = enough.asarray()
            few = next((level for level in levels if math.prod(level.shape) <= MOST_COUNTED_PX), enough)
            counted = drawn if few is enough else few.asarray()
    else:
        raise ImageError(f"{path} is no TIFF or PNG file, as `predict` writes them.")
    return _check_numbers(drawn), shape, _check_numbers(counted), ClassMap.from_text(text)


def _find_edges(
    picture: Picture, map_px: tuple[int, int], known: ClassMap, region: Sequence[int] | None, level: int
) -> Edges:
    """Return where the map lies in the picture's finest pixels."""
    if region is not None:
        sides = zip(region[2:], map_px, strict=True)
        pitch = [find_pitch(side, map_side) or side / map_side for side, map_side in sides]
        return _to_finest(picture, level, region[:2], pitch, map_px)
    if known.region is not None and known.pitch_px is not None:
        return _to_finest(picture, known.level, known.region[:2], known.pitch_px, map_px)
    if known.region is None:
        for index in range(len(picture.levels)):
            pitches = find_pitches(picture.shape(index), map_px)
            if pitches is not None:
                return _to_finest(picture, index, (0, 0), pitches, map_px)
    raise PlanError(
        f"Where a map of {format_size(map_px)} px lies in {picture.name}, of {format_size(picture.shape())} px, is not "
        "known: neither side is a whole fraction of it. Say which pixels it is of: region=(y0, x0, height, width), and "
        "level=, if that is not 0."
    )


def _to_finest(
    picture: Picture, level: int, corner: Sequence[int], pitch: Sequence[float], map_px: tuple[int, int]
) -> Edges:
    """Return the edges of a map whose first pixel begins at `corner` of a level; pixels are areas, not points."""
    #     pixel i of the map covers  corner + i * pitch  to  corner + (i + 1) * pitch  of the level, so that its centre
    #     lies half a pixel of the map after its edge, on every level alike
    down, across = (fine / coarse for fine, coarse in zip(picture.shape(), picture.shape(level), strict=True))
    top, left = corner[0] * down, corner[1] * across
    return top, left, top + map_px[0] * pitch[0] * down, left + map_px[1] * pitch[1] * across


# The figure.


def show_prediction(
    slide: Source,
    predicted: PredictedMap,
    class_names: Sequence[str] | None = None,
    *,
    region: Sequence[int] | None = None,
    level: int = 0,
    opacity: float = 0.5,
) -> Drawing:
    """Draw a predicted map of classes translucently over its slide, with a legend of the classes and a scale bar.

    `predicted` is the file that `training.predict(slide, to=...)` has written, which says what it is of, or the array
    (H, W) of class numbers. `class_names` replace the names in the file. Of an array for a part of the slide, give the
    `region` and `level` with which it was predicted. Each class's number is written into one of its places, so that
    the figure can be read without colours. Raises ImageError or PlanError.

    >>> import numpy as np
    >>> from mpi4dl_nb import show_prediction
    >>> slide, classes = np.zeros((40, 60, 3), np.uint8), np.eye(40, 60, dtype=np.uint8)
    >>> show_prediction(slide, classes, ["tissue", "a line"]).alt
    'picture, 40 × 60 px, with its predicted classes: 0 tissue 98%, 1 a line 2%.'
    """
    if not 0 <= opacity <= 1:
        raise PlanError(f"opacity={opacity!r} must be from 0 (the slide alone) to 1 (the map alone).")
    picture = open_image(slide)
    layer = read_prediction(picture, predicted, class_names, region, level)
    # The part of the slide that the map is of, in whole pixels.
    (top, bottom), (left, right) = (
        (min(max(0, int(start)), side - 1), min(side, max(int(start) + 1, int(np.ceil(stop)))))
        for start, stop, side in zip(layer.edges[:2], layer.edges[2:], picture.shape(), strict=True)
    )
    figure = Drawing(figsize=(8, 6.5), layout="constrained")
    axes = figure.subplots()
    box = (top, left, bottom - top, right - left)
    axes.imshow(make_thumbnail(picture, SHOWN_PX, box), extent=(left, right, bottom, top))
    first, start, last, stop = layer.edges
    tint = np.dstack([layer.colours[layer.numbers], np.full(layer.numbers.shape, round(255 * opacity), np.uint8)])
    axes.imshow(tint, extent=(start, stop, last, first), interpolation="nearest")
    axes.set(xlim=(left, right), ylim=(bottom, top), xlabel="column, px", ylabel="row, px")
    _number_classes(axes, layer)
    looks = [BarStyle(entry["text"], entry["colour"], "") for entry in layer.describe()["classes"]]
    draw_legend(figure, looks)
    draw_scale_bar(axes, picture, picture.shape())
    axes.set_title(f"{picture.name}: predicted classes", fontsize=10)
    words = ", ".join(look.name for look in looks)
    figure.alt = f"{picture.name}, {format_size(picture.shape())} px, with its predicted classes: {words}."
    return figure


def _number_classes(axes: Axes, layer: PredictionLayer) -> None:
    """Write the number of each listed class where it fills most of a block of the map."""
    height, width = layer.numbers.shape
    top, left, bottom, right = layer.edges
    cuts = [np.linspace(0, side, min(side, BLOCKS) + 1).astype(int) for side in (height, width)]
    for index in layer.listed:
        mask = layer.numbers == index
        rows = np.add.reduceat(mask, cuts[0][:-1], axis=0, dtype=np.int64)
        parts = np.add.reduceat(rows, cuts[1][:-1], axis=1) / np.outer(np.diff(cuts[0]), np.diff(cuts[1]))
        row, col = np.unravel_index(parts.argmax(), parts.shape)
        middle = [(cut[at] + cut[at + 1]) / 2 for cut, at in zip(cuts, (row, col), strict=True)]
        x, y = left + middle[1] / width * (right - left), top + middle[0] / height * (bottom - top)
        draw_label(axes, x, y, str(index))
