"""Readers of whole slides of many vendors through OpenSlide, and of any object with OpenSlide's interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import cloudpickle
import numpy as np

from engines.errors import ImageError
from engines.images.files import FileReader, translate_errors
from engines.images.picture_reader import Level, Picture, Pixels, convert_array
from engines.spatial.tiles import Span, Tile

__all__ = ["OpenSlidePicture", "SlideLike", "SlideLikePicture", "detect", "has_openslide", "make_openslide_error"]

BLOCK_PX = 1024  # side of a block read at once; OpenSlide's copy of it is released before the next one is read
BLENDED_PX = 256  # the same, for a level whose downsample factor is not an integer


@runtime_checkable
class SlideLike(Protocol):
    """The common interface of OpenSlide, TiffSlide and others. Sizes are (width, height), locations (x, y)."""

    level_dimensions: Sequence[tuple[int, int]]
    level_downsamples: Sequence[float]  # pixels of level 0 per pixel of the level

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Any:
        """Return an image of `size` pixels of a level, whose first pixel is at `location` in pixels of level 0."""


def has_openslide() -> bool:
    """Return whether the extra `wsi` is installed."""
    return find_spec("openslide") is not None


def make_openslide_error(path: Path) -> ImageError:
    """Build the error for a slide if the extra `wsi` is not installed."""
    return ImageError(
        f"{path} is a whole slide, which OpenSlide reads: pip install 'mpi4dl_nb[wsi]', or save it as a tiled TIFF "
        "file."
    )


def detect(path: Path) -> str | None:
    """Return the vendor that OpenSlide detects for a file; None if it detects none or is not installed."""
    if not has_openslide():
        return None
    import openslide  # an optional package, with a shared library of its own

    with translate_errors(path):
        maker: str | None = openslide.OpenSlide.detect_format(path)
        return maker


class OpenSlidePicture(FileReader[Any]):
    """A slide in a file. Raises ImageError if OpenSlide cannot open it or is not installed."""

    def _open(self) -> tuple[Any, Sequence[Level], float | None]:
        if not has_openslide():
            raise make_openslide_error(self.path)
        import openslide

        with translate_errors(self.path):
            slide = openslide.OpenSlide(self.path)
        return slide, _read_levels(slide, self.path.name), _read_microns(slide)

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        handle = self.handle
        try:
            with translate_errors(self.path):
                _read(handle, self.levels[level], level, out, (y0, x0))
        except ImageError:
            self.close()  # an OpenSlide handle that failed once fails for ever
            raise


class SlideLikePicture(Picture):
    """A slide object that the caller has opened. To reach other ranks, the object itself is pickled, if possible."""

    def __init__(self, slide: SlideLike) -> None:
        super().__init__("slide", _read_levels(slide, "slide"), _read_microns(slide))
        self._slide = slide

    def _fill(self, out: Pixels, y0: int, x0: int, level: int) -> None:
        with self._lock:
            _read(self._slide, self.levels[level], level, out, (y0, x0))

    def __getstate__(self) -> dict[str, Any]:
        try:
            return super().__getstate__() | {"_slide": cloudpickle.dumps(self._slide)}
        except Exception as error:  # pickling a foreign object may raise anything
            kind = type(self._slide).__name__
            raise ImageError(f"An open {kind} cannot be sent to another rank ({error}). Give its path.") from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_slide": cloudpickle.loads(state["_slide"])})


def _read_levels(slide: SlideLike, name: str) -> list[Level]:
    levels = [
        Level(int(height), int(width), float(factor))
        for (width, height), factor in zip(slide.level_dimensions, slide.level_downsamples, strict=True)
    ]
    if not levels or min(min(level.shape) for level in levels) < 1:
        raise ImageError(f"{name} has levels of {[level.shape for level in levels]} px: there is nothing to read.")
    return levels


def _read_microns(slide: SlideLike) -> float | None:
    """Return the mean of a pixel's two sides in micrometres, or None if it is not given."""
    properties = getattr(slide, "properties", {})
    try:
        sides = [float(properties[f"openslide.mpp-{axis}"]) for axis in "xy"]
    except (KeyError, TypeError, ValueError):
        return None
    return sum(sides) / 2 if min(sides) > 0 and all(map(math.isfinite, sides)) else None


def _read(slide: SlideLike, shape: Level, level: int, out: Pixels, corner: tuple[int, int]) -> None:
    """Fill `out` with the rectangle of a level whose first pixel is `corner` = (row, column).

    OpenSlide takes the location in pixels of level 0. With an integer downsample factor n, row y starts exactly at
    y * n. With any other (32914 rows become 8228: the factor is 4.0001), most rows start between two rows of level 0,
    and OpenSlide interpolates by the remainder, so that pixels would depend on where a read starts. Such a level is
    therefore read in blocks of a fixed grid, each from the nearest location: every read returns the same pixels, at
    most half a pixel of level 0 from their true position.
    """
    #     +-------+-------+-------+
    #     |    +--|---+   |       |       A read (the inner box) of such a level takes whole blocks of the grid, and
    #     +----|--+---|---+-------+       keeps what it needs of each. Of a level with an integer factor it takes only
    #     |    +--|---+   |       |       the parts of blocks inside the box.
    #     +-------+-------+-------+
    wanted = Tile(Span(corner[0], corner[0] + out.shape[0]), Span(corner[1], corner[1] + out.shape[1]))
    exact = shape.downsample.is_integer()
    side_px, within = (BLOCK_PX, wanted) if exact else (BLENDED_PX, Tile.whole(*shape.shape))
    starts = ([*range(span.start - span.start % side_px, span.stop, side_px)] for span in (wanted.rows, wanted.cols))
    for y0, x0 in product(*starts):
        block = Tile(Span(y0, y0 + side_px), Span(x0, x0 + side_px)) & within
        location = round(block.cols.start * shape.downsample), round(block.rows.start * shape.downsample)
        rows, cols = block.shape
        part = convert_array(np.asarray(slide.read_region(location, level, (cols, rows))), "What read_region gave")
        if part.shape[:2] != (rows, cols):
            raise ImageError(f"Asked for {rows} x {cols} px, read_region gave {part.shape[0]} x {part.shape[1]}.")
        common = block & wanted
        out[common.to_slices(wanted)] = part[common.to_slices(block)]
