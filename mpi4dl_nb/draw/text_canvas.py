"""A canvas that caches rendered text: most of a figure's cost is text, and most texts recur between redraws.

Matplotlib renders text glyph by glyph, which takes half of a redraw of 0.2 s. Here a line is a single Pillow call,
whose result is cached. Text is still measured by Matplotlib, so that the layout is unchanged. Measurements are cached
too, since every redraw is a new figure. Matplotlib still draws rotated text and formulae.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.font_manager import findfont
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

__all__ = ["CachedTextCanvas"]

KEPT_LINES, KEPT_SIZES = 512, 4096


class CachedTextCanvas(FigureCanvasAgg):
    """An Agg canvas with cached text, for raster images. Other formats have canvases of their own."""

    def get_renderer(self) -> RendererAgg:
        """Return the renderer, created anew if the size or the dpi of the figure has changed."""
        width, height = self.figure.bbox.size
        wanted = (width, height, self.figure.dpi)  # `savefig` changes the dpi for the time of the call
        if wanted != getattr(self, "_wanted", None):
            self.renderer, self._wanted = _CachedTextRenderer(width, height, self.figure.dpi), wanted
        return self.renderer


class _CachedTextRenderer(RendererAgg):
    def get_text_width_height_descent(self, s: str, prop: Any, ismath: bool) -> tuple[float, float, float]:
        """Return width, height and descent in pixels, from the cache if possible."""
        # A copy, since `prop` is part of the cache's key and its owner may change it.
        return _measure_text(s, prop.copy(), ismath, self.dpi)

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: bool = False, mtext: Any = None
    ) -> None:
        """Draw a line of text. `y` is its baseline, measured from the top."""
        if ismath or angle:  # few texts are, so that they are not worth an own way
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        size_px = prop.get_size_in_points() * self.dpi / 72
        red, green, blue, alpha = (round(255 * part) for part in (*gc.get_rgb()[:3], gc.get_alpha()))
        # The colour is part of the cached pixels: text is drawn in few colours, and blending it here would take longer.
        left, below, line = _render_line(s, findfont(prop), size_px, (red, green, blue, alpha))
        self.draw_image(gc, round(x) + left, self.height - round(y) - below, line)


@lru_cache(KEPT_SIZES)
def _measure_text(text: str, prop: Any, ismath: bool, dpi: float) -> tuple[float, float, float]:
    # A renderer of one pixel is enough to measure. The figure's own one cannot be a key: each redraw has another.
    return _make_renderer(dpi).get_text_width_height_descent(text, prop, ismath)


@lru_cache
def _make_renderer(dpi: float) -> RendererAgg:
    return RendererAgg(1, 1, dpi)


@lru_cache(KEPT_LINES)
def _render_line(
    text: str, font_file: str, size_px: float, colour: tuple[int, int, int, int]
) -> tuple[int, int, NDArray[np.uint8]]:
    """Return a line's left edge and depth relative to the start of its baseline, and its pixels (h, w, 4)."""
    # Layout.BASIC, since Raqm is not in every build of Pillow and may place glyphs otherwise than Matplotlib.
    font = ImageFont.truetype(font_file, size_px, layout_engine=ImageFont.Layout.BASIC)
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text, anchor="ls"))
    # The box of a line may begin left of the pen (as of a j) and always begins above the baseline: `left` and `top` are
    # negative then. The mask is shifted by both, and the caller shifts it back.
    mask = Image.new("L", (max(1, right - left), max(1, bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, fill=colour[3], font=font, anchor="ls")
    pixels = np.empty((mask.height, mask.width, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = colour[:3], np.asarray(mask)
    return left, bottom, pixels[::-1]  # `draw_image` expects the bottom row first
