"""Panels of what each rank holds of a value, its own pixels and its halo, on a common colour scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from torch import Tensor

from engines.spatial.tiles import Span, Tile
from mpi4dl_nb.draw.figure import INK, ORANGE, format_bytes, format_ranks, format_size
from mpi4dl_nb.draw.tilemap import HALO
from mpi4dl_nb.training.step_events import PanelGroup, RankPanel, StepView, Transfer

__all__ = ["describe_message", "describe_panels", "draw_message", "draw_panels"]

FigureBox = tuple[float, float, float, float]
"""(left, bottom, width, height) in the figure's own coordinates."""

MAPS = {False: "cividis", True: "PuOr"}
MOST = 12  # panels; with more, each would be too small
BAR_SHARE, BAR_IN, GAP_IN = 0.2, 0.9, 0.42
UNSHAPED = 1.4  # aspect ratio (width / height) of a panel without pixels


def draw_panels(figure: Figure, view: StepView, box: FigureBox, focus: int) -> None:
    """Draw the groups of ranks side by side. Within a group, tiles are arranged as in the image."""
    groups = view.groups
    left, bottom, width, height = box
    if not groups:
        words = {"fontsize": 10, "color": INK, "ha": "center", "va": "center", "linespacing": 1.5}
        figure.text(left + width / 2, bottom + height / 2, "\n".join(_describe_reasons(view)), **words)
        return
    arranged = [_arrange_panels(group) for group in groups]
    # A group is as wide as its columns of panels and its colour bar need. A single narrow group is not stretched over
    # the page: it gets the share of one among 2.2 columns.
    counts = [1 + max(column for _, column in places) + BAR_SHARE * 2 for places in arranged]
    for group, places, count in zip(groups, arranged, counts, strict=True):
        share = width * count / max(sum(counts), 2.2)
        _draw_group(figure, view, group, places, (left, bottom, share, height), focus)
        left += share


def _arrange_panels(group: PanelGroup) -> list[tuple[int, int]]:
    """Return the row and column of each panel: as tiles are in the image, or four to a row if ranks share a tile."""
    owns = [panel.extent.own for panel in group.panels]
    if None in owns or len(set(owns)) < len(owns):
        return [divmod(index, 4) for index in range(len(owns))]
    rows, columns = sorted({own.rows.start for own in owns}), sorted({own.cols.start for own in owns})
    return [(rows.index(own.rows.start), columns.index(own.cols.start)) for own in owns]


def _draw_group(
    figure: Figure,
    view: StepView,
    group: PanelGroup,
    places: Sequence[tuple[int, int]],
    box: FigureBox,
    focus: int,
) -> None:
    left, bottom, width, height = box
    wide_in, high_in = figure.get_size_inches()
    rows, columns = (1 + max(numbers) for numbers in zip(*places, strict=True))
    figure.text(left, bottom + height, describe_group(view, group, "\n"), fontsize=9, color=INK, va="bottom")
    gap_x, gap_y = GAP_IN / wide_in, GAP_IN / high_in
    cell_h = (height - 0.05 / high_in) / rows
    # A panel wider than the pixels in it would be partly empty, and the colour bar far from the last panel.
    held = [panel.extent.held for panel in group.panels if _is_square(panel.extent.held)]
    widest = max((tile.shape[1] / tile.shape[0] for tile in held), default=UNSHAPED)
    room_in = (width * wide_in - BAR_IN) / columns
    cell_w = min(room_in, (cell_h * high_in - GAP_IN) * widest + GAP_IN) / wide_in
    drawn = None
    for panel, (row, column) in zip(group.panels[:MOST], places, strict=False):
        corner = left + column * cell_w + 0.6 * gap_x, bottom + (rows - 1 - row) * cell_h + 0.45 * gap_y
        axes = figure.add_axes((*corner, cell_w - gap_x, cell_h - gap_y))
        drawn = _draw_panel(axes, group, panel)
        _mark_message(axes, view, panel, focus)
    bar = figure.add_axes(
        (left + columns * cell_w + 0.05 / wide_in, bottom + 0.1 * height, 0.12 / wide_in, 0.8 * height)
    )
    ticks = figure.colorbar(drawn, cax=bar).ax
    ticks.tick_params(labelsize=8)
    ticks.yaxis.get_offset_text().set(fontsize=8, ha="left")


def _is_square(held: Tile | None) -> bool:
    """Return whether pixels are drawn as squares. Narrow strips, and values without pixels, fill their panel."""
    return held is not None and max(held.shape) < 8 * min(held.shape)


def _describe_reasons(view: StepView) -> Iterator[str]:
    """Yield each reason why ranks have nothing to show, once."""
    if view.event.done:
        yield "The weights have moved. There are no images to show now: a restart begins another step."
        return
    found: dict[str, list[int]] = {}
    for panel in view.panels:
        found.setdefault(panel.why, []).append(panel.rank)
    for why, ranks in found.items():
        yield f"{format_ranks(ranks)}: {why}"


def describe_group(view: StepView, group: PanelGroup, end: str = ", ") -> str:
    """Return `gradient of relu_3 (blocks.0), 32 × 48 px, channel 0 of 16, image 0`, with `end` between its lines."""
    extent, seen = group.panels[0].extent, group.panels[0].seen
    what = f"{'gradient of ' * group.gradient}{group.name}"
    if extent.axes is None:
        return f"{what}{end}{' × '.join(map(str, seen.shape)) or 'a number'}"
    means = f", means of {seen.block_px} × {seen.block_px} px" if seen.block_px > 1 else ""
    channel = min(view.channel, seen.channels - 1)
    where = f"channel {channel} of {seen.channels}, image {view.image}"
    borrowed = any(panel.extent.held != panel.extent.own for panel in group.panels)
    hatched = f"{end}hatched: not the rank's own pixels" * borrowed
    return f"{what}{end}{format_size(extent.size_px)} px, {where}{means}{hatched}"


def _draw_panel(axes: Axes, group: PanelGroup, panel: RankPanel) -> object:
    low, high = group.span
    held, own, pixels = panel.extent.held, panel.extent.own, panel.seen.pixels.numpy()
    tile = held or Tile.whole(*pixels.shape)
    cols, rows = tile.cols, tile.rows
    extent = (cols.start, cols.stop, rows.stop, rows.start)
    norm = Normalize(low, high if high > low else low + 1)
    style = {"cmap": MAPS[group.gradient], "norm": norm, "interpolation": "nearest"}
    image = axes.imshow(pixels, extent=extent, aspect="equal" if _is_square(held) else "auto", **style)
    if own is not None and own != held:
        #   +-------------------+
        #   |   above           |   What the rank holds around its own tile is hatched: rows above and below over the
        #   +------+-----+------+   whole width, then columns left and right beside the tile.
        #   | left | own | right|
        #   +------+-----+------+
        inner = own.rows & rows
        outside = (
            Tile(Span(rows.start, inner.start), cols),
            Tile(Span(inner.stop, rows.stop), cols),
            Tile(inner, Span(cols.start, own.cols.start)),
            Tile(inner, Span(own.cols.stop, cols.stop)),
        )
        for part in filter(None, outside):
            axes.add_patch(Rectangle((part.cols.start, part.rows.start), *part.shape[::-1], **HALO))
    axes.set_title(f"rank {panel.rank}", fontsize=9, pad=3, color=INK)
    axes.set(xticks=[cols.start, cols.stop], yticks=[rows.start, rows.stop])
    axes.tick_params(labelsize=7.5, length=2, pad=1)
    # The numbers are aligned inwards, so that the two at a corner of the panel do not overlap.
    for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)
    for label, side in zip(axes.get_yticklabels(), ("top", "bottom"), strict=True):
        label.set_verticalalignment(side)
    axes.set(xlim=(cols.start, cols.stop), ylim=(rows.stop, rows.start))
    return image


def _mark_message(axes: Axes, view: StepView, panel: RankPanel, focus: int) -> None:
    """Frame the tile of the message in focus on its target (solid) and on its source (dashed)."""
    if not view.landed or panel.extent.axes is None:
        return
    transfer, _ = view.landed[min(focus, len(view.landed) - 1)]
    if panel.rank not in (transfer.source, transfer.target):
        return
    there, tile = panel.rank == transfer.target, transfer.move.tile
    for width, colour in ((4.5, "white"), (2.2, ORANGE)):
        frame = Rectangle((tile.cols.start, tile.rows.start), *tile.shape[::-1], fill=False, clip_on=False, zorder=9)
        frame.set(linewidth=width, edgecolor=colour, linestyle="solid" if there or colour == "white" else (0, (2, 1)))
        axes.add_patch(frame)
    axes.set_title(f"→ rank {panel.rank}" if there else f"rank {panel.rank} →", fontsize=9, pad=3, color=INK)


def describe_panels(view: StepView) -> Iterator[str]:
    """Yield a description of each group, with the range of its colours."""
    for group in view.groups:
        ranks = ", ".join(str(panel.rank) for panel in group.panels)
        low, high = group.span
        yield f"Shown of ranks {ranks}: {describe_group(view, group)}, colours from {low:.4g} to {high:.4g}."


# One message that has arrived: its values, and those of its destination before and after.


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
