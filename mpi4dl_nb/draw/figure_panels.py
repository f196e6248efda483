"""Panels of a drawing at computed positions, so that no layout pass is needed while a slider moves."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from mpi4dl_nb.draw.figure import INK, Drawing

__all__ = ["FigurePanels", "choose_ticks", "get_panel_px", "make_panels"]

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
