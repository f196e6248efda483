"""Basis of all drawings: a figure with alt text for notebooks, and styles that do not depend on colour."""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from engines.formatting import format_bytes

__all__ = [
    "BLUE",
    "CASING",
    "INK",
    "ORANGE",
    "CachedTextCanvas",
    "Drawing",
    "FigurePanels",
    "choose_ticks",
    "format_bytes",
    "format_rank_count",
    "format_ranks",
    "format_size",
    "get_alt_text",
    "get_panel_px",
    "make_panels",
    "write_first_fit",
]

# A canvas that caches rendered text: most of a figure's cost is text, and most texts recur between redraws.
#
# Matplotlib renders text glyph by glyph, which takes half of a redraw of 0.2 s. Here a line is a single Pillow call,
# whose result is cached. Text is still measured by Matplotlib, so that the layout is unchanged. Measurements are
# cached
# too, since every redraw is a new figure. Matplotlib still draws rotated text and formulae.


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


ORANGE, BLUE, INK = "#d95f02", "#0057b8", "#1a1a1a"  # legible on pink and brown tissue, and for the colour-blind
CASING = [withStroke(linewidth=4, foreground="white")]


class Drawing(Figure):
    """A figure that pyplot does not manage, so it need not be closed. A notebook shows it once, with alt text."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        CachedTextCanvas(self)
        self.alt = ""

    def freeze_layout(self) -> None:
        """Run the layout and fix it, so that the room for labels can be measured."""
        for _ in range(2):  # the first pass finds the sides of the axes, the second makes room around them
            self.draw_without_rendering()
        # Labels are fitted to the axes as they are now, so that no later pass may move them.
        self.set_layout_engine("none")

    def to_png(self) -> bytes:
        """Return the figure as a PNG file, compressed at the fastest level for interactive use."""
        buffer = io.BytesIO()
        self.canvas.draw()
        Image.fromarray(np.asarray(self.canvas.buffer_rgba())).convert("RGB").save(buffer, "png", compress_level=1)
        return buffer.getvalue()

    def locate(self, across: float, down: float) -> tuple[str, float, float] | None:
        """Return the label of the axes at a click, and x and y in data coordinates; None outside all axes.

        `across` and `down` are fractions of the image, from its upper left corner.
        """
        place = self.transSubfigure.transform((across, 1 - down))
        for axes in reversed(self.axes):  # those that were added last are on top
            if axes.axison and axes.patch.contains_point(place):
                x, y = axes.transData.inverted().transform(place)
                return axes.get_label(), float(x), float(y)
        return None

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.to_png()).decode()
        return f'<img alt="{escape(self.alt)}" style="max-width:100%" src="data:image/png;base64,{data}">'


def write_first_fit(axes: Axes, x: float, y: float, forms: Iterable[str], width_px: float, **style: Any) -> Text | None:
    """Write the first of `forms` that is narrower than `width_px` on the screen, and return it; None if none is."""
    for form in forms if width_px > 0 else ():
        text = axes.text(x, y, form, **style)
        if text.get_window_extent().width < width_px:
            return text
        text.remove()
    return None


def get_alt_text(figure: Figure) -> str:
    """Return the alt text of a `Drawing`; empty for any other figure."""
    return getattr(figure, "alt", "")


def format_size(shape: tuple[int, int]) -> str:
    """
    >>> format_size((256, 1))
    '256 × 1'
    """
    return f"{shape[0]} × {shape[1]}"


def format_rank_count(count: int) -> str:
    """
    >>> format_rank_count(1), format_rank_count(2048)
    ('1 rank', '2,048 ranks')
    """
    return f"{count:,} rank{'s' * (count != 1)}"


def format_ranks(ranks: Sequence[int]) -> str:
    """
    >>> format_ranks([4]), format_ranks([0, 1]), format_ranks([0, 1, 2, 5]), format_ranks([3, 2, 1])
    ('rank 4', 'ranks 0, 1', 'ranks 0 to 2, 5', 'ranks 3 to 1')
    """
    # Ranks of mirrored stages fall. In a run, rank - index is constant if ranks rise, rank + index if they fall.
    way = -1 if len(ranks) > 1 and ranks[1] < ranks[0] else 1
    runs: list[str] = []
    for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - way * pair[0]):
        members = [rank for _, rank in run]
        runs += [f"{members[0]} to {members[-1]}"] if len(members) > 2 else map(str, members)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"


# Panels of a drawing at computed positions, so that no layout pass is needed while a slider moves.


WIDTH_IN, LEFT_IN, TOP_IN = 11.0, 0.75, 0.9
MAIN_IN, TALLEST_IN = 5.6, 7.6  # of the large panel
BESIDE_IN, SIDE_LEFT_IN, SIDE_IN = 7.0, 7.5, 2.9  # left edges of words and small panel; its longer side
BELOW_IN = 0.95  # below the large panel: ticks, label, legend
UNDER_SIDE_IN, LINE_IN = 0.7, 0.167
TICKS = 4
LEGEND_IN = 0.45
LINE = 59  # characters in a line of the words


@dataclass(frozen=True)
class FigurePanels:
    """A drawing with a large panel, an optional small one (None: left out), and axes for text."""

    figure: Drawing
    main: Axes
    words: Axes
    side: Axes | None

    def draw_title(self, title: str) -> str:
        """Write the title at the top of the figure and return it."""
        style = {"ha": "left", "va": "top", "fontsize": 10, "color": INK}
        self.figure.text(LEFT_IN / WIDTH_IN, 1 - 0.14 / self.figure.get_figheight(), title, **style)
        return title

    def draw_lines(self, lines: Sequence[str]) -> None:
        """Write the lines into the text axes."""
        self.words.text(0, 1, _wrap(lines), ha="left", va="top", fontsize=9, color=INK)


def make_panels(main: tuple[int, int], side: tuple[int, int] | None, words: Sequence[str] = ()) -> FigurePanels:
    """Create panels with the aspect ratios of pictures of `main` and `side` (rows, columns), and room for the words."""
    #     LEFT_IN                     SIDE_LEFT_IN
    #     |title                      |
    #     |+--------------------+     |+-----------+   TOP_IN
    #     ||                    |     ||   side    |
    #     ||        main        |     |+-----------+
    #     ||                    |     UNDER_SIDE_IN: its ticks and label
    #     |+--------------------+     words (BESIDE_IN)
    #     BELOW_IN: ticks, label, legend of the figure
    #
    # The figure is as high as the higher one of its two columns.
    main_in = _fit_sides(main, MAIN_IN, TALLEST_IN)
    side_in = _fit_sides(side, SIDE_IN, SIDE_IN) if side else (0.0, 0.0)
    words_in = LINE_IN * (1 + _wrap(words).count("\n"))
    beside = side_in[0] + UNDER_SIDE_IN * bool(side) + words_in
    height = TOP_IN + max(main_in[0] + BELOW_IN, beside + LEGEND_IN)
    figure = Drawing(figsize=(WIDTH_IN, height))

    def add_axes(left: float, top: float, size: tuple[float, float], name: str) -> Axes:
        bottom = 1 - (top + size[0]) / height
        return figure.add_axes((left / WIDTH_IN, bottom, size[1] / WIDTH_IN, size[0] / height), label=name)

    large = add_axes(LEFT_IN, TOP_IN, main_in, "main")
    text = add_axes(BESIDE_IN, TOP_IN + beside - words_in, (words_in, WIDTH_IN - BESIDE_IN), "words")
    text.axis("off")
    small = add_axes(SIDE_LEFT_IN, TOP_IN, side_in, "side") if side else None
    return FigurePanels(figure, large, text, small)


def _wrap(lines: Sequence[str]) -> str:
    return "\n".join(textwrap.fill(line, LINE, subsequent_indent="   ") for line in lines)


def _fit_sides(shape: tuple[int, int], width: float, height: float) -> tuple[float, float]:
    """Return the largest (height, width) with the aspect ratio of `shape` that fits into `width` and `height`."""
    scale = min(width / shape[1], height / shape[0])
    return shape[0] * scale, shape[1] * scale


def get_panel_px(axes: Axes) -> tuple[int, int]:
    """Return the rows and columns of screen pixels in a panel, at least 1 each."""
    box = axes.get_window_extent()
    return max(1, round(box.height)), max(1, round(box.width))


def choose_ticks(low: int, high: int, most: int = TICKS) -> Sequence[int]:
    """Return a few round numbers between `low` and `high`. Few, since each label costs 1 ms to draw.

    >>> choose_ticks(0, 512)
    [0, 200, 400]
    """
    step = 1
    # Steps of 1, 2, 5, 10, 20, ...: the smallest that gives at most `most` labels.
    for step in (first * 10**power for power in range(12) for first in (1, 2, 5)):
        if (high - low) / step <= most:
            break
    return list(range(-(-low // step) * step, high + 1, step))
