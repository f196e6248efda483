"""Where the tiles of a prediction go, in any order: memory, for what is small, or a file (see `pyramid_sink.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.spatial.tiles import Tile

__all__ = ["ArraySink", "MakeSink", "Shape", "TileSink"]

Shape = tuple[int, int, int]
"""Height, width and numbers for each pixel."""


class TileSink(Protocol):
    """Takes every tile once. Raises OSError where it cannot."""

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """(h, w, C), at its place."""

    def finish(self) -> Any:
        """All tiles are there; what is answered."""

    def close(self) -> None:
        """Leave nothing unfinished behind; after `finish` there is nothing to do."""


MakeSink = Callable[[Shape, np.dtype[Any]], TileSink]


class ArraySink:
    """The whole prediction as an (H, W, C) array, or (H, W) of classes."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any]) -> None:
        self.whole = np.zeros(shape, dtype)

    def put(self, tile: Tile, pixels: NDArray[Any]) -> None:
        """At its place."""
        self.whole[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop] = pixels

    def finish(self) -> NDArray[Any]:
        """The array."""
        return self.whole[..., 0] if self.whole.shape[2] == 1 else self.whole

    def close(self) -> None:
        """Nothing to do."""
