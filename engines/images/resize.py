"""Tile-wise resizing of pictures: each tile is bit-identical to the same tile of the resized whole picture.

Only the source pixels that a tile needs are read. The filter is Pillow's bilinear one, which averages when shrinking:
fixed-point weights, columns before rows, rounding to bytes in between. Pillow itself cannot resize a tile this way: it
handles the borders of a box in single precision, and the order of columns and rows depends on the box's size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engines.images.picture import Pixels
from engines.spatial.tiles import Span, Tile

__all__ = ["find_nearest_pixels", "resize_tile"]

_BITS = 22  # fractional bits of a weight: with the 8 bits of a pixel, a sum fits into the 31 bits of an int32

Size = tuple[int, int]
Whole = NDArray[np.int64]


def resize_tile(read: Callable[[Tile], Pixels], source: Size, target: Size, tile: Tile) -> Pixels:
    """Return the pixels of `tile`, (h, w, 3), of a picture of `source` = (height, width) resized to `target`.

    `read` returns the pixels of a tile of the source, (H, W, 3).
    """
    #                  tile of the target          source
    #     rows          |..####......|     ->      |....##########............|
    #                                                  ^ taps of the tile's first and last pixel
    #
    # The taps of a pixel depend on its place in the whole target only, so that tiles agree where they meet. Pillow
    # sums over columns first and rounds to bytes; the same order gives the same bytes.
    if source == target:
        return read(tile)
    rows, cols = (
        _compute_taps(size, wanted, span)
        for size, wanted, span in zip(source, target, (tile.rows, tile.cols), strict=True)
    )
    pixels = read(Tile(_compute_span(rows[0]), _compute_span(cols[0])))
    return _apply_taps(_apply_taps(pixels, *cols, axis=1), *rows, axis=0)


def find_nearest_pixels(source: int, target: int, span: Span) -> Whole:
    """Return the index of the nearest of `source` pixels for each pixel of `span` among `target`, along one axis.

    >>> find_nearest_pixels(source=6, target=3, span=Span(1, 3)).tolist()
    [3, 5]
    """
    return (2 * np.arange(span.start, span.stop) + 1) * source // (2 * target)


def _compute_taps(source: int, target: int, span: Span) -> tuple[Whole, NDArray[np.int32]]:
    """Return the source pixels that each pixel of `span` is a sum of, and their weights; both (pixels, taps).

    The operations and their order are those of `precompute_coeffs` and `normalize_coeffs_8bpc` in Pillow's Resample.c.
    """
    # Pixel i of the target is centred at (i + 1/2) * scale in the source. Its filter is a triangle of half width
    # `scale` when shrinking, so that every source pixel counts, and 1 (plain linear interpolation) when enlarging.
    scale = source / target
    support = max(scale, 1.0)
    centre = (np.arange(span.start, span.stop)[:, None] + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.int64), source)
    place = first + np.arange(int((stop - first).max()))
    weights = np.maximum(1.0 - np.abs((place - centre + 0.5) * (1.0 / support)), 0.0)
    weights[place >= stop] = 0.0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # cumsum adds sequentially, as Pillow does; sum would add pairwise
    # Taps beyond `stop` have weight 0; their index is clipped so that a tile does not read pixels that it ignores.
    return np.minimum(place, stop - 1), (0.5 + weights * (1 << _BITS)).astype(np.int32)


def _compute_span(places: Whole) -> Span:
    return Span(int(places.min()), int(places.max()) + 1)


def _apply_taps(pixels: Pixels, places: Whole, weights: NDArray[np.int32], axis: int) -> Pixels:
    """Return the weighted sum of the pixels at `places` along an axis, rounded to bytes."""
    shape = [-1 if each == axis else 1 for each in range(3)]
    total: NDArray[np.int32] = np.array(1 << (_BITS - 1), np.int32)  # one half, so that the shift below rounds
    for place, weight in zip((places - places.min()).T, weights.T, strict=True):
        total = total + np.take(pixels, place, axis) * weight.reshape(shape)
    return (total >> _BITS).astype(np.uint8)
