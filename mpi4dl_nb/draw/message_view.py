"""One message that has arrived: its values, and those of its destination before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from torch import Tensor

from mpi4dl_nb.draw.figure import INK, format_bytes, format_size
from mpi4dl_nb.draw.rank_panels import MAPS, FigureBox
from mpi4dl_nb.step_events import StepView, Transfer

__all__ = ["describe_message", "draw_message"]

LONG, DEEP = 5, 2
"""Number of cells shown along a strip, and across it."""


@dataclass(frozen=True)
class _CellStrip:
    """The middle of a piece, horizontal. `first` is the index of its first cell; `along` is `row` or `column`."""

    numbers: NDArray[np.float64] | None
    first: int
    along: str


def draw_message(figure: Figure, view: StepView, box: FigureBox, focus: int) -> None:
    """Draw the values before, those that arrived, and those after, cell by cell. A vertical strip is transposed."""
    transfer, landed = view.landed[min(focus, len(view.landed) - 1)]
    left, bottom, width, height = box
    figure.text(left, bottom + height, _format_head(view, transfer, focus), fontsize=9, color=INK, va="bottom")
    rows = _make_strips(transfer, landed.before, landed.arrived, landed.after)
    known = [cells.numbers for _, cells in rows if cells.numbers is not None]
    if not known:
        figure.text(left, bottom + height / 2, "its values are not kept here", fontsize=9, color=INK)
        return
    low, high = min(float(n.min()) for n in known), max(float(n.max()) for n in known)
    look = {"cmap": MAPS[transfer.back], "norm": Normalize(low, high if high > low else low + 1)}
    axes = figure.add_axes((left, bottom, width, height * 0.94))
    axes.axis("off")
    for row, (name, cells) in enumerate(rows):
        _draw_cells(axes, 3.0 * row, name, cells, known[0].shape, look)
    axes.set(xlim=(-0.55, known[0].shape[1] - 0.45), ylim=(3.0 * len(rows) - 0.6, 0))


def _make_strips(
    transfer: Transfer, before: Tensor | None, arrived: Tensor | None, after: Tensor | None
) -> list[tuple[str, _CellStrip]]:
    where = f"on rank {transfer.target}"
    names = (
        (f"gradient {where} before", "arrived, to be added", "after")
        if transfer.back
        else (f"window {where} before: no values yet", "arrived", "after, in the window")
    )
    return [(name, _make_strip(transfer, tensor)) for name, tensor in zip(names, (before, arrived, after), strict=True)]


def _make_strip(transfer: Transfer, tensor: Tensor | None) -> _CellStrip:
    tile = transfer.move.tile
    stands = len(tile.rows) > len(tile.cols)
    start = (tile.rows if stands else tile.cols).start
    along = "row" if stands else "column"
    if tensor is None or not tensor.numel():
        return _CellStrip(None, start, along)
    lying = tensor.numpy().T if stands else tensor.numpy()
    skipped = max(0, (lying.shape[1] - LONG) // 2)
    return _CellStrip(lying[:DEEP, skipped : skipped + LONG], start + skipped, along)


def _draw_cells(
    axes: Axes, top: float, name: str, cells: _CellStrip, shape: tuple[int, ...], look: Mapping[str, Any]
) -> None:
    """Draw the name, one unit high, and below it all rows of cells, together one unit high."""
    deep, long = shape
    axes.text(-0.5, top + 0.9, name, fontsize=8.5, va="bottom", color=INK)
    extent = (-0.5, long - 0.5, top + 2, top + 1)
    if cells.numbers is None:
        axes.add_patch(Rectangle((-0.5, top + 1), long, 1, facecolor="white", hatch="xx", edgecolor="#999999"))
        return
    axes.imshow(cells.numbers, extent=extent, aspect="auto", interpolation="nearest", **look)
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    for (row, column), number in np.ndenumerate(cells.numbers):
        middle = top + 1 + (row + 0.5) / deep
        axes.text(column, middle, _format_number(number), ha="center", va="center", fontsize=8, color=INK, bbox=box)
    for at in range(long):
        text = f"{cells.along} {cells.first}" if not at else str(cells.first + at)
        axes.text(at, top + 2.1, text, ha="center", va="top", fontsize=7.5, color=INK)


def _format_number(number: float) -> str:
    """
    >>> _format_number(163.2), _format_number(-0.0000853)
    ('163', '-8.5e-05')
    """
    return f"{number:.3g}" if not number or 1e-3 <= abs(number) < 1e4 else f"{number:.1e}"


def _format_head(view: StepView, transfer: Transfer, focus: int) -> str:
    tile = transfer.move.tile
    what = "gradients go home" if transfer.back else "pixels have moved"
    size = f"{format_size(tile.shape)} px, {format_bytes(transfer.bytes)}"
    number = f"message {min(focus, len(view.landed) - 1) + 1} of {len(view.landed)}"
    return f"{number}: {what}\n{transfer}\n{size} with all channels and images"


def describe_message(view: StepView, focus: int) -> str:
    """Describe the message in words; empty if no message has arrived."""
    if not view.landed:
        return ""
    transfer, landed = view.landed[min(focus, len(view.landed) - 1)]
    rows = _make_strips(transfer, landed.before, landed.arrived, landed.after)
    numbers = "; ".join(
        f"{name}: {', '.join(f'{number:.4g}' for number in cells.numbers[0])}"
        for name, cells in rows
        if cells.numbers is not None
    )
    head, start = " ".join(_format_head(view, transfer, focus).split()), rows[1][1]
    return f"{head}. From {start.along} {start.first} on: {numbers}."
