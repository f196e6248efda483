"""Figure of a training step in the step debugger: position, values, last messages and schedule of all ranks.

Positions on the page are in inches from its upper left corner, so that no layout pass is needed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from mpi4dl_nb.draw.figure import INK, MANY, ORANGE, Drawing, Style, format_size
from mpi4dl_nb.draw.tilemap import NOT_OWN, PADDING
from mpi4dl_nb.draw.timeline import draw_slots, label_slots
from mpi4dl_nb.engines.checks import is_integer
from mpi4dl_nb.engines.compiler.steps import StepLabel
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes, format_ranks
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.plan.schedule import Schedule
from mpi4dl_nb.engines.train.step_events import (
    DebuggedStep,
    PanelGroup,
    RankEvent,
    RankPanel,
    StepEvent,
    StepView,
    Transfer,
)

FigureBox = tuple[float, float, float, float]
"""(left, bottom, width, height) in the figure's own coordinates."""

WIDE_IN, MARGIN_IN, LANDING_IN = 10.5, 0.15, 7.0
TITLE_CHARACTERS = 105
"""Of one of the two lines of a title."""
COLUMNS = (
    (0.0, "rank", 24),
    (0.165, "did last (F0: forward, B0: back, of micro-batch 0)", 46),
    (0.505, "does next", 49),
    (0.84, "memory: values | process", 99),
)
"""The left edge of each column, its header, and the number of characters that fit into it."""

HATCHES = {"": "plain", "//": "striped", "++": "crossed", "...": "dotted", "\\\\": "back-striped", "xx": "checked"}
NOTHING, DONE = "nothing yet", "nothing: done"
MOST_ACTIONS = 2
"""Different instructions of ranks that a title names."""

ROW_IN, HEAD_IN, PANELS_IN = 0.25, 0.62, 4.0


def show_step(
    stepping: DebuggedStep,
    channel: int = 0,
    image: int = 0,
    show: str = "made",
    message: int = 0,
    plane: int | None = None,
) -> Drawing:
    """Draw the current position of a debugged step on all ranks, and one channel of one image of their values.

    `show` is `activation`, `gradient`, or `made` (the last result). `message` is an index into the last messages.
    Of volumes, one `plane` is drawn, by default the middle one; of a message that does not meet it, its nearest plane.
    Raises PlanError if the step was abandoned, if one of the numbers is below zero, or if the images are signals.

    >>> import torch
    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Training, show_step
    >>> with Cluster(4, backend="loopback") as cluster:
    ...     plan = Plan(split_size=1, slice_method="2x2")
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32))
    ...     with training.stepping(torch.randn(2, 3, 32, 32), torch.tensor([3, 7])) as stepping:
    ...         event = stepping.until(kind="halo")
    ...         figure = show_step(stepping)
    """
    if not is_integer(message) or message < 0:
        raise PlanError(f"message={message!r} must be a whole number of 0 or more, the first of the last messages.")
    return draw_step(stepping.view(channel, image, show, plane=plane), message)


def draw_step(view: StepView, focus: int = 0) -> Drawing:
    """Draw a `StepView`. `focus` is the index, among the last messages, of the one whose values are shown."""
    ranks, focus = view.event.ranks, min(focus, len(view.landed) - 1)
    lane_in = 0.27 if len(ranks) <= MANY else 0.16
    lanes_in = lane_in * len(ranks)
    # The upper edges of the table, the panels and the schedule, and the height of the page, in inches from above.
    table_top = 0.6
    panels_top = table_top + ROW_IN * (len(ranks) + 1) + HEAD_IN
    schedule_top = panels_top + PANELS_IN + 0.45
    high_in = schedule_top + lanes_in + 0.15
    figure = Drawing(figsize=(WIDE_IN, high_in))

    def place(left: float, top: float, wide: float, high: float) -> FigureBox:
        return left / WIDE_IN, 1 - (top + high) / high_in, wide / WIDE_IN, high / high_in

    title = textwrap.fill(describe_event(view.event), TITLE_CHARACTERS, max_lines=2, placeholder=" …")
    figure.text(MARGIN_IN / WIDE_IN, 1 - 0.12 / high_in, title, va="top", fontsize=11, weight="bold", color=INK)
    full_in = WIDE_IN - 2 * MARGIN_IN
    _draw_table(figure.add_axes(place(MARGIN_IN, table_top, full_in, ROW_IN * (len(ranks) + 1))), view)
    wide_in = LANDING_IN - 3 * MARGIN_IN if view.landed else full_in
    _draw_panels(figure, view, place(MARGIN_IN, panels_top, wide_in, PANELS_IN - 0.05), focus)
    if view.landed:
        box = place(LANDING_IN, panels_top, WIDE_IN - LANDING_IN - MARGIN_IN, PANELS_IN - 0.05)
        _draw_message(figure, view, box, focus)
    _draw_schedule(figure.add_axes(place(0.75, schedule_top, WIDE_IN - 0.95, lanes_in)), view)
    figure.alt = describe_step(view, focus)
    return figure


def describe_step(view: StepView, focus: int = 0) -> str:
    """Describe in words what `draw_step` draws: its alt text, which takes no drawing."""
    descriptions = []
    for rank in view.event.ranks:
        did, coming = format_step_label(rank.did, NOTHING), describe_next(rank, format_step_label(rank.next, DONE))
        memory = f"values {format_bytes(rank.activation_bytes)}, process {format_bytes(rank.process_bytes)}"
        descriptions.append(f"Rank {rank.rank} ({rank.role}) did {did}; next {coming}; {memory}.")
    for group in view.groups:
        shown, (low, high) = ", ".join(str(panel.rank) for panel in group.panels), group.span
        colours = f"colours from {low:.4g} to {high:.4g}"
        descriptions.append(f"Shown of ranks {shown}: {describe_group(view, group)}, {colours}.")
    if view.landed:
        strips = _cut_strips(view, min(focus, len(view.landed) - 1))
        numbers = (f"{name}: {', '.join(f'{value:.4g}' for value in row[0])}" for name, row in strips.known.items())
        head, first = " ".join(strips.head.split()), strips.span.start + strips.skipped * bool(strips.known)
        descriptions.append(f"{head}. From {strips.along} {first} on: {'; '.join(numbers)}.")
    return " ".join((describe_event(view.event), *descriptions)).strip()


def describe_event(event: StepEvent) -> str:
    """Describe the state of the whole step."""
    done = format_range(event.places)
    loss = "" if event.loss is None else f" Loss {event.loss:.6g}"
    if event.done:
        return f"The step is done: {done} instructions on each rank, the weights have moved.{loss}"
    if not any(event.places):
        return "At the start of a training step: nothing is done"
    moved: dict[str, list[int]] = {}
    for rank in event.ranks:
        if rank.moved:
            moved.setdefault(format_step_label(rank.did, NOTHING), []).append(rank.rank)
    actions = [f"{format_ranks(ranks)}: {action}" for action, ranks in moved.items()]
    shown = "; ".join(actions[:MOST_ACTIONS]) + " and others" * (len(actions) > MOST_ACTIONS)
    return f"{shown[:1].upper()}{shown[1:] or 'No rank went on'}. Instructions done on each rank: {done}.{loss}"


def format_range(counts: Sequence[int]) -> str:
    """
    >>> format_range([4, 4, 4]), format_range([2, 12, 5])
    ('4', '2 to 12')
    """
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_step_label(place: StepLabel | None, at_end: str) -> str:
    """Return a text such as `forward compute · micro-batch 0 · blocks.0.conv1`, or `at_end` if there is no label."""
    return at_end if place is None else place.text


def format_short_label(schedule: Schedule, place: StepLabel | None, at_end: str) -> str:
    """Return a text such as `F0 compute · blocks.0.conv1`, with the schedule's name of the work."""
    if place is None:
        return at_end
    work = f"{schedule.format_action(place.work)} " if place.work else ""
    return f"{work}{place.kind}" + f" · {place.where}" * (place.where != place.kind)


def describe_next(rank: RankEvent, text: str) -> str:
    return f"waits for {format_ranks(rank.waits_for)}: {text}" if rank.waits_for else text


def _draw_table(axes: Axes, view: StepView) -> None:
    """Draw a table with a row per rank. Ranks that advanced are bold."""
    ranks, schedule = view.event.ranks, view.schedule
    axes.set(xlim=(0, 1), ylim=(len(ranks) + 1, 0))
    axes.axis("off")
    for left, head, _ in COLUMNS:
        axes.text(left, 0.5, head, va="center", fontsize=8.5, color="#555555")
    for row, rank in enumerate(ranks, start=1):
        axes.axhline(row, color="#cccccc", linewidth=0.7)
        name = f"{'▶ ' if rank.moved else '   '}{rank.rank}: {rank.role}"
        did, coming = format_short_label(schedule, rank.did, NOTHING), format_short_label(schedule, rank.next, DONE)
        memory = f"{format_bytes(rank.activation_bytes)} | {format_bytes(rank.process_bytes)}"
        for (left, _, fits), text in zip(COLUMNS, (name, did, describe_next(rank, coming), memory), strict=True):
            weight = "bold" if rank.moved and left < 0.5 else "normal"
            # The end of a long layer's name tells less than its beginning, and the alt text has all of it.
            cut = text if len(text) <= fits else f"{text[: fits - 1]}…"
            axes.text(left, row + 0.5, cut, va="center", fontsize=8.5, color=INK, weight=weight)


def _draw_schedule(axes: Axes, view: StepView) -> None:
    """Draw the pipeline schedule with the position of each rank."""
    schedule = view.schedule
    looks = draw_slots(axes, schedule)
    ranks = [rank.rank for rank in view.event.ranks]
    axes.set(xlim=(0, schedule.length), ylim=(len(ranks) - 0.5, -0.5), xticks=[])
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=8.5)
    axes.tick_params(length=0)
    label_slots(axes, schedule)
    for rank in view.event.ranks:
        # A white casing: the position must be seen on bars of any colour.
        for colour, width, level in (("white", 6, 8), (ORANGE, 3, 9)):
            ends = [rank.rank - 0.48, rank.rank + 0.48]
            axes.plot([rank.time] * 2, ends, color=colour, linewidth=width, zorder=level)
    legend = ", ".join(f"{HATCHES.get(look.hatch, look.hatch)}: {look.name}" for look in looks)
    title = f"{schedule.name}: which micro-batch of which pass; the upright bar is where a rank is. {legend}"
    axes.set_title(title, loc="left", fontsize=9, color=INK)


# Panels of what each rank holds of a value, its own pixels and its halo, on a common colour scale.


MAPS = {False: "cividis", True: "PRGn"}
MOST = 12  # panels; with more, each would be too small
BAR_SHARE, BAR_IN, GAP_IN = 0.2, 0.9, 0.42
UNSHAPED = 1.4  # aspect ratio (width / height) of a panel without pixels


def _draw_panels(figure: Drawing, view: StepView, box: FigureBox, focus: int) -> None:
    """Draw the groups of ranks side by side. Within a group, tiles are arranged as in the image."""
    groups = view.groups
    left, bottom, width, height = box
    if not groups:
        reasons: dict[str, list[int]] = {}
        for panel in view.panels:
            if panel.seen is None:
                reasons.setdefault(panel.why, []).append(panel.rank)
        descriptions = [f"{format_ranks(ranks)}: {why}" for why, ranks in reasons.items()]
        if view.event.done:
            descriptions = ["The weights have moved. There are no images to show now: a restart begins another step."]
        words: Style = {"fontsize": 10, "color": INK, "ha": "center", "va": "center", "linespacing": 1.5}
        figure.text(left + width / 2, bottom + height / 2, "\n".join(descriptions), **words)
        return
    arranged: list[list[tuple[int, int]]] = []  # row and column of each panel
    for group in groups:
        owns = [panel.extent.own for panel in group.panels]
        if not all(map(len, owns)) or len(set(owns)) < len(owns):  # no pixels, or ranks share a tile: four to a row
            arranged.append([divmod(index, 4) for index in range(len(owns))])
            continue
        rows, columns = sorted({tile.rows.start for tile in owns}), sorted({tile.cols.start for tile in owns})
        arranged.append([(rows.index(tile.rows.start), columns.index(tile.cols.start)) for tile in owns])
    # A group is as wide as its columns of panels and its colour bar need. A single narrow group is not stretched over
    # the page: it gets the share of one among 2.2 columns.
    counts = [1 + max(column for _, column in places) + BAR_SHARE * 2 for places in arranged]
    for group, places, count in zip(groups, arranged, counts, strict=True):
        share = width * count / max(sum(counts), 2.2)
        _draw_group(figure, view, group, places, (left, bottom, share, height), focus)
        left += share


def _draw_group(
    figure: Drawing, view: StepView, group: PanelGroup, places: Sequence[tuple[int, int]], box: FigureBox, focus: int
) -> None:
    left, bottom, width, height = box
    wide_in, high_in = figure.get_size_inches()
    rows, columns = (1 + max(numbers) for numbers in zip(*places, strict=True))
    figure.text(left, bottom + height, describe_group(view, group, "\n"), fontsize=9, color=INK, va="bottom")
    gap_x, gap_y = GAP_IN / wide_in, GAP_IN / high_in
    cell_h = (height - 0.05 / high_in) / rows
    # A panel wider than the pixels in it would be partly empty, and the colour bar far from the last panel.
    held = [panel.extent.held for panel in group.panels if is_square(panel.extent.held)]
    widest = max((tile.shape[1] / tile.shape[0] for tile in held), default=UNSHAPED)
    room_in = (width * wide_in - BAR_IN) / columns
    cell_w = min(room_in, (cell_h * high_in - GAP_IN) * widest + GAP_IN) / wide_in
    drawn: list[AxesImage] = []
    for panel, (row, column) in zip(group.panels[:MOST], places, strict=False):
        corner = left + column * cell_w + 0.6 * gap_x, bottom + (rows - 1 - row) * cell_h + 0.45 * gap_y
        axes = figure.add_axes((*corner, cell_w - gap_x, cell_h - gap_y))
        drawn.append(_draw_panel(axes, group, panel))
        transfer = view.landed[focus][0] if view.landed else None
        if transfer and panel.rank in (transfer.source, transfer.target):
            # The tile of the message is framed on its target (solid) and on its source (dashed).
            tile, there = transfer.plane.tile, panel.rank == transfer.target
            for wide, colour, line in ((4.5, "white", "solid"), (2.2, ORANGE, "solid" if there else (0, (2, 1)))):
                look: Style = {"linewidth": wide, "edgecolor": colour, "linestyle": line, "clip_on": False, "zorder": 9}
                axes.add_patch(Rectangle((tile.cols.start, tile.rows.start), *tile.shape[::-1], fill=False, **look))
            name = f"→ rank {transfer.target}" if there else f"rank {transfer.source} →"
            axes.set_title(name, fontsize=9, pad=3, color=INK)
    beside = left + columns * cell_w + 0.05 / wide_in
    bar = figure.add_axes((beside, bottom + 0.1 * height, 0.12 / wide_in, 0.8 * height))
    ticks = figure.colorbar(drawn[-1], cax=bar).ax
    ticks.tick_params(labelsize=8)
    ticks.yaxis.get_offset_text().set(fontsize=8, ha="left")


def is_square(held: Tile) -> bool:
    """Return whether pixels are drawn as squares. Narrow strips, and values without pixels, fill their panel."""
    return bool(held.shape) and max(held.shape) < 8 * min(held.shape)


def describe_group(view: StepView, group: PanelGroup, end: str = ", ") -> str:
    """Return `gradient of relu_3 (blocks.0), 32 × 48 px, channel 0 of 16, image 0`, with `end` between its lines."""
    extent, seen = group.panels[0].extent, group.panels[0].seen
    what = f"{'gradient of ' * group.gradient}{group.name}"
    if not extent.axes:
        return f"{what}{end}{' × '.join(map(str, extent.shape)) or 'a number'}"
    means = f", means of {format_size(seen.block_px)} px" if max(seen.block_px) > 1 else ""
    channel = min(view.channel, seen.channels - 1)
    where = f"channel {channel} of {seen.channels}, image {view.image}"
    where += f", plane {extent.depth.at}" if extent.depth else ""
    halos = [split_halo(panel) for panel in group.panels]
    marks = {
        "striped: borrowed pixels": any(borrowed for borrowed, _ in halos),
        "dotted: padding": any(padding for _, padding in halos),
    }
    marked = ", ".join(mark for mark, is_drawn in marks.items() if is_drawn)
    return f"{what}{end}{format_size(extent.size_px)} px, {where}{means}{f'{end}{marked}' * bool(marked)}"


def split_halo(panel: RankPanel) -> tuple[list[Tile], list[Tile]]:
    """Return what a rank holds beside its own tile of a value: pixels borrowed from others, and padding beyond it."""
    extent = panel.extent
    if not extent.axes or extent.held == extent.own:
        return [], []
    tile, whole = extent.plane.tile, Tile.whole(*extent.size_px)
    outside = _cut_around(tile, extent.own & tile)
    borrowed = [part & whole for part in outside if part & whole]
    padding = [rest for part in outside for rest in (_cut_around(part, part & whole) if part & whole else [part])]
    return borrowed, padding


def _cut_around(held: Tile, inner: Tile) -> list[Tile]:
    """Return the parts of `held` around `inner`: above and below over the whole width, then left and right."""
    #   +-------------------+
    #   |   above           |
    #   +------+-----+------+
    #   | left |inner| right|
    #   +------+-----+------+
    rows, cols = held.rows, held.cols
    parts = (
        Tile(Span(rows.start, inner.rows.start), cols),
        Tile(Span(inner.rows.stop, rows.stop), cols),
        Tile(inner.rows, Span(cols.start, inner.cols.start)),
        Tile(inner.rows, Span(inner.cols.stop, cols.stop)),
    )
    return list(filter(None, parts))


def _make_colours(gradient: bool, low: float, high: float) -> Style:
    return {"cmap": MAPS[gradient], "norm": Normalize(low, high if high > low else low + 1), "interpolation": "nearest"}


def _draw_panel(axes: Axes, group: PanelGroup, panel: RankPanel) -> AxesImage:
    rows, cols = panel.extent.plane.tile
    extent = (cols.start, cols.stop, rows.stop, rows.start)
    style = _make_colours(group.gradient, *group.span) | {"aspect": "equal" if is_square(panel.extent.held) else "auto"}
    image = axes.imshow(panel.seen.pixels.numpy(), extent=extent, **style)
    for parts, look in zip(split_halo(panel), (NOT_OWN, PADDING), strict=True):
        for part in parts:
            axes.add_patch(Rectangle((part.cols.start, part.rows.start), *part.shape[::-1], **look))
    axes.set_title(f"rank {panel.rank}", fontsize=9, pad=3, color=INK)
    axes.set(xticks=[cols.start, cols.stop], yticks=[rows.start, rows.stop])
    axes.tick_params(labelsize=7.5, length=2, pad=1)
    # The numbers are aligned inwards, so that the two at a corner of the panel do not overlap.
    for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set(horizontalalignment=side)
    for label, side in zip(axes.get_yticklabels(), ("top", "bottom"), strict=True):
        label.set(verticalalignment=side)
    axes.set(xlim=(cols.start, cols.stop), ylim=(rows.stop, rows.start))
    return image


# One message that has arrived: its values, and those of its destination before and after.


HEAD_CHARACTERS = 50
"""Of a line about a message."""
LONG, DEEP = 5, 2
"""Number of cells shown along a strip, and across it."""
PAPER = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
NUMBER: Style = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "bbox": PAPER}


@dataclass(frozen=True)
class _Strips:
    """Of a message, its description `head`, and the middle of what was there before, arrived, and is there after.

    The cells lie along one axis (`row` or `column`) of the message's `span`, of which `skipped` are left out before
    them. A vertical strip is transposed. `cells` are None where values were not kept.
    """

    head: str
    along: str
    span: Span
    skipped: int
    cells: Mapping[str, NDArray[np.float64] | None]

    @property
    def known(self) -> dict[str, NDArray[np.float64]]:
        """The cells that were kept."""
        return {name: numbers for name, numbers in self.cells.items() if numbers is not None}


def _cut_strips(view: StepView, focus: int) -> _Strips:
    transfer, landed = view.landed[focus]
    tile = transfer.plane.tile
    head = f"message {focus + 1} of {len(view.landed)}: {describe_message(transfer)}"
    along, span = ("row", tile.rows) if len(tile.rows) > len(tile.cols) else ("column", tile.cols)
    skipped = max(0, (len(span) - LONG) // 2)
    strips: dict[str, NDArray[np.float64] | None] = {}
    for name, tensor in zip(name_strips(transfer), (landed.before, landed.arrived, landed.after), strict=True):
        strips[name] = None
        if tensor is not None and tensor.numel():
            values = (tensor.T if along == "row" else tensor).numpy()
            strips[name] = values[:DEEP, skipped : skipped + LONG]
    return _Strips(head, along, span, skipped, strips)


def describe_message(transfer: Transfer) -> str:
    """Return three lines: what a message did, its ranks and pixels, and its size."""
    plane = transfer.plane
    moved = "pixels have moved" if plane.axes else "values have moved"
    what = "gradients were sent back" if transfer.back else moved
    images = f"with all channels{' and images' if plane.images is None else ''}"
    sent = transfer.move.tile if plane.depth else plane.tile  # all planes are sent, one of them is drawn
    size = f"{format_size(sent.shape)} px, {format_bytes(transfer.bytes)} {images}"
    if not plane.axes:
        size = f"{format_size(plane.tile.shape)} values, {format_bytes(transfer.bytes)}"
    shown = f", plane {plane.depth.at} shown" if plane.depth else ""
    return f"{what}{shown}\n{transfer}\n{size}"


def name_strips(transfer: Transfer) -> list[str]:
    """Return the names of what was there before, what arrived, and what is there after."""
    where = f"on rank {transfer.target}"
    if transfer.back:
        return [f"gradient {where} before", "arrived, to be added", "after"]
    return [f"window {where} before: no values yet", "arrived", "after, in the window"]


def _draw_message(figure: Drawing, view: StepView, box: FigureBox, focus: int) -> None:
    """Draw the values before, those that arrived, and those after: strips of cells with their indices."""
    strips, (left, bottom, width, height) = _cut_strips(view, focus), box
    head = "\n".join(textwrap.fill(line, HEAD_CHARACTERS) for line in strips.head.split("\n"))
    figure.text(left, bottom + height, head, fontsize=9, color=INK, va="bottom")
    known, back = list(strips.known.values()), view.landed[focus][0].back
    if not known:
        figure.text(left, bottom + height / 2, "its values are not kept here", fontsize=9, color=INK)
        return
    # One scale: a gradient that is added to another changes its colour visibly.
    low, high = min(float(n.min()) for n in known), max(float(n.max()) for n in known)
    if back:  # a gradient's sign is its colour
        low, high = min(low, -high), max(high, -low)
    look: Style = _make_colours(back, low, high) | {"aspect": "auto"}
    deep, long = known[0].shape
    along, first = f"{strips.along} ", strips.span.start + strips.skipped
    axes = figure.add_axes((left, bottom, width, height * 0.94))
    axes.axis("off")
    # Each strip has three units of height: its name, its rows of cells, and their indices with a gap.
    for top, (name, numbers) in zip(range(0, 3 * len(strips.cells), 3), strips.cells.items(), strict=True):
        axes.text(-0.5, top + 0.9, name, fontsize=8.5, va="bottom", color=INK)
        if numbers is None:
            axes.add_patch(Rectangle((-0.5, top + 1), long, 1, facecolor="white", hatch="xx", edgecolor="#999999"))
            continue
        axes.imshow(numbers, extent=(-0.5, long - 0.5, top + 2, top + 1), **look)
        for (line, column), value in np.ndenumerate(numbers):
            text = f"{value:.3g}" if not value or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
            axes.text(column, top + 1 + (line + 0.5) / deep, text, **NUMBER)
        for at in range(long):
            text = f"{'' if at else along}{first + at}"
            axes.text(at, top + 2.1, text, ha="center", va="top", fontsize=7.5, color=INK)
    axes.set(xlim=(-0.55, long - 0.45), ylim=(3 * len(strips.cells) - 0.6, 0))
