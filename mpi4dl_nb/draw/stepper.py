"""Figure of a training step in the step debugger: position, values, last messages and schedule of all ranks.

Positions on the page are in inches from its upper left corner, so that no layout pass is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from engines.program.schedule import Schedule
from engines.program.steps import StepLabel
from mpi4dl_nb.draw.bars import MANY
from mpi4dl_nb.draw.figure import INK, ORANGE, Drawing, format_bytes, format_ranks
from mpi4dl_nb.draw.rank_panels import FigureBox, describe_message, describe_panels, draw_message, draw_panels
from mpi4dl_nb.draw.schedule import draw_slots, label_slots
from mpi4dl_nb.training.step_events import RankEvent, StepEvent, StepView

if TYPE_CHECKING:
    from mpi4dl_nb.training.step_debugger import StepDebugger

__all__ = ["draw_step", "format_step_label", "show_step"]

WIDE_IN, MARGIN_IN, LANDING_IN = 10.5, 0.15, 7.0
COLUMNS = (
    (0.0, "rank", 24),
    (0.165, "did last (F0: forward, B0: back, of micro-batch 0)", 46),
    (0.505, "does next", 49),
    (0.84, "memory: values | process", 99),
)
"""The left edge of each column, its header, and the number of characters that fit into it."""

HATCHES = {"": "plain", "//": "striped", "++": "crossed", "...": "dotted", "\\\\": "back-striped", "xx": "checked"}
NOTHING, DONE = "nothing yet", "nothing: done"

ROW_IN, HEAD_IN, PANELS_IN = 0.25, 0.62, 4.0


def show_step(
    stepping: StepDebugger, channel: int = 0, image: int = 0, show: str = "made", message: int = 0
) -> Drawing:
    """Draw the current position of a debugged step on all ranks, and one channel of one image of their values.

    `show` is `activation`, `gradient`, or `made` (the last result). `message` is an index into the last messages.
    Raises PlanError if the step was abandoned.

    >>> import torch
    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, Plan, Training, show_step
    >>> with Cluster(4, backend="loopback") as cluster:
    ...     plan = Plan(split_size=1, slice_method="2x2")
    ...     training = Training(resnet20_v1(), plan, cluster, (2, 3, 32, 32))
    ...     with training.stepping(torch.randn(2, 3, 32, 32), torch.tensor([3, 7])) as stepping:
    ...         event = stepping.until(kind="halo")
    ...         figure = show_step(stepping)
    """
    return draw_step(stepping.view(channel, image, show), message)


def draw_step(view: StepView, focus: int = 0) -> Drawing:
    """Draw a `StepView`. `focus` is the index, among the last messages, of the one whose values are shown."""
    ranks = view.event.ranks
    lane_in = 0.27 if len(ranks) <= MANY else 0.16
    lanes_in = lane_in * len(ranks)
    # The upper edges of the table, the panels and the schedule, and the height of the page, in inches from above.
    table_top = 0.42
    panels_top = table_top + ROW_IN * (len(ranks) + 1) + HEAD_IN
    schedule_top = panels_top + PANELS_IN + 0.45
    high_in = schedule_top + lanes_in + 0.15
    figure = Drawing(figsize=(WIDE_IN, high_in))

    def place(left: float, top: float, wide: float, high: float) -> FigureBox:
        return left / WIDE_IN, 1 - (top + high) / high_in, wide / WIDE_IN, high / high_in

    title = describe_event(view.event)
    figure.text(MARGIN_IN / WIDE_IN, 1 - 0.12 / high_in, title, va="top", fontsize=11, weight="bold", color=INK)
    full_in = WIDE_IN - 2 * MARGIN_IN
    _draw_table(figure.add_axes(place(MARGIN_IN, table_top, full_in, ROW_IN * (len(ranks) + 1))), view)
    wide_in = LANDING_IN - 3 * MARGIN_IN if view.landed else full_in
    draw_panels(figure, view, place(MARGIN_IN, panels_top, wide_in, PANELS_IN - 0.05), focus)
    if view.landed:
        box = place(LANDING_IN, panels_top, WIDE_IN - LANDING_IN - MARGIN_IN, PANELS_IN - 0.05)
        draw_message(figure, view, box, focus)
    _draw_schedule(figure.add_axes(place(0.75, schedule_top, WIDE_IN - 0.95, lanes_in)), view)
    told = []
    for rank in ranks:
        did, coming = format_step_label(rank.did, NOTHING), _describe_next(rank, format_step_label(rank.next, DONE))
        memory = f"values {format_bytes(rank.activation_bytes)}, process {format_bytes(rank.process_bytes)}"
        told.append(f"Rank {rank.rank} ({rank.role}) did {did}; next {coming}; {memory}.")
    figure.alt = " ".join((title, *told, *describe_panels(view), describe_message(view, focus))).strip()
    return figure


def describe_event(event: StepEvent) -> str:
    """Describe the state of the whole step."""
    done = sum(event.places)
    if event.done:
        return f"The step is done: {done} instructions, the weights have moved. Loss {event.loss:.6g}"
    loss = "" if event.loss is None else f" Loss {event.loss:.6g}"
    if not done:
        return "At the start of a training step: nothing is done"
    moved = [rank.rank for rank in event.ranks if rank.moved]
    who = format_ranks(moved) if moved else "no rank"
    return f"In a training step, after {done} instructions of all ranks; {who} went on.{loss}"


def format_step_label(place: StepLabel | None, at_end: str) -> str:
    """Return a text such as `forward compute · micro-batch 0 · blocks.0.conv1`, or `at_end` if there is no label."""
    return at_end if place is None else place.text


def _format_short_label(schedule: Schedule, place: StepLabel | None, at_end: str) -> str:
    """Return a text such as `F0 compute · blocks.0.conv1`, with the schedule's name of the work."""
    if place is None:
        return at_end
    work = f"{schedule.format_action(place.work)} " if place.work else ""
    return f"{work}{place.kind}" + f" · {place.where}" * (place.where != place.kind)


def _describe_next(rank: RankEvent, text: str) -> str:
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
        did, coming = _format_short_label(schedule, rank.did, NOTHING), _format_short_label(schedule, rank.next, DONE)
        memory = f"{format_bytes(rank.activation_bytes)} | {format_bytes(rank.process_bytes)}"
        for (left, _, fits), text in zip(COLUMNS, (name, did, _describe_next(rank, coming), memory), strict=True):
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
