"""Basis of all drawings: a figure with alt text for notebooks, and bars whose style does not depend on colour."""

from __future__ import annotations

import base64
import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axes._secondary_axes import SecondaryAxis
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.text import Text

from mpi4dl_nb.draw.plain_text import PlainCanvas, is_mathematics

STYLE = pathlib.Path(__file__).parents[1].joinpath("page/figure/drawing.css").read_text(encoding="utf-8")
ORANGE, BLUE, INK = "#d95f02", "#0057b8", "#1a1a1a"  # legible on pink and brown tissue, and for the colour-blind
TILE_COLOURS = (BLUE, ORANGE, "#007d5a", "#a3338a")
"""Of tiles: those of an even row alternate between the first two, of an odd row between the others, so that all
neighbours differ, corners included."""
CASING = [withStroke(linewidth=4, foreground="white")]
MANY = 12  # rows; a chart with more has lower rows with one line of text

Style = dict[str, Any]
"""Keywords of a function of Matplotlib."""

Box = tuple[float, float, float, float]
"""(left, top, width, height) in the coordinates of the axes, whose y falls from above."""


class Drawing(Figure):
    """A figure that pyplot does not manage, so it need not be closed. A notebook shows it once, with alt text.

    >>> from mpi4dl_nb import Drawing
    >>> figure = Drawing(figsize=(4, 2))
    >>> figure.alt = "A line that rises."
    >>> line = figure.subplots().plot([1, 2, 3])
    >>> "A line that rises." in figure._repr_html_()
    True
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.canvas: PlainCanvas = PlainCanvas(self)
        self.alt = ""

    def draw(self, renderer: Any) -> None:
        """Draw the figure; canvases of other formats, such as PDF, find no formulas in its names either."""
        for text in self.findobj(Text):
            if "$" in text.get_text() and not is_mathematics(text.get_text()):
                text.set_parse_math(False)
        super().draw(renderer)

    def freeze_layout(self) -> None:
        """Run the layout and fix it, so that the room for labels can be measured."""
        for _ in range(2):  # the first pass finds the sides of the axes, the second makes room around them
            self.draw_without_rendering()
        # Labels are fitted to the axes as they are now, so that no later pass may move them.
        self.set_layout_engine("none")

    def to_png(self) -> bytes:
        """Return the figure as a PNG file, compressed at the fastest level for interactive use."""
        buffer = io.BytesIO()
        self.canvas.print_png(buffer, pil_kwargs={"compress_level": 1})
        return buffer.getvalue()

    def outline_paper(self) -> str:
        """Return what a dark theme darkens, as a CSS shape: all but the axes whose colours are values or tissue.

        The figure must have been drawn.

        >>> Drawing().outline_paper()
        'polygon(evenodd, 0% 0%, 100% 0%, 100% 100%, 0% 100%, 0% 0%)'
        """
        kinds = AxesImage, QuadMesh  # a colour bar is the latter
        coloured = (axes for axes in self.get_axes() if any(isinstance(part, kinds) for part in axes.get_children()))
        boxes = [axes.get_position() for axes in coloured]
        # One line around the figure, and from its corner around each hole and back.
        loops = [(0.0, 1.0, 1.0, 0.0), *((box.x0, box.y1, box.x1, box.y0) for box in boxes)]
        corners = [
            corner
            for left, top, right, bottom in loops
            for corner in ((left, top), (right, top), (right, bottom), (left, bottom), (left, top), (0.0, 1.0))
        ]
        points = [f"{100 * x:.4g}% {100 * (1 - y):.4g}%" for x, y in (*corners[:5], *corners[6:])]
        return f"polygon(evenodd, {', '.join(points)})"

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.to_png()).decode()
        image = f'<img alt="{escape(self.alt)}" style="max-width:100%" src="data:image/png;base64,{data}">'
        night = f'<i style="clip-path: {self.outline_paper()}"></i>'
        return f'<div class="mpi4dl-drawing"><style>{STYLE}</style>{image}{night}</div>'


def write_first_fit(axes: Axes, x: float, y: float, forms: Iterable[str], width_px: float, **style: Any) -> Text | None:
    """Write the first of `forms` that is narrower than `width_px` on the screen, and return it; None if none is."""
    for form in forms if width_px > 0 else ():
        text = axes.text(x, y, form, **{"ha": "center", "va": "center", "color": INK} | style)
        if text.get_window_extent().width < width_px:
            return text
        text.remove()
    return None


def format_size(shape: Sequence[int]) -> str:
    """
    >>> format_size((256, 1))
    '256 × 1'
    """
    return " × ".join(map(str, shape))


# Rows of bars, one row per rank, as shared by the charts of time.


@dataclass(frozen=True)
class BarStyle:
    """Colour, hatch and legend text of one kind of bar."""

    name: str
    colour: str
    hatch: str

    @property
    def patch(self) -> Style:
        """The keywords of a Matplotlib patch."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": INK, "linewidth": 0.6}


Looks = Mapping[str, BarStyle]  # of each kind of bar
BarRows = Sequence[Mapping[str, float]]  # the lengths in each row, by kind


def get_row_layout(rows: int) -> tuple[float, str]:
    """Return the height of a row in inches, and the separator between the parts of its texts."""
    return (0.62, "\n") if rows <= MANY else (0.3, ", ")


def draw_boxes(axes: Axes, boxes: Sequence[Box], **style: Any) -> None:
    """Draw all boxes as one patch: each patch with a hatch takes 1 ms, and there may be thousands of boxes.

    The limits of the axes are not adapted to it, which would take longer than drawing it.
    """
    # All rectangles are parts of one path, each closed: M L L L Z, M L L L Z, ...
    corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y)) for x, y, w, h in boxes]
    codes = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)
    if boxes:
        axes.add_artist(PathPatch(Path([point for box in corners for point in box], codes * len(boxes)), **style))


def draw_stacks(axes: Axes, looks: Looks, rows: BarRows, ends: Sequence[str] = (), high: float = 0.72) -> None:
    """Draw one bar per row, stacked of the row's lengths in the order of `looks`, with the text in `ends` after it."""
    stops = [0.0] * len(rows)
    for kind, look in looks.items():
        shown = [row for row, lengths in enumerate(rows) if lengths.get(kind)]
        starts, lengths = [stops[row] for row in shown], [rows[row][kind] for row in shown]
        axes.barh(shown, lengths, high, starts, label=look.name, clip_on=False, **look.patch)
        for row, start, length in zip(shown, starts, lengths, strict=True):
            stops[row] = start + length
    for row, text in enumerate(ends):
        axes.text(stops[row], row, f" {text}", va="center", fontsize=9, color=INK)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def draw_legend(figure: Drawing, looks: Sequence[BarStyle]) -> None:
    """Draw the legend of all styles below the figure, four to a line."""
    patches = [Patch(facecolor=look.colour, hatch=look.hatch, edgecolor=INK, label=look.name) for look in looks]
    figure.legend(handles=patches, loc="outside lower left", ncols=min(4, len(looks)), frameon=False, fontsize=9)


def draw_row_frame(axes: Axes, length: float, unit: str, left: Sequence[str], right: Sequence[str]) -> None:
    """Set up axes of length `length`, with the texts of each row on its left and right."""
    rows = range(len(left))
    axes.set(xlim=(0, length), ylim=(len(left) - 0.5, -0.5), xlabel=unit)
    axes.set_yticks(rows, left, fontsize=9)
    for row in rows[1:]:
        axes.axhline(row - 0.5, color="#bbbbbb", linewidth=0.8)
    write_row_ends(axes, right)


def write_row_ends(axes: Axes, texts: Sequence[str]) -> SecondaryAxis:
    """Write a text on the right of each row, and return the axis that they belong to."""
    opposite = axes.secondary_yaxis("right")  # unlike text beside the axes, it gets its room from the layout
    opposite.set_yticks(range(len(texts)), texts, fontsize=9)
    opposite.tick_params(length=0)
    return opposite
