"""Maps of classes: their colours and names, how they shrink, and where in a slide they lie."""

from __future__ import annotations

import colorsys
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.output_meaning import OutputMeaning

Numbers = NDArray[Any]

# Grey for the first class, mostly the background, then colours that the colour-blind can tell apart (Okabe and Ito).
_COLOURS = ("bbbbbb", "e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7")
_GOLDEN = (math.sqrt(5) - 1) / 2  # of the circle of hues: any number of steps of this size is spread over all of it


def make_colours(count: int) -> NDArray[np.uint8]:
    """Return (count, 3): red, green and blue of each class, the same whatever the number of classes.

    >>> make_colours(2).tolist()
    [[187, 187, 187], [230, 159, 0]]
    """
    more = range(len(_COLOURS), count)
    colours = [tuple(bytes.fromhex(text)) for text in _COLOURS[:count]]
    for index in more:
        colour = colorsys.hsv_to_rgb(index * _GOLDEN % 1, 0.5 + 0.15 * (index % 4), 0.6 + 0.2 * (index % 3))
        colours.append(tuple(round(255 * part) for part in colour))
    return np.array(colours, np.uint8).reshape(-1, 3)


def halve_classes(pixels: Numbers) -> Numbers:
    """Return the most frequent class of each 2 x 2 pixels, (H, W, ...) -> (H / 2, W / 2, ...); of several, the lowest.

    A last odd row or column counts twice. One of the four, always the same, would shift each level by half a pixel.

    >>> import numpy as np
    >>> halve_classes(np.array([[1, 2, 3], [2, 0, 3]]))
    array([[2, 3]])
    """
    rows, cols = (side % 2 for side in pixels.shape[:2])
    even = np.pad(pixels, ((0, rows), (0, cols), *((0, 0),) * (pixels.ndim - 2)), mode="edge")
    a, b, c, d = np.sort([even[::2, ::2], even[1::2, ::2], even[::2, 1::2], even[1::2, 1::2]], axis=0)
    # In order, equal numbers are side by side:   a a . .  ->  a        a b b .  ->  b        a b c c  ->  c
    return np.where(a == b, a, np.where(b == c, b, np.where(c == d, c, a)))


def find_pitch(slide_px: int, map_px: int) -> float | None:
    """Return how many pixels of a slide one pixel of a model's output for it stands for, or None if that is unclear.

    >>> find_pitch(1000, 1000), find_pitch(1000, 32), find_pitch(100, 300), find_pitch(151, 152), find_pitch(100, 96)
    (1.0, 32.0, 0.3333333333333333, 1.0, None)
    """
    #     10 px at stride 4    |....|....|..  |       3 pixels of the output, of which the last one is cut off:
    #     10 px, made even     |..|..|..|..|..|       the stride is the whole number that gives this many, not 10 / 3
    if map_px >= slide_px:
        is_padded = any(-(-slide_px // side) * side == map_px for side in (1 << step for step in range(9)))
        return 1.0 if is_padded else slide_px / map_px if map_px % slide_px == 0 else None
    stride = -(-slide_px // map_px)
    return float(stride) if -(-slide_px // stride) == map_px else None


@dataclass(frozen=True)
class ClassMap:
    """What is known of a map of classes: the `names` of its classes, in order; empty if its numbers are no classes.

    The map lies over `region` (y0, x0, height, width) of level `level` of its slide, and a pixel of it stands for
    `pitch_px` (rows, columns) pixels there; None if that is not known.
    """

    names: tuple[str, ...] = ()
    region: tuple[int, int, int, int] | None = None
    level: int = 0
    pitch_px: tuple[float, float] | None = None

    def to_text(self) -> str:
        """Return the map's description as JSON in ASCII, for a file."""
        return json.dumps(
            {"classes": self.names, "region": self.region, "level": self.level, "pitch_px": self.pitch_px}
        )

    @classmethod
    def from_text(cls, text: str) -> ClassMap:
        """Return the description in a file's text; an empty one if the text is something else."""
        try:
            description = json.loads(text)
            names = tuple(map(str, description["classes"]))
            region = description["region"] and tuple(map(int, description["region"]))
            pitch = description["pitch_px"] and tuple(map(float, description["pitch_px"]))
            level = int(description["level"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return cls()
        known = (region is None or len(region) == 4) and (pitch is None or (len(pitch) == 2 and min(pitch) > 0))
        return cls(names, region, level, pitch) if known and level >= 0 else cls(names)


def name_classes(kind: str, meaning: OutputMeaning, channels: int, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the classes of a prediction; () if it is no map of one class per pixel, and has no names.

    Classes without `names` are called by their numbers. Raises PlanError if there are more or fewer names.
    """
    if isinstance(names, str) or not (names is None or all(isinstance(name, str) for name in names)):
        raise PlanError(f"class_names={names!r} must be a list of texts, such as ['background', 'tumour'].")
    # A single label is absent or present: two classes.
    is_pair = channels == 1 and meaning in (OutputMeaning.LABELS, OutputMeaning.SHARES)
    count = 2 if is_pair else channels
    if names is not None and len(names) != count:
        raise PlanError(
            f"There are {len(names)} class_names, but the model has {count} classes. Give one name for each, in the "
            "order of its outputs."
        )
    is_map = kind == "classes" and (is_pair or meaning is OutputMeaning.CLASSES)
    return tuple(names or map(str, range(count if is_map else 0)))


def find_pitches(size_px: Sequence[int], output_px: Sequence[int]) -> tuple[float, float] | None:
    """Return the pixels of a slide for each pixel of an output, in rows and columns, or None if that is unclear."""
    rows, cols = (find_pitch(slide, output) for slide, output in zip(size_px, output_px, strict=True))
    return None if rows is None or cols is None else (rows, cols)
