"""Rows of bars, one row per rank, as shared by the charts of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from mpi4dl_nb.draw.figure import INK, Drawing, write_first_fit

__all__ = [
    "BarStyle",
    "Box",
    "draw_arrows",
    "draw_bars",
    "draw_boxes",
    "draw_legend",
    "draw_row_frame",
    "draw_rows",
    "draw_stacks",
    "get_row_layout",
    "make_sheet",
    "write",
    "write_fitting",
]

MANY = 12  # rows; a chart with more has lower rows with one line of text


@dataclass(frozen=True)
class BarStyle:
    """Colour, hatch and legend text of one kind of bar."""

    name: str
    colour: str
    hatch: str


def get_row_layout(rows: int) -> tuple[float, str]:
    """Return the height of a row in inches, and the separator between the parts of its texts."""
    return (0.62, "\n") if rows <= MANY else (0.3, ", ")


def draw_bars(
    axes: Axes, rank: int, look: BarStyle, spans: Sequence[tuple[float, float]], top: float, high: float
) -> None:
    """Draw all bars of one style and rank as one patch: a hatch costs 1 ms per patch, for thousands of bars."""
    patch = _make_patch(look, [(a, b, top, top + high) for a, b in spans])
    patch.set(linewidth=0, gid=f"rank {rank}: {look.name}")
    axes.add_patch(patch)


def draw_rows(
    axes: Axes, look: BarStyle, bars: Sequence[tuple[int, float, float]], top: float = -0.36, high: float = 0.72
) -> None:
    """Draw outlined bars (row, start, end) of one style. `top` is relative to the row, `high` a bar's height."""
    if bars:
        patch = _make_patch(look, [(a, b, row + top, row + top + high) for row, a, b in bars])
        patch.set_clip_on(False)  # half of the outline is outside the axes
        axes.add_patch(patch)


def draw_stacks(axes: Axes, looks: Mapping[str, BarStyle], rows: Sequence[Mapping[str, float]]) -> None:
    """Draw one bar per row, stacked of the row's lengths in the order of `looks`, and make room for all rows."""
    bars: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in looks}
    for row, lengths in enumerate(rows):
        end = 0.0
        for kind in looks:
            start, end = end, end + lengths.get(kind, 0)
            if end > start:
                bars[kind].append((row, start, end))
    for kind, spans in bars.items():
        draw_rows(axes, looks[kind], spans)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _make_patch(look: BarStyle, boxes: Sequence[tuple[float, float, float, float]]) -> PathPatch:
    # All rectangles are parts of one path, each closed: M L L L Z, M L L L Z, ...
    corners = [((a, top), (b, top), (b, bottom), (a, bottom), (a, top)) for a, b, top, bottom in boxes]
    codes = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)
    path = Path([corner for bar in corners for corner in bar], codes * len(boxes))
    return PathPatch(path, facecolor=look.colour, hatch=look.hatch, edgecolor=INK, linewidth=0.6, label=look.name)


def draw_legend(figure: Drawing, looks: Sequence[BarStyle]) -> None:
    """Draw the legend of all styles below the figure, four to a line."""
    patches = [Patch(facecolor=each.colour, hatch=each.hatch, edgecolor=INK) for each in looks]
    names = [each.name for each in looks]
    figure.legend(patches, names, loc="outside lower left", ncols=min(4, len(looks)), frameon=False, fontsize=9)


def draw_row_frame(axes: Axes, length: float, unit: str, left: Sequence[str], right: Sequence[str]) -> None:
    """Set up axes of length `length`, with the texts of each row on its left and right."""
    places = range(len(left))
    axes.set(xlim=(0, length), ylim=(len(left) - 0.5, -0.5), xlabel=unit)
    axes.set_yticks(places, left, fontsize=9)
    for place in places[1:]:
        axes.axhline(place - 0.5, color="#bbbbbb", linewidth=0.8)
    opposite = axes.secondary_yaxis("right")  # unlike text beside the axes, it gets its room from the layout
    opposite.set_yticks(places, right, fontsize=9)
    opposite.tick_params(length=0)


# A figure as a sheet of paper with inches from its upper left corner as units: boxes, arrows and fitting texts.


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
