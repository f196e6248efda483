"""Reader of Zarr arrays, and of OME-Zarr groups with their levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import ImageError
from engines.images.files import FileReader, make_damaged_error, translate_errors
from engines.images.picture_reader import DecodeBlock, Level, Pixels, convert_array, make_levels, split_row_bands
from engines.images.zarr_chunks import check_array, check_metadata, check_stored

_FILES = ("zarr.json", ".zarray", ".zgroup")
_IMPLIED = "tczyx"  # the axes of OME-NGFF 0.1 and 0.2, which do not name them
_MOST_LEVELS = 32  # of a picture, each half as large; also the most nested folders
_CHUNK_PX = 1 << 18  # pixels that take as long to decode as a chunk takes to find
_MICRONS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3}


def is_zarr(folder: Path) -> bool:
    """Return whether a folder is a Zarr array or group. Raises ImageError if it may not be read."""
    with translate_errors(folder):
        return any((folder / name).is_file() for name in _FILES)


ZarrHandle = tuple[list[Any], str]
"""The arrays of the levels, and their axes."""


class ZarrPicture(FileReader[ZarrHandle]):
    """A Zarr array (H, W), (H, W, C) or (C, H, W) of uint8, or an OME-Zarr group of such arrays; read by chunks.

    The axes of a group are identified by name; other axes, such as time and depth, must have one entry.
    Raises ImageError if it is none of these, or the extra `zarr` is not installed.
    """

    def _open(self) -> tuple[ZarrHandle, Sequence[Level], float | None]:
        if find_spec("zarr") is None:
            raise ImageError(f"{self.path} is a Zarr store: pip install 'mpi4dl_nb[zarr]'.")
        import zarr

        with translate_errors(self.path):
            check_metadata(self.path)
            found = zarr.open(self.path, mode="r")
            if isinstance(found, zarr.Array):
                # Zarr 3 names axes in the metadata, xarray in an attribute; without names, or with others, they are
                # guessed from the shape.
                names = getattr(found.metadata, "dimension_names", None) or found.attrs.get("_ARRAY_DIMENSIONS") or ()
                letters = _parse_axes(names)
                arrays, axes, microns = [found], letters if "?" not in letters else None, None
            else:
                arrays, axes, microns = _read_multiscale(self.path, found)
            axes = _resolve_axes(self.path, arrays, axes)
            shapes = [tuple(array.shape[axes.index(axis)] for axis in "yx") for array in arrays]
            return (arrays, axes), make_levels(shapes), microns

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the chunk of a level as the unit of decoding."""
        arrays, axes = self.handle
        sides = [arrays[level].chunks[axes.index(axis)] for axis in "yx"]
        return DecodeBlock(*sides, max(_CHUNK_PX, sides[0] * sides[1]))

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        (arrays, axes), (height_px, width_px) = self.handle, out.shape[:2]
        array = arrays[level]
        # Axes come in any order, such as "tczyx". A read selects entry 0 of t and z, cuts y and x, takes all of c, and
        # transposes what is left to (y, x, c):
        #
        #     array[0, :, 0, top:bottom, x0:x1]   ->   (c, y, x)   ->   (y, x, c)
        kept = [axis for axis in axes if axis in "yxc"]
        order = [kept.index(axis) for axis in "yxc" if axis in kept]
        chunk_rows = array.chunks[axes.index("y")]
        for top, bottom in split_row_bands(y0, y0 + height_px, 3 * width_px, chunk_rows):
            wanted = {"y": slice(top, bottom), "x": slice(x0, x0 + width_px), "c": slice(None)}
            with translate_errors(self.path):
                part_of = tuple(wanted.get(axis, 0) for axis in axes)
                if not check_stored(self.path, array, part_of):
                    out[top - y0 : bottom - y0] = array.fill_value or 0
                    continue
                part = np.asarray(array[part_of])
                out[top - y0 : bottom - y0] = convert_array(part.transpose(order), str(self.path))


def _read_multiscale(path: Path, group: Any) -> tuple[list[Any], str, float | None]:
    """Return the levels, axes and micrometres per pixel from the OME-NGFF metadata (0.4, 0.5; axes also 0.1, 0.2)."""
    attributes: Mapping[str, Any] = group.attrs
    scales = attributes.get("ome", attributes).get("multiscales")
    if not scales:
        visible = (each.name for each in path.iterdir() if not each.name.startswith("."))
        names = sorted(name for name in visible if name != "zarr.json")
        raise ImageError(
            f"{path} is a Zarr group of {', '.join(names) or 'nothing'}, and no OME-Zarr picture. "
            "Give the path of one array, or of one picture, in it."
        )
    count = len(scales[0]["datasets"])
    if count > _MOST_LEVELS:
        raise make_damaged_error(path, f"it says that it has {count:,} levels, where {_MOST_LEVELS} are many")
    # A level may lie in nested groups. The metadata of each are checked before zarr parses them: none may be huge, or a
    # link out of the store.
    for each in scales[0]["datasets"]:
        parts = str(each["path"]).strip("/").split("/")
        if len(parts) > _MOST_LEVELS:
            raise make_damaged_error(path, f"a level lies {len(parts):,} folders deep")
        for depth in range(1, len(parts) + 1):
            check_metadata(path, "/".join(parts[:depth]))
    arrays = [group[each["path"]] for each in scales[0]["datasets"]]
    axes = scales[0].get("axes") or _IMPLIED[-len(arrays[0].shape) :]
    return arrays, _parse_axes(axes), _read_microns(scales[0], axes)


def _read_microns(multiscale: Mapping[str, Any], axes: Sequence[Any]) -> float | None:
    """Return the mean of a pixel's two sides in micrometres, or None if it is not given."""
    # The transformations of the finest level are followed by those that all levels share.
    transforms = (each.get("coordinateTransformations", ()) for each in (multiscale["datasets"][0], multiscale))
    scales = [each["scale"] for listed in transforms for each in listed if "scale" in each]
    if not scales or not all(isinstance(axis, dict) for axis in axes):
        return None
    sides = [
        math.prod(map(float, steps)) * _MICRONS.get(axis.get("unit", ""), 0)
        for *steps, axis in zip(*scales, axes, strict=True)
        if axis["name"] in "yx"
    ]
    return sum(sides) / 2 if len(sides) == 2 and min(sides) > 0 else None


def _parse_axes(axes: Sequence[Any]) -> str:
    """Return one letter per axis by its type and name: t, c, z, y or x, or "?" for any other."""
    known = {"time": "t", "channel": "c"}
    plain = [axis if isinstance(axis, Mapping) else {"name": axis} for axis in axes]
    names = [known.get(str(axis.get("type") or axis["name"]), str(axis["name"]).lower()) for axis in plain]
    return "".join(name if name in tuple("tczyx") else "?" for name in names)


def _resolve_axes(path: Path, arrays: Sequence[Any], axes: str | None) -> str:
    """Return the axes of all levels, one letter each. Raises ImageError if they are not those of a picture."""
    shape = arrays[0].shape
    letters = axes
    if not letters and len(shape) in (2, 3):  # no names: channels come last if that axis has 1, 3 or 4
        letters = "yx" if len(shape) == 2 else "yxc" if shape[2] in (1, 3, 4) else "cyx"
    if letters is None or any(letters.count(axis) != 1 for axis in "yx") or letters.count("c") > 1:
        named = f" and axes {letters}" if letters else ""
        raise ImageError(f"{path} has shape {shape}{named}, but a picture is (H, W), (H, W, C) or (C, H, W).")
    for array in arrays:
        if len(array.shape) != len(letters) or not all(array.shape):
            raise make_damaged_error(path, f"a level has shape {array.shape}, where axes are {letters}")
        sizes = list(zip(letters, array.shape, strict=True))
        if any(size != 1 for axis, size in sizes if axis not in "cyx"):
            listed = ", ".join(f"{axis}: {size}" for axis, size in sizes)
            raise ImageError(
                f"{path} holds a stack, {listed}. A picture has one time and one plane: save it by itself."
            )
        channels = dict(sizes).get("c", 1)
        if channels not in (1, 3):
            raise ImageError(
                f"{path} has {channels} channels (axes {letters}, shape {array.shape}), and a picture here is grey, or "
                "red, green and blue: a Zarr store cannot say that one is transparency. Save the ones you want."
            )
        if array.dtype != np.uint8:
            raise ImageError(f"{path} holds {array.dtype} numbers, and pictures here have uint8. Scale and save it.")
        check_array(path, array)
    return letters
