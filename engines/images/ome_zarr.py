"""The metadata of an OME-Zarr group (OME-NGFF 0.1 to 0.5): which of its arrays are the levels of one picture.

Nothing in it can be trusted: levels may be listed in any order, and may not be reduced copies of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.files import make_damaged_error
from mpi4dl_nb.engines.images.zarr_chunks import check_metadata

MOST_LEVELS = 32  # of a picture, each half as large; also the most nested folders
_LISTED = 8  # pictures of a store that a message lists
_MICRONS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3}
_UNNAMED = (None, "0.1", "0.2")  # the versions that do not name their axes, which are then the last ones of `_IMPLIED`
_IMPLIED = "tczyx"
_ROUNDING_PX = 2  # by which the size of a level may differ from the exact fraction: writers round each halving

Sides = dict[str, float]
"""A number for each of the axes y and x."""


@dataclass(frozen=True)
class ListedLevel:
    """An array that the metadata list as a level.

    `scale` is the size of its pixels, and `origin` the place of its first pixel, both in the unit of the axes; None if
    they are not given.
    """

    name: str
    array: Any
    scale: Sides | None
    origin: Sides | None


SizedLevel = tuple[tuple[int, ...], ListedLevel]
"""A level with its rows and columns."""


@dataclass(frozen=True)
class Multiscale:
    """The levels that the metadata list for one picture, in their order, with one letter for each of their axes.

    `unit_um` is the unit of the axes y and x in micrometres, times the scale that all levels share; None if unknown.
    """

    levels: list[ListedLevel]
    axes: str
    unit_um: Sides | None


def parse_axes(axes: Sequence[Any]) -> str:
    """Return one letter per axis by its type and name: t, c, z, y or x, or "?" for any other.

    >>> parse_axes([{"name": "c", "type": "channel"}, {"name": "Y"}, {"name": "lon"}])
    'cy?'
    """
    known = {"time": "t", "channel": "c"}
    plain = [axis if isinstance(axis, Mapping) else {"name": axis} for axis in axes]
    names = [known.get(str(axis.get("type") or axis["name"]), str(axis["name"]).lower()) for axis in plain]
    return "".join(name if name in tuple(_IMPLIED) else "?" for name in names)


def read_multiscale(path: Path, group: Any) -> Multiscale:
    """Return what a group lists as one picture. Raises ImageError if there is none, or several."""
    group, prefix = _find_image(path, group)
    attributes = _get_attributes(group)
    if "image-label" in attributes:
        raise ImageError(
            f"{path} holds labels (image-label), whose numbers are classes or objects and no shades. Save it as a grey "
            "PNG or TIFF file, or as an (H, W) array in a .npy file, and give that as a mask."
        )
    multiscale = _find_multiscale(path, group, attributes)
    names = [str(dataset["path"]) for dataset in multiscale["datasets"]]
    _check_paths(path, names, prefix)
    arrays, axes = [group[name] for name in names], multiscale.get("axes")
    version = multiscale.get("version", attributes.get("version"))
    if not axes and version not in _UNNAMED:
        raise ImageError(f"{path} is OME-Zarr {version} without the names of its axes, which tell rows from channels.")
    axes = axes or _IMPLIED[-len(arrays[0].shape) :]
    letters = parse_axes(axes)
    levels = [
        ListedLevel(name, array, *_read_transforms(path, dataset, letters))
        for name, array, dataset in zip(names, arrays, multiscale["datasets"], strict=True)
    ]
    shared, _ = _read_transforms(path, multiscale, letters)
    return Multiscale(levels, letters, _read_units(axes, shared or {}))


def _get_attributes(group: Any) -> Mapping[str, Any]:
    """Return the OME attributes of a group: 0.5 has them in "ome", older versions among all others."""
    return group.attrs.get("ome", group.attrs)


# ---- which picture


def _find_image(path: Path, group: Any) -> tuple[Any, str]:
    """Return the group of the picture and its path: the group itself, or the only one of a `bioformats2raw` store."""
    #     a.zarr/OME/METADATA.ome.xml       bioformats2raw writes the pictures of a file as groups 0, 1, ...: the scan,
    #     a.zarr/0/0, 1, 2                  its label, an overview, in any order
    #     a.zarr/1/0
    attributes = _get_attributes(group)
    if "bioformats2raw.layout" not in attributes or "multiscales" in attributes:
        return group, ""
    names = sorted(child.name for child in path.iterdir() if child.name.isdecimal() and child.is_dir())
    if len(names) != 1:
        listed = ", ".join(names[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        raise ImageError(
            f"{path} holds {len(names)} pictures{f' ({listed})' * bool(names)}, and it is not known which of them is "
            f"the scan. Give the path of one of them, such as {path / '0'}."
        )
    check_metadata(path, names[0])
    return group[names[0]], names[0]


def _find_multiscale(path: Path, group: Any, attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    scales = attributes.get("multiscales")
    if not scales:
        visible = (child.name for child in path.iterdir() if not child.name.startswith("."))
        names = sorted(name for name in visible if name != "zarr.json")
        raise ImageError(
            f"{path} is a Zarr group of {', '.join(names) or 'nothing'}, and no OME-Zarr picture. "
            "Give the path of one array, or of one picture, in it."
        )
    listed = [[str(dataset["path"]) for dataset in scale["datasets"]] for scale in scales]
    if not all(listed):
        raise make_damaged_error(path, "its metadata list no levels")
    if any(names != listed[0] for names in listed):
        some = ", ".join(names[0] for names in listed[:_LISTED])
        raise ImageError(
            f"{path} lists {len(listed)} pictures (multiscales), whose first levels are {some}, and it is not known "
            f"which of them is the scan. Give the path of one array, such as {path / listed[0][0]}."
        )
    return scales[0]


def _check_paths(path: Path, names: Sequence[str], prefix: str) -> None:
    """Check the metadata files on the way to each level before zarr parses them."""
    if len(names) > MOST_LEVELS:
        raise make_damaged_error(path, f"it says that it has {len(names):,} levels, where {MOST_LEVELS} are many")
    # A level may lie in nested groups. None of their metadata may be huge, or a link out of the store.
    for name in names:
        parts = name.strip("/").split("/")
        if len(parts) > MOST_LEVELS:
            raise make_damaged_error(path, f"a level lies {len(parts):,} folders deep")
        for depth in range(1, len(parts) + 1):
            check_metadata(path, "/".join([*([prefix] if prefix else []), *parts[:depth]]))


# ---- scales


def _read_transforms(path: Path, holder: Mapping[str, Any], axes: str) -> tuple[Sides | None, Sides | None]:
    """Return the product of the scales and the sum of the translations; None for what is not given, or not in numbers.

    Raises ImageError if they are not one number for each axis, or a scale is not positive.
    """
    transforms = list(holder.get("coordinateTransformations") or ())
    if any(
        "path" in transform or transform.get("type") not in ("scale", "translation", "identity")
        for transform in transforms
    ):
        return None, None
    combined = []
    for kind in ("scale", "translation"):
        listed = [[float(value) for value in transform[kind]] for transform in transforms if transform["type"] == kind]
        if any(len(numbers) != len(axes) for numbers in listed):
            raise make_damaged_error(path, f"its {kind}s are {listed}, and it has the {len(axes)} axes {axes}")
        combine = math.prod if kind == "scale" else math.fsum
        sides = {axis: combine(along) for *along, axis in zip(*listed, axes, strict=True) if axis in "yx"}
        if not all(math.isfinite(side) and (side > 0 or kind != "scale") for side in sides.values()):
            raise make_damaged_error(path, f"a level has the {kind} {listed}, which is not positive and finite")
        combined.append(sides if listed else None)
    return combined[0], combined[1]


def _read_units(axes: Sequence[Any], shared: Sides) -> Sides | None:
    """Return the unit of y and x in micrometres, times a scale that all levels share; None if not both have a unit."""
    if not all(isinstance(axis, Mapping) for axis in axes):
        return None
    units = {
        letter: _MICRONS[axis["unit"]] * shared.get(letter, 1.0)
        for letter, axis in zip(parse_axes(axes), axes, strict=True)
        if letter in "yx" and axis.get("unit") in _MICRONS
    }
    return units if len(units) == 2 else None


def compute_microns(multiscale: Multiscale, finest: ListedLevel) -> float | None:
    """Return the mean of the two sides of a pixel of the finest level in micrometres, or None if it is not given."""
    if not multiscale.unit_um or not finest.scale:
        return None
    return sum(unit * finest.scale[axis] for axis, unit in multiscale.unit_um.items()) / 2


def sort_levels(path: Path, multiscale: Multiscale) -> list[ListedLevel]:
    """Return the levels, finest first. Raises ImageError if some are no reduced copies of the finest.

    Their arrays must have the axes of `multiscale`.
    """
    dims = [multiscale.axes.index(axis) for axis in "yx"]
    pairs = [(tuple(int(level.array.shape[dim]) for dim in dims), level) for level in multiscale.levels]
    pairs.sort(key=lambda pair: -math.prod(pair[0]))
    whole, finest = pairs[0]
    for finer, (shape, level) in pairwise(pairs):
        fault = next(_list_faults((whole, finest), finer, (shape, level)), None)
        if fault:
            raise ImageError(
                f"{path} lists as a level the array {level.name} of {shape[0]} x {shape[1]} px, which is no reduced "
                f"copy of {finest.name} with {whole[0]} x {whole[1]} px: {fault}. Give the path of one array, such as "
                f"{path / finest.name}."
            )
    return [level for _, level in pairs]


def _list_faults(base: SizedLevel, before: SizedLevel, reduced: SizedLevel) -> Iterator[str]:
    """Yield what shows that a level is no reduced copy of `base`, the finest: its size, aspect ratio, scale or place.

    `before` is the next finer level.
    """
    (whole, finest), (shape, level) = base, reduced
    if shape == before[0] or any(side > finer for side, finer in zip(shape, before[0], strict=True)):
        yield f"it is not smaller than {before[1].name} of {before[0][0]} x {before[0][1]} px"
    off_px = [abs(whole[0] * shape[1] / whole[1] - shape[0]), abs(whole[1] * shape[0] / whole[0] - shape[1])]
    if min(off_px) > _ROUNDING_PX:
        yield "it has another aspect ratio"
    if finest.scale is None or level.scale is None:
        return
    for axis, side, size in zip("yx", whole, shape, strict=True):
        factor = level.scale[axis] / finest.scale[axis]
        if abs(side / factor - size) > _ROUNDING_PX:
            yield f"their scales say that its pixels are {factor:.4g} times as large along {axis}"
        # The first pixel of a reduced copy covers the first pixels of the finest level: their centres are less than one
        # pixel of the copy apart.
        apart = level.origin[axis] - finest.origin[axis] if level.origin and finest.origin else 0.0
        if abs(apart) > level.scale[axis]:
            yield f"it begins {apart / finest.scale[axis]:.4g} px further along {axis}"
