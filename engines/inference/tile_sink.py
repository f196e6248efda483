"""Sinks for the tiles of a prediction, in any order: memory, for small ones, or a file (see `pyramid_sink.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.spatial.tiles import Tile

__all__ = ["ArraySink", "MakeSink", "Shape", "TileSink"]

Shape = tuple[int, int, int]
"""Height, width, and channels per pixel."""


class TileSink(Protocol):
    """Sink that receives every tile once. Its methods raise OSError if they fail."""

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """Store the (h, w, C) `pixels` of `tile`."""

    def finish(self) -> Any:
        """Complete the output after all tiles, and return the result."""

    def close(self) -> None:
        """Discard what is unfinished; a no-op after `finish`."""


MakeSink = Callable[[Shape, np.dtype[Any]], TileSink]


class ArraySink:
    """Sink that holds the whole prediction as an (H, W, C) array, or (H, W) if C is 1."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.whole = np.zeros(shape, dtype)

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """Copy the tile into the array."""
        self.whole[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop] = pixels

    def finish(self) -> NDArray[Any]:
        """Return the array."""
        return self.whole[..., 0] if self.whole.shape[2] == 1 else self.whole

    def close(self) -> None:
        """Do nothing."""
