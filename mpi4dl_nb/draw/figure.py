"""Basis of all drawings: a figure with alt text for notebooks, and styles that do not depend on colour."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from PIL import Image

from engines.formatting import format_bytes
from mpi4dl_nb.draw.text_canvas import CachedTextCanvas

__all__ = [
    "BLUE",
    "CASING",
    "INK",
    "ORANGE",
    "Drawing",
    "format_bytes",
    "format_rank_count",
    "format_ranks",
    "format_size",
    "get_alt_text",
    "write_first_fit",
]

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
