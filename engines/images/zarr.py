"""Zarr arrays, and OME-Zarr groups with their levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from engines.errors import ImageError
from engines.images.arrays import from_array
from engines.images.files import FileReader, damaged, reasons
from engines.images.reader import Level, Pixels, bands
from engines.images.zarr_chunks import check_chunks, check_stored

__all__ = ["ZarrPicture", "is_zarr"]

_FILES = ("zarr.json", ".zarray", ".zgroup")
_MICRONS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3}


def is_zarr(folder: Path) -> bool:
    """Whether a folder is a Zarr array or group."""
    return any((folder / name).is_file() for name in _FILES)


@dataclass
class _Handle:
    arrays: list[Any]
    axes: str
    microns: float | None


class ZarrPicture(FileReader[_Handle]):
    """A Zarr array (H, W), (H, W, C) or (C, H, W) of bytes, or an OME-Zarr group of them; read chunk by chunk.

    Raises ImageError where it is none of these, or the extra is not installed.
    """

    def _open(self) -> _Handle:
        if find_spec("zarr") is None:
            raise ImageError(f"{self.path} is a Zarr store: pip install 'mpi4dl_nb[zarr]'.")
        import zarr

        with reasons(self.path):
            found = zarr.open(self.path, mode="r")
            if isinstance(found, zarr.Array):
                arrays, axes, microns = [found], None, None
            else:
                arrays, axes, microns = _multiscale(self.path, found)
            return _Handle(arrays, _checked(self.path, arrays, axes), microns)

    def _levels(self, handle: _Handle) -> Sequence[Level]:
        sizes = [tuple(array.shape[handle.axes.index(axis)] for axis in "yx") for array in handle.arrays]
        rows, cols = sizes[0]
        return [Level(height, width, (rows / height + cols / width) / 2) for height, width in sizes]

    def _microns(self, handle: _Handle) -> float | None:
        return handle.microns

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        handle = self.handle
        array, (height_px, width_px) = handle.arrays[level], out.shape[:2]
        kept = [axis for axis in handle.axes if axis in "yxc"]
        order = [kept.index(axis) for axis in "yxc" if axis in kept]
        chunk_rows = array.chunks[handle.axes.index("y")]
        for top, bottom in bands(y0, y0 + height_px, 3 * width_px, chunk_rows):
            wanted = {"y": slice(top, bottom), "x": slice(x0, x0 + width_px), "c": slice(None)}
            with reasons(self.path):
                part_of = tuple(wanted.get(axis, 0) for axis in handle.axes)
                check_stored(self.path, array, part_of)
                part = np.asarray(array[part_of])
                out[top - y0 : bottom - y0] = from_array(part.transpose(order), str(self.path))


def _multiscale(path: Path, group: Any) -> tuple[list[Any], str, float | None]:
    """Levels, axes and micrometres per pixel, by the OME-NGFF metadata of versions 0.4 and 0.5."""
    attributes: Mapping[str, Any] = group.attrs
    scales = attributes.get("ome", attributes).get("multiscales")
    if not scales:
        raise ImageError(
            f"{path} is a Zarr group of {', '.join(sorted(group.keys())) or 'nothing'}, and no OME-Zarr picture. "
            "Give the path of one array in it."
        )
    arrays = [group[each["path"]] for each in scales[0]["datasets"]]
    axes = scales[0].get("axes") or []
    letters = "".join(axis["name"] if isinstance(axis, dict) else axis for axis in axes)
    return arrays, letters, _microns_of(scales[0]["datasets"][0], axes)


def _microns_of(dataset: Mapping[str, Any], axes: Sequence[Any]) -> float | None:
    """The mean of a pixel's two sides."""
    scale = next((each["scale"] for each in dataset.get("coordinateTransformations", ()) if "scale" in each), None)
    if scale is None or not all(isinstance(axis, dict) for axis in axes):
        return None
    sides = [
        float(step) * _MICRONS.get(axis.get("unit", ""), 0)
        for step, axis in zip(scale, axes, strict=True)
        if axis["name"] in "yx"
    ]
    return sum(sides) / 2 if len(sides) == 2 and min(sides) > 0 else None


def _checked(path: Path, arrays: Sequence[Any], axes: str | None) -> str:
    """The axes of all levels, one letter each. Raises ImageError where they are no picture's."""
    shape = arrays[0].shape
    letters = axes or _guessed(shape)
    if letters is None or sorted(letters.strip("tz").replace("c", "")) != ["x", "y"]:
        raise ImageError(f"{path} has shape {shape}, but a picture is (H, W), (H, W, C) or (C, H, W).")
    for array in arrays:
        if len(array.shape) != len(letters) or not all(array.shape):
            raise damaged(path, f"a level has shape {array.shape}, where axes are {letters}")
        sizes = dict(zip(letters, array.shape, strict=True))
        if any(sizes.get(axis, 1) != 1 for axis in "tz") or sizes.get("c", 1) not in (1, 3, 4):
            raise ImageError(f"{path} holds a stack: {sizes}. A picture has 1, 3 or 4 channels, one time, one plane.")
        if array.dtype != np.uint8:
            raise ImageError(f"{path} holds {array.dtype} numbers, and pictures here have uint8. Scale and save it.")
        check_chunks(path, array)
    return letters


def _guessed(shape: Sequence[int]) -> str | None:
    if len(shape) == 2:
        return "yx"
    if len(shape) != 3:
        return None
    return "yxc" if shape[2] in (1, 3, 4) else "cyx"
