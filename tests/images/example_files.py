"""A picture, the classes of its pixels and a region of it, and how they get into files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpi4dl_nb.engines.geometry.tiles import Span, Tile

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (60, 80, 3), dtype=np.uint8)
CLASSES = RANDOM.integers(0, 3, (60, 80)).astype(np.uint8)
REGION = Tile(Span(-5, 41), Span(50, 90))  # reaches outside, above and to the right
FRAMES = {"whole": None, "region": REGION}


def save_image(path: Path, pixels: NDArray[np.generic], mode: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)
    return path
