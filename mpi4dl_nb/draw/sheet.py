"""A figure as a sheet of paper with inches from its upper left corner as units: boxes, arrows and fitting texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from mpi4dl_nb.draw.figure import INK, Drawing, write_first_fit

__all__ = ["Box", "draw_arrows", "draw_boxes", "make_sheet", "write", "write_fitting"]

HEAD_IN = 0.09  # length of an arrow's head

Box = tuple[float, float, float, float]
"""(left, top, width, height) in inches."""
Point = tuple[float, float]


def make_sheet(width_in: float, height_in: float) -> tuple[Drawing, Axes]:
    """Create an empty sheet."""
    figure = Drawing(figsize=(width_in, height_in))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width_in), ylim=(height_in, 0))  # y falls from above, as on paper
    axes.axis("off")
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    """Write a text that begins at x and is vertically centred at y, unless `style` aligns it otherwise."""
    axes.text(x, y, text, fontsize=size, color=INK, **{"va": "center", "ha": "left"} | style)


def write_fitting(
    axes: Axes, x: float, y: float, forms: Sequence[str], width: float, size: float, **style: Any
) -> None:
    """Write the first of `forms` that is narrower than `width`, centred at (x, y); nothing if none is."""
    settings = {"va": "center", "ha": "center", "color": INK, "fontsize": size} | style
    write_first_fit(axes, x, y, forms, width * axes.figure.dpi, **settings)


def draw_boxes(axes: Axes, boxes: Sequence[Box], **style: Any) -> None:
    """Draw all boxes as one patch, which is faster than one patch per box."""
    corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)) for x, y, w, h in boxes]
    _add_outlines(axes, corners, **style)


def draw_arrows(axes: Axes, spans: Sequence[Point], y: float) -> None:
    """Draw an arrow from left to right for each (start, stop), all at height `y`."""
    outlines = []
    for start, stop in spans:
        neck = stop - HEAD_IN
        outlines.append(((start, y), (neck, y), (neck, y - 0.05), (stop, y), (neck, y + 0.05), (neck, y), (start, y)))
    _add_outlines(axes, outlines, facecolor=INK, edgecolor=INK, linewidth=1)


def _add_outlines(axes: Axes, outlines: Sequence[Sequence[Point]], **style: Any) -> None:
    # One patch with all outlines: 300 boxes as patches of their own take about 20 times as long to draw.
    points = [point for outline in outlines for point in outline]
    codes = [code for each in outlines for code in (Path.MOVETO, *[Path.LINETO] * (len(each) - 2), Path.CLOSEPOLY)]
    if points:
        axes.add_artist(PathPatch(Path(points, codes), **style))
