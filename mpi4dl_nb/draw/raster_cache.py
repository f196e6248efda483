"""A picture scaled to the size at which it is drawn, read once from the level that fits, and cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cached_property

import numpy as np
from PIL import Image

from engines.images.picture import Picture, Pixels
from engines.images.thumbnails import make_thumbnail
from engines.spatial.tiles import Tile

__all__ = ["EXACT_PX", "LONGEST_PX", "RasterCache"]

LONGEST_PX = 1200  # of the picture as drawn; more than a screen shows
EXACT_PX = 1 << 20  # pixels; a larger region is read from a coarser level
KEPT = 16  # cached rasters


class RasterCache:
    """A cache of the whole picture and of regions of it, in screen pixels. The oldest entries are dropped first."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._kept: dict[Hashable, Pixels] = {}

    @classmethod
    def of(cls, picture: Picture | RasterCache) -> RasterCache:
        """Return the cache of a picture. A `RasterCache` is returned unchanged."""
        return picture if isinstance(picture, cls) else cls(picture)

    @cached_property
    def _whole(self) -> Pixels:
        return self.picture.thumbnail(LONGEST_PX)

    def render_whole(self, size: tuple[int, int]) -> Pixels:
        """Return the whole picture as (*size, 4). Matplotlib draws RGBA several times faster than RGB."""

        def render() -> Pixels:
            larger = max(size) > max(self._whole.shape[:2])
            how = Image.Resampling.NEAREST if larger else Image.Resampling.BOX
            return np.array(Image.fromarray(self._whole).resize(size[::-1], how).convert("RGBA"))

        return self._get_cached(("whole", size), render)

    def render_region(self, layer_px: tuple[int, int], view: Tile, longest_px: int = LONGEST_PX) -> Pixels:
        """Return the picture under the pixels `view` of a layer as (h, w, 3), averaged over each layer pixel.

        A large region is coarser: its sides are at most `longest_px`.
        """

        def render() -> Pixels:
            # A layer pixel may cover a fraction of the picture's pixels at its edges: whole pixels are read, and the
            # resampling weighs them by their share of `box`.
            (top, bottom), (left, right) = (
                (span.start * side / px, span.stop * side / px)
                for span, side, px in zip((view.rows, view.cols), self.picture.shape(), layer_px, strict=True)
            )
            y0, x0 = int(top), int(left)
            rows, cols = math.ceil(bottom) - y0, math.ceil(right) - x0
            if rows * cols > EXACT_PX:
                return make_thumbnail(self.picture, longest_px, (y0, x0, rows, cols))
            there = Image.fromarray(self.picture.read(y0, x0, rows, cols))
            box = (left - x0, top - y0, right - x0, bottom - y0)
            return np.array(there.resize(view.shape[::-1], Image.Resampling.BOX, box=box))

        return self._get_cached((layer_px, view, longest_px), render)

    def _get_cached(self, key: Hashable, make: Callable[[], Pixels]) -> Pixels:
        """Return the cached entry of `key`, or make it, and drop the oldest entry beyond `KEPT`."""
        # A dict keeps the order of insertion: its first key is the oldest.
        if key not in self._kept:
            self._kept[key] = make()
            if len(self._kept) > KEPT:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]
