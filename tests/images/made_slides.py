"""Slides for tests: the user's own where there is one, and generated ones of several makers' kinds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tifffile import TiffWriter

from mpi4dl_nb.engines.images.picture_reader import Picture
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry

Pixels = NDArray[np.uint8]


def find_shared(name: str) -> Path:
    """A file of the user's data; the test that asks for it is skipped where there is none."""
    folder = Path(os.environ.get("MPI4DL_NB_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
    if not (folder / name).exists():
        pytest.skip(
            f"{folder / name} is not there: put the data into ../shared/data, or name their folder in MPI4DL_NB_DATA"
        )
    return folder / name


def find_misread(picture: Picture, pixels: Pixels) -> list[tuple[int, int, int, int]]:
    """The rectangles (y0, x0, height, width) that four threads at once do not read as they are."""

    def work(seed: int) -> list[tuple[int, int, int, int]]:
        random, wrong = np.random.default_rng(seed), []
        for _ in range(40):
            y0, x0 = (int(random.integers(0, side)) for side in pixels.shape[:2])
            height, width = (
                int(random.integers(1, side - start + 1))
                for side, start in zip(pixels.shape[:2], (y0, x0), strict=True)
            )
            there = pixels[y0 : y0 + height, x0 : x0 + width]
            wrong += [] if np.array_equal(picture.read(y0, x0, height, width), there) else [(y0, x0, height, width)]
        return wrong

    with ThreadPoolExecutor(4) as threads:
        return [box for found in threads.map(work, range(4)) for box in found]


def make_tissue(height: int, width: int) -> Pixels:
    """(height, width, 3): the stained tissue, repeated as in a mirror as often as it takes."""
    sample = immunohistochemistry()
    rows, cols = (-(-side // there) for side, there in zip((height, width), sample.shape[:2], strict=True))
    return np.pad(sample, ((0, (rows - 1) * 512), (0, (cols - 1) * 512), (0, 0)), mode="symmetric")[:height, :width]


def make_levels(pixels: Pixels, factors: Sequence[int]) -> list[Pixels]:
    """Levels: every n-th pixel; sides that do not divide lose the rest, as makers have it."""
    sides = [[side // factor for side in pixels.shape[:2]] for factor in factors]
    return [pixels[::n, ::n][:rows, :cols] for n, (rows, cols) in zip(factors, sides, strict=True)]


def write_svs(
    path: Path, pixels: Pixels, factors: Sequence[int] = (1, 4), tile: int = 64, **options: object
) -> list[Pixels]:
    """As Aperio writes them: baseline, thumbnail, the other levels. Returns the levels' pixels, compressed or not."""
    levels, (rows, cols) = make_levels(pixels, factors), pixels.shape[:2]
    told = (
        f"Aperio Image Library v11.2.1 \r\n{cols}x{rows} [0,0 {cols}x{rows}] ({tile}x{tile}) |AppMag = 20|MPP = 0.4990"
    )
    chosen = {"photometric": "rgb", "compression": "jpeg", "metadata": None} | options
    with TiffWriter(path) as file:
        file.write(levels[0], tile=(tile, tile), description=told, **chosen)
        file.write(levels[0][::8, ::8].copy(), description=told, **chosen)
        for level in levels[1:]:
            file.write(level, tile=(tile, tile), description=told, **chosen)
    return levels


def write_ome(path: Path, pixels: Pixels, factors: Sequence[int] = (1, 2, 4), **options: object) -> list[Pixels]:
    """An OME-TIFF pyramid: smaller levels in SubIFDs, a pixel of 0.25 micrometres."""
    levels = make_levels(pixels, factors)
    told = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.25}
    chosen = {"photometric": "rgb", "tile": (64, 64), "compression": "deflate"} | options
    with TiffWriter(path, ome=True) as file:
        file.write(levels[0], subifds=len(levels) - 1, metadata=told, **chosen)
        for level in levels[1:]:
            file.write(level, subfiletype=1, **chosen)
    return levels


def write_pages(path: Path, pixels: Pixels, factors: Sequence[int] = (1, 2, 4), **options: object) -> list[Pixels]:
    """A pyramid of pages, one after another."""
    levels = make_levels(pixels, factors)
    chosen = {"photometric": "rgb", "tile": (64, 64), "compression": "deflate", "metadata": None} | options
    with TiffWriter(path) as file:
        for number, level in enumerate(levels):
            file.write(level, subfiletype=int(number > 0), **chosen)
    return levels
