"""One message that has arrived: its values, and those of its destination before and after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
PAPER = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
NUMBER = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "bbox": PAPER}


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
    # One scale for all three strips: a gradient that is added to another changes its colour visibly.
    low, high = min(float(n.min()) for n in known), max(float(n.max()) for n in known)
    look = {"cmap": MAPS[transfer.back], "norm": Normalize(low, high if high > low else low + 1)}
    deep, long = known[0].shape
    axes = figure.add_axes((left, bottom, width, height * 0.94))
    axes.axis("off")
    # Each strip has three units of height: its name, its rows of cells, and their indices with a gap.
    for row, (name, cells) in enumerate(rows):
        top = 3.0 * row
        axes.text(-0.5, top + 0.9, name, fontsize=8.5, va="bottom", color=INK)
        if cells.numbers is None:
            axes.add_patch(Rectangle((-0.5, top + 1), long, 1, facecolor="white", hatch="xx", edgecolor="#999999"))
            continue
        extent = (-0.5, long - 0.5, top + 2, top + 1)
        axes.imshow(cells.numbers, extent=extent, aspect="auto", interpolation="nearest", **look)
        for (line, column), number in np.ndenumerate(cells.numbers):
            text = f"{number:.3g}" if not number or 1e-3 <= abs(number) < 1e4 else f"{number:.1e}"
            axes.text(column, top + 1 + (line + 0.5) / deep, text, **NUMBER)
        for at in range(long):
            text = str(cells.first + at) if at else f"{cells.along} {cells.first}"
            axes.text(at, top + 2.1, text, ha="center", va="top", fontsize=7.5, color=INK)
    axes.set(xlim=(-0.55, long - 0.45), ylim=(3.0 * len(rows) - 0.6, 0))


def _make_strips(
    transfer: Transfer, before: Tensor | None, arrived: Tensor | None, after: Tensor | None
) -> list[tuple[str, _CellStrip]]:
    """Return the strips by name, in the order of time."""
    where = f"on rank {transfer.target}"
    names = (
        (f"gradient {where} before", "arrived, to be added", "after")
        if transfer.back
        else (f"window {where} before: no values yet", "arrived", "after, in the window")
    )
    tile = transfer.move.tile
    stands = len(tile.rows) > len(tile.cols)
    along, start = ("row", tile.rows.start) if stands else ("column", tile.cols.start)
    strips = []
    for name, tensor in zip(names, (before, arrived, after), strict=True):
        if tensor is None or not tensor.numel():
            strips.append((name, _CellStrip(None, start, along)))
            continue
        lying = tensor.numpy().T if stands else tensor.numpy()
        skipped = max(0, (lying.shape[1] - LONG) // 2)
        strips.append((name, _CellStrip(lying[:DEEP, skipped : skipped + LONG], start + skipped, along)))
    return strips


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
