"""Write a prediction as a tiled, pyramidal TIFF in bounded memory; the file appears completely or not at all.

A map of classes has a palette and the names of its classes, so that any viewer shows it in colours; its numbers
stay the classes. A small one can be a PNG.

A TIFF needs its tiles in order. So tiles are kept uncompressed in a scratch file in the same folder until all have
arrived. The scratch file has no name, so that it vanishes whatever happens. Its space is reserved, and that of the TIFF
is looked for, before the first tile is computed.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mpi4dl_nb.engines.comm.status_board import get_status_board
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.images.regular_file import write_beside
from mpi4dl_nb.engines.inference.class_map import ClassMap, find_pitches, halve_classes, make_colours
from mpi4dl_nb.engines.inference.rank_predictor import PaddedRegion
from mpi4dl_nb.engines.inference.tile_stitcher import ArraySink, Shape

TILE_PX, GROUP_PX = 256, 4096  # side of a tile of the file; width of a row of tiles that is read at once
MOST_PNG_PX = 1 << 29
SMALLEST_PX = 512  # longest side of the coarsest level


class _ScratchArray:
    """An (H, W, C) array in an unnamed temporary file."""

    def __init__(self, folder: Path, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype
        self.pixel_bytes = shape[2] * dtype.itemsize
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the file lives as long as this object)
        count = shape[0] * shape[1] * self.pixel_bytes
        try:
            # Reserve the space now: a full disk must be noticed before the prediction is computed.
            os.posix_fallocate(self.file.fileno(), 0, count)
        except OSError as error:
            self.file.close()
            raise OSError(
                f"{folder} has no room for the {format_bytes(count)} of {shape[0]} x {shape[1]} px ({error.strerror}). "
                "Free some, or write to another folder."
            ) from error

    def _compute_offset(self, row: int, tile: Tile) -> int:
        return (row * self.shape[1] + tile.cols.start) * self.pixel_bytes

    def write(self, tile: Tile, pixels: NDArray[Any]) -> None:
        for row, line in zip(range(tile.rows.start, tile.rows.stop), pixels, strict=True):
            left, offset = memoryview(np.ascontiguousarray(line).tobytes()), self._compute_offset(row, tile)
            while left:  # on a disk that fills up, the first write may be short; the next one raises the error
                done = os.pwrite(self.file.fileno(), left, offset)
                left, offset = left[done:], offset + done

    def read(self, tile: Tile) -> NDArray[Any]:
        pixels = np.empty((*tile.shape, self.shape[2]), self.dtype)
        for row, line in zip(range(tile.rows.start, tile.rows.stop), pixels, strict=True):
            os.preadv(self.file.fileno(), [line], self._compute_offset(row, tile))
        return pixels


class PyramidSink:
    """Sink that collects tiles of an image of `shape` and writes them as the TIFF file at `path`.

    `microns_per_px` is written if known, and `classes` as the file's description, with a palette for one number per
    pixel. With `mixes`, pixels of coarser levels are means of 2 x 2 pixels; otherwise, for class numbers, the most
    frequent of the four. Raises OSError if space is lacking, the folder is not there or not writable, or
    the name is not that of a TIFF.
    """

    def __init__(
        self,
        path: Path,
        shape: Shape,
        dtype: np.dtype[Any],
        microns_per_px: float | None = None,
        mixes: bool = False,
        classes: ClassMap | None = None,
    ) -> None:
        self.path, self.dtype, self.microns_per_px = path, dtype, microns_per_px
        self.mixes, self.classes = mixes, classes
        _check_path(path, (".tif", ".tiff"), "TIFF: end it in .tif")
        self.raw = _ScratchArray(path.parent, shape, dtype)
        # The fullest moment of `_write_file`: the finest level as a page, and the next one's scratch file beside it.
        needed, free = 5 * math.prod(shape) * dtype.itemsize // 4, shutil.disk_usage(path.parent).free
        if free < needed:
            self.close()
            raise OSError(
                f"{path.parent} has {format_bytes(free)} left beside the pixels of {shape[0]} x {shape[1]} px, but "
                f"their levels may take {format_bytes(needed)} more. Free some, or write to another folder."
            )

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """Write a tile into the scratch file."""
        self.raw.write(tile, pixels)

    def finish(self) -> str:
        """Write the file under a temporary name, rename it when it is complete, and return its path."""
        try:
            with write_beside(self.path) as beside:
                self._write_file(beside)
        finally:
            self.close()
        return str(self.path)

    def close(self) -> None:
        """Close the scratch file, which frees its space."""
        self.raw.file.close()

    def _write_file(self, file: Path) -> None:
        #     scratch file, level 0  ->  TIFF page, level 0
        #              | halve
        #     scratch file, level 1  ->  SubIFD 1           each level is made from the one before, whose scratch file
        #              | halve                              goes at once: at most two exist at a time
        #     scratch file, level 2  ->  SubIFD 2
        # The least n for which the longest side, halved n times and rounded up, is at most SMALLEST_PX.
        levels = ((max(self.raw.shape[:2]) - 1) // SMALLEST_PX).bit_length()
        with tifffile.TiffWriter(file, bigtiff=True) as writer:
            for level in range(levels + 1):
                if level:
                    coarser = _write_halved(self.raw, self.path.parent, self.mixes)
                    self.raw.file.close()
                    self.raw = coarser
                settings: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "contig"}
                if self.classes is not None and self.classes.names and self.raw.shape[2] == 1:
                    settings = {"photometric": "palette", "colormap": _make_palette(self.classes, self.dtype)}
                if self.classes is not None and not level:
                    settings["description"] = self.classes.to_text()
                if self.microns_per_px is not None:
                    per_cm = 1e4 / (self.microns_per_px * 2**level)
                    settings |= {"resolution": (per_cm, per_cm), "resolutionunit": "CENTIMETER"}
                writer.write(
                    _read_tiles(self.raw),
                    shape=self.raw.shape[:2] if self.raw.shape[2] == 1 else self.raw.shape,
                    dtype=self.dtype,
                    tile=(TILE_PX, TILE_PX),
                    compression="zlib",
                    metadata=None,
                    maxworkers=1,
                    subifds=levels if not level else None,
                    subfiletype=int(level > 0),
                    **settings,
                )
            writer.filehandle.flush()
            # Before the rename: after a crash, a file of this name is complete.
            os.fsync(writer.filehandle.fileno())


def make_pyramid(
    path: Path,
    region: PaddedRegion,
    kind: str,
    output_px: Sequence[int],
    names: Sequence[str],
    shape: Shape,
    dtype: np.dtype[Any],
) -> PyramidSink | PngSink:
    """Return the sink that writes the prediction of a region to `path`, as TIFF or, if it ends in .png, as PNG.

    `output_px` are height and width of the model's output for the padded region; `shape` is what is written of it.
    `names` are those of the classes (see `name_classes`).
    """
    known, pitch = region.picture.microns_per_px, find_pitches(region.size_px, output_px)
    # Not by the sides that are written, which are rounded up: 1000 px at stride 32 have 32 rows of 32 px each.
    scaled = None if known is None or pitch is None else known * pitch[0]
    box, level = getattr(region.picture, "box", None), getattr(region.picture, "level", 0)
    classes = ClassMap(tuple(names), box, level, pitch)
    if path.suffix.lower() == ".png":
        return PngSink(path, shape, dtype, classes)
    return PyramidSink(path, shape, dtype, scaled, kind != "classes", classes)


class PngSink(ArraySink):
    """Sink that holds a map of classes in memory and writes it as a PNG with a palette. Raises OSError as others do."""

    def __init__(self, path: Path, shape: Shape, dtype: np.dtype[Any], classes: ClassMap) -> None:
        _check_path(path, (".png",), "PNG: end it in .png")
        if not classes.names or shape[2] != 1 or dtype != np.uint8:
            raise OSError(
                f"{path} would hold {shape[2]} numbers of {dtype} per pixel, but a PNG takes a map of at most 256 "
                "classes. Write a TIFF: end it in .tif."
            )
        if math.prod(shape) > MOST_PNG_PX:
            raise OSError(f"{path}: {shape[0]} x {shape[1]} px are too many for a PNG. Write a TIFF: end it in .tif.")
        super().__init__(shape, dtype)
        self.path, self.classes = path, classes

    def finish(self) -> str:  # type: ignore[override]
        """Write the file under a temporary name, rename it when it is complete, and return its path."""
        image = Image.fromarray(self.whole[..., 0], "P")
        image.putpalette(make_colours(len(self.classes.names)).tobytes())
        info = PngInfo()
        info.add_text("Description", self.classes.to_text())
        with write_beside(self.path) as beside:
            image.save(beside, format="PNG", pnginfo=info)
        return str(self.path)


def _make_palette(classes: ClassMap, dtype: np.dtype[Any]) -> NDArray[np.uint16]:
    """Return TIFF's palette, (3, 256 or 65536) in 16 bits; black where there is no class."""
    palette = np.zeros((3, 1 << 8 * dtype.itemsize), np.uint16)
    palette[:, : len(classes.names)] = make_colours(len(classes.names)).T.astype(np.uint16) * 257
    return palette


def _check_path(path: Path, endings: Sequence[str], kind: str) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the path of a file.")
    if path.suffix.lower() not in endings:
        raise OSError(f"{path} ends in {path.suffix!r}, but a prediction is written as {kind}.")
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{path}: {path.parent} is no folder. Make it, or write to another.")


def _split_blocks(shape: Shape, rows_px: int, cols_px: int) -> Iterator[Tile]:
    for y0, x0 in product(range(0, shape[0], rows_px), range(0, shape[1], cols_px)):
        get_status_board().report(b"writes a pyramid")  # heartbeat: the other ranks wait meanwhile
        yield Tile(Span(y0, min(y0 + rows_px, shape[0])), Span(x0, min(x0 + cols_px, shape[1])))


def _read_tiles(raw: _ScratchArray) -> Iterator[NDArray[Any]]:
    """Yield the tiles of the file in its order; tiles at the edges are padded with zeros."""
    # A row of tiles is read up to `GROUP_PX` wide: the scratch file is in rows of pixels, and one long read of a row
    # replaces many short ones.
    for block in _split_blocks(raw.shape, TILE_PX, GROUP_PX):
        pixels = raw.read(block)
        for x0 in range(0, pixels.shape[1], TILE_PX):
            part = pixels[:, x0 : x0 + TILE_PX]
            tile = np.zeros((TILE_PX, TILE_PX, raw.shape[2]), raw.dtype)
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile[..., 0] if raw.shape[2] == 1 else tile


def _write_halved(raw: _ScratchArray, folder: Path, mixes: bool) -> _ScratchArray:
    """Return means of 2 x 2 pixels, or their most frequent classes; a last odd row or column is repeated."""
    height, width = (-(-px // 2) for px in raw.shape[:2])
    coarser = _ScratchArray(folder, (height, width, raw.shape[2]), raw.dtype)
    for block in _split_blocks(coarser.shape, TILE_PX, GROUP_PX):
        rows, cols = (
            Span(2 * span.start, min(2 * span.stop, px))
            for span, px in zip((block.rows, block.cols), raw.shape[:2], strict=True)
        )
        pixels = raw.read(Tile(rows, cols))
        if mixes:
            height, width = pixels.shape[:2]
            even = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge").astype(np.float32)
            mean = (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4
            coarser.write(block, (mean if pixels.dtype.kind == "f" else np.rint(mean)).astype(pixels.dtype))
        else:  # a mean of classes 1 and 3 would be class 2
            coarser.write(block, halve_classes(pixels))
    return coarser
