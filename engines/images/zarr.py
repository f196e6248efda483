"""Reader of Zarr arrays, and of OME-Zarr groups with their levels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mpi4dl_nb.engines.errors import AS_TENSORS, ImageError
from mpi4dl_nb.engines.images.files import FileReader, make_damaged_error, translate_errors
from mpi4dl_nb.engines.images.ome_zarr import compute_microns, parse_axes, read_multiscale, sort_levels
from mpi4dl_nb.engines.images.picture_reader import (
    DecodeBlock,
    Level,
    Pixels,
    convert_array,
    make_levels,
    split_row_bands,
)
from mpi4dl_nb.engines.images.zarr_chunks import check_array, check_chunk_names, check_metadata, check_stored

_FILES = ("zarr.json", ".zarray", ".zgroup")
_CHUNK_PX = 1 << 18  # pixels that take as long to decode as a chunk takes to find


def is_zarr(folder: Path) -> bool:
    """Return whether a folder is a Zarr array or group. Raises ImageError if it may not be read."""
    with translate_errors(folder):
        return any((folder / name).is_file() for name in _FILES)


ZarrHandle = tuple[list[Any], str]
"""The arrays of the levels, and their axes."""


class ZarrPicture(FileReader[ZarrHandle]):
    """A Zarr array (H, W), (H, W, C) or (C, H, W) of uint8, or an OME-Zarr group of such arrays; read by chunks.

    The axes of a group are identified by name; other axes, such as time and depth, must have one entry. Its levels are
    sorted by their size; they must be reduced copies of the finest.
    Raises ImageError if it is none of these, or the extra `zarr` is not installed.
    """

    def _open(self) -> tuple[ZarrHandle, Sequence[Level], float | None]:
        if find_spec("zarr") is None:
            raise ImageError(f"{self.path} is a Zarr store: pip install 'mpi4dl_nb[zarr]'.")
        import zarr

        with translate_errors(self.path):
            check_metadata(self.path)
            # Each array's own metadata are read: a copy that a group holds of them (consolidated) may be out of date.
            node = zarr.open(self.path, mode="r", use_consolidated=False)
            if isinstance(node, zarr.Array):
                # Zarr 3 names axes in the metadata, xarray in an attribute; without names, or with others, they are
                # guessed from the shape.
                names: Any = (
                    getattr(node.metadata, "dimension_names", None) or node.attrs.get("_ARRAY_DIMENSIONS") or ()
                )
                letters = parse_axes(names)
                arrays, microns = [node], None
                axes = _resolve_axes(self.path, arrays, letters if "?" not in letters else None)
            else:
                multiscale = read_multiscale(self.path, node)
                axes = _resolve_axes(self.path, [level.array for level in multiscale.levels], multiscale.axes)
                levels = sort_levels(self.path, multiscale)
                arrays, microns = [level.array for level in levels], compute_microns(multiscale, levels[0])
            y, x = map(axes.index, "yx")
            shapes = [(array.shape[y], array.shape[x]) for array in arrays]
            return (arrays, axes), make_levels(shapes), microns

    def get_decode_block(self, level: int) -> DecodeBlock:
        """Return the chunk of a level as the unit of decoding."""
        arrays, axes = self.handle
        rows, cols = (arrays[level].chunks[axes.index(axis)] for axis in "yx")
        return DecodeBlock(rows, cols, max(_CHUNK_PX, rows * cols))

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
                f"{path} holds a stack, {listed}. A picture has one time and one plane: save it by itself. "
                + AS_TENSORS
            )
        channels = dict(sizes).get("c", 1)
        if channels != dict(zip(letters, shape, strict=True)).get("c", 1):
            raise make_damaged_error(path, f"a level has {channels} channels, shape {array.shape}, and another {shape}")
        if channels not in (1, 3):
            raise ImageError(
                f"{path} has {channels} channels (axes {letters}, shape {array.shape}), and a picture here is grey, or "
                "red, green and blue: a Zarr store cannot say that one is transparency. Save the ones you want. "
                + AS_TENSORS
            )
        if array.dtype != np.uint8:
            raise ImageError(
                f"{path} holds {array.dtype} numbers, and pictures here have uint8. Scale and save it. {AS_TENSORS}"
            )
        if (array.attrs.get("scale_factor", 1), array.attrs.get("add_offset", 0)) != (1, 0):
            raise ImageError(
                f"{path} has a scale_factor or an add_offset: its numbers stand for measurements and are no shades "
                "from 0 to 255. Scale the measurements and save them without."
            )
        check_array(path, array)
        check_chunk_names(path, array)
    return letters
