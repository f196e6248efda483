"""Basis of all drawings: a figure with alt text for notebooks, and styles that do not depend on colour."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from engines.formatting import format_bytes
from mpi4dl_nb.draw.text_canvas import CachedTextCanvas

__all__ = ["BLUE", "CASING", "INK", "ORANGE", "Drawing", "format_bytes", "format_ranks", "format_size", "get_alt_text"]

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
        for axes in reversed(self.axes):
            if axes.axison and axes.patch.contains_point(place):
                x, y = axes.transData.inverted().transform(place)
                return axes.get_label(), float(x), float(y)
        return None

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.to_png()).decode()
        return f'<img alt="{escape(self.alt)}" style="max-width:100%" src="data:image/png;base64,{data}">'


def get_alt_text(figure: Figure) -> str:
    """Return the alt text of a `Drawing`; empty for any other figure."""
    return getattr(figure, "alt", "")


def format_size(shape: tuple[int, int]) -> str:
    """
    >>> format_size((256, 1))
    '256 × 1'
    """
    return f"{shape[0]} × {shape[1]}"


def format_ranks(ranks: Sequence[int]) -> str:
    """
    >>> format_ranks([0, 1, 2, 4]), format_ranks([3])
    ('ranks 0 to 2, 4', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(told)}"
