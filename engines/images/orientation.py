"""Orientation (EXIF and TIFF 6.0, p. 36): the eight ways in which rows and columns of an image may be stored."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from mpi4dl_nb.engines.geometry.tiles import Span, Tile

ORIENTATION = 274  # the tag of EXIF and TIFF
# The eight symmetries of a rectangle: 5 to 8 swap rows and columns, and each of the four corners may come first.
SWAPPED = (5, 6, 7, 8)
_ROWS_REVERSED, _COLS_REVERSED = (3, 4, 7, 8), (2, 3, 6, 7)


def turn_upright(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return a view of stored (H, W, ...) values that is upright.

    >>> import numpy as np
    >>> turn_upright(np.array([[1, 2, 3], [4, 5, 6]]), 6).tolist()
    [[4, 1], [5, 2], [6, 3]]
    """
    return _reverse(values.swapaxes(0, 1) if orientation in SWAPPED else values, orientation)


def turn_back(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return a view of upright (H, W, ...) values as they are stored; the inverse of `turn_upright`.

    >>> import numpy as np
    >>> turn_back(np.array([[4, 1], [5, 2], [6, 3]]), 6).tolist()
    [[1, 2, 3], [4, 5, 6]]
    """
    mirrored = _reverse(values, orientation)
    return mirrored.swapaxes(0, 1) if orientation in SWAPPED else mirrored


def find_stored_tile(tile: Tile, shape: tuple[int, int], orientation: int) -> Tile:
    """Return where a tile of an upright image of `shape` is stored.

    >>> find_stored_tile(Tile(Span(0, 1), Span(0, 2)), (3, 2), 6)
    Tile(Span(start=0, stop=2), Span(start=0, stop=1))
    """
    rows, cols = tile.rows, tile.cols
    if orientation in _ROWS_REVERSED:
        rows = Span(shape[0] - rows.stop, shape[0] - rows.start)
    if orientation in _COLS_REVERSED:
        cols = Span(shape[1] - cols.stop, shape[1] - cols.start)
    return Tile(cols, rows) if orientation in SWAPPED else Tile(rows, cols)


def _reverse(values: NDArray[Any], orientation: int) -> NDArray[Any]:
    return values[:: -1 if orientation in _ROWS_REVERSED else 1, :: -1 if orientation in _COLS_REVERSED else 1]
