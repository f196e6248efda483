"""Pictures brought to another size part by part: each part has, to the bit, the pixels of the whole brought there.

Only what a part needs is read. Pictures follow the rule of Pillow's bilinear filter, which averages where it shrinks:
weights in fixed point, columns before rows, bytes in between. Pillow itself cannot do this for a part: it takes the
borders of a part in single precision, and whether columns or rows come first depends on its size.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engines.images.picture import Pixels
from engines.spatial.tiles import Span, Tile

__all__ = ["find_nearest_pixels", "resize_tile"]

_BITS = 22  # of a weight, after the point: with 8 of a pixel, a sum fits into 31

Size = tuple[int, int]
Whole = NDArray[np.int64]


def resize_tile(read: Callable[[Tile], Pixels], source: Size, target: Size, tile: Tile) -> Pixels:
    """(h, w, 3): the pixels of `tile` of a picture of `source` = (height, width), brought to `target`.

    `read` gives the pixels of a tile of the source, (H, W, 3).
    """
    if source == target:
        return read(tile)
    rows, cols = (
        _compute_taps(size, wanted, span)
        for size, wanted, span in zip(source, target, (tile.rows, tile.cols), strict=True)
    )
    pixels = read(Tile(_compute_span(rows[0]), _compute_span(cols[0])))
    return _apply_taps(_apply_taps(pixels, *cols, axis=1), *rows, axis=0)


def find_nearest_pixels(source: int, target: int, span: Span) -> Whole:
    """The nearest of `source` pixels for each of `span` of `target` pixels, along one axis.

    >>> find_nearest_pixels(source=6, target=3, span=Span(1, 3)).tolist()
    [3, 5]
    """
    return (2 * np.arange(span.start, span.stop) + 1) * source // (2 * target)


def _compute_taps(source: int, target: int, span: Span) -> tuple[Whole, NDArray[np.int32]]:
    """For each pixel of `span`: of which source pixels it is the sum, and their weights; both (pixels, taps).

    The same operations in the same order as `precompute_coeffs` and `normalize_coeffs_8bpc` of Pillow's Resample.c.
    """
    scale = source / target
    support = max(scale, 1.0)
    centre = (np.arange(span.start, span.stop)[:, None] + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((centre + support + 0.5).astype(np.int64), source)
    place = first + np.arange(int((stop - first).max()))
    weights = np.maximum(1.0 - np.abs((place - centre + 0.5) * (1.0 / support)), 0.0)
    weights[place >= stop] = 0.0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # one after the other, as Pillow adds them
    return np.minimum(place, stop - 1), (0.5 + weights * (1 << _BITS)).astype(np.int32)


def _compute_span(places: Whole) -> Span:
    return Span(int(places.min()), int(places.max()) + 1)


def _apply_taps(pixels: Pixels, places: Whole, weights: NDArray[np.int32], axis: int) -> Pixels:
    """The weighted sum of the pixels at these places along an axis, rounded to bytes."""
    shape = [-1 if each == axis else 1 for each in range(3)]
    total: NDArray[np.int32] = np.array(1 << (_BITS - 1), np.int32)
    for place, weight in zip((places - places.min()).T, weights.T, strict=True):
        total = total + np.take(pixels, place, axis) * weight.reshape(shape)
    return (total >> _BITS).astype(np.uint8)
