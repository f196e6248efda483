"""Figure of a training step in the step debugger: position, values, last messages and schedule of all ranks.

Positions on the page are in inches from its upper left corner, so that no layout pass is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from engines.pipeline.work import Schedule
from engines.program.step_labels import StepLabel
from mpi4dl_nb.draw.bars import MANY, BarStyle
from mpi4dl_nb.draw.figure import INK, ORANGE, Drawing, format_bytes, format_ranks
from mpi4dl_nb.draw.message_view import describe_message, draw_message
from mpi4dl_nb.draw.rank_panels import describe_panels, draw_panels
from mpi4dl_nb.draw.schedule import draw_slots, label_slots
from mpi4dl_nb.step_events import RankEvent, StepEvent, StepView

if TYPE_CHECKING:
    from mpi4dl_nb.step_debugger import StepDebugger

__all__ = ["draw_step", "format_step_label", "show_step"]

WIDE_IN, MARGIN_IN, LANDING_IN = 10.5, 0.15, 7.0
COLUMNS = (
    (0.0, "rank"),
    (0.165, "did last (F0: forward, B0: back, of micro-batch 0)"),
    (0.505, "does next"),
    (0.84, "memory: values | process"),
)
FITS = (24, 46, 49)
"""Characters that fit into a column."""

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
    heights = (0.42, ROW_IN * (len(ranks) + 1), HEAD_IN + PANELS_IN, 0.5 + lane_in * len(ranks), 0.1)
    page = _Page(sum(heights))
    figure, tops = page.figure, [sum(heights[:index]) for index in range(len(heights))]
    title = describe_event(view.event)
    figure.text(MARGIN_IN / WIDE_IN, page.to_figure_y(0.12), title, va="top", fontsize=11, weight="bold", color=INK)
    _draw_table(page.add_axes(MARGIN_IN, tops[1], WIDE_IN - 2 * MARGIN_IN, heights[1]), view)
    wide = LANDING_IN - 3 * MARGIN_IN if view.landed else WIDE_IN - 2 * MARGIN_IN
    draw_panels(figure, view, page.compute_box(MARGIN_IN, tops[2] + HEAD_IN, wide, PANELS_IN - 0.05), focus)
    if view.landed:
        draw_message(
            figure,
            view,
            page.compute_box(LANDING_IN, tops[2] + HEAD_IN, WIDE_IN - LANDING_IN - MARGIN_IN, PANELS_IN - 0.05),
            focus,
        )
    _draw_schedule(page.add_axes(0.75, tops[3] + 0.45, WIDE_IN - 0.95, heights[3] - 0.5), view)
    figure.alt = " ".join(
        (title, *map(_describe_rank, ranks), *describe_panels(view), describe_message(view, focus))
    ).strip()  # fmt: skip
    return figure


class _Page:
    """A figure whose parts are placed in inches from its upper left corner."""

    def __init__(self, high_in: float) -> None:
        self.high_in, self.figure = high_in, Drawing(figsize=(WIDE_IN, high_in))

    def to_figure_y(self, top_in: float) -> float:
        """Return the figure coordinate (0 at the bottom, 1 at the top) of a distance from the top."""
        return 1 - top_in / self.high_in

    def compute_box(self, left: float, top: float, wide: float, high: float) -> tuple[float, float, float, float]:
        """Return (left, bottom, width, height) in figure coordinates."""
        return left / WIDE_IN, self.to_figure_y(top + high), wide / WIDE_IN, high / self.high_in

    def add_axes(self, left: float, top: float, wide: float, high: float) -> Axes:
        return self.figure.add_axes(self.compute_box(left, top, wide, high))


def describe_event(event: StepEvent) -> str:
    """Describe the state of the whole step."""
    done = sum(event.places)
    if event.done:
        return f"The step is done: {done} instructions, the weights have moved. Loss {event.loss:.6g}"
    loss = "" if event.loss is None else f" Loss {event.loss:.6g}"
    if not done:
        return "At the start of a training step: nothing is done"
    return f"In a training step, after {done} instructions of all ranks; {_describe_moved(event.ranks)}.{loss}"


def _describe_moved(ranks: Sequence[RankEvent]) -> str:
    who = [rank.rank for rank in ranks if rank.moved]
    return f"{format_ranks(who)} went on" if who else "no rank went on"


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


def _format_memory(rank: RankEvent) -> str:
    return f"{format_bytes(rank.activation_bytes)} | {format_bytes(rank.process_bytes)}"


def _draw_table(axes: Axes, view: StepView) -> None:
    """Draw a table with a row per rank. Ranks that advanced are bold."""
    ranks, schedule = view.event.ranks, view.schedule
    axes.set(xlim=(0, 1), ylim=(len(ranks) + 1, 0))
    axes.axis("off")
    for left, head in COLUMNS:
        axes.text(left, 0.5, head, va="center", fontsize=8.5, color="#555555")
    for row, rank in enumerate(ranks, start=1):
        axes.axhline(row, color="#cccccc", linewidth=0.7)
        name = f"{'▶ ' if rank.moved else '   '}{rank.rank}: {rank.role}"
        did, coming = _format_short_label(schedule, rank.did, NOTHING), _format_short_label(schedule, rank.next, DONE)
        texts = [name, did, _describe_next(rank, coming)]
        cut = [text if len(text) <= fits else f"{text[: fits - 1]}…" for text, fits in zip(texts, FITS, strict=True)]
        weight = "bold" if rank.moved else "normal"
        for (left, _), text in zip(COLUMNS, (*cut, _format_memory(rank)), strict=True):
            axes.text(
                left, row + 0.5, text, va="center", fontsize=8.5, color=INK, weight=weight if left < 0.5 else None
            )


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
        axes.plot([rank.time] * 2, [rank.rank - 0.48, rank.rank + 0.48], color="white", linewidth=6, zorder=8)
        axes.plot([rank.time] * 2, [rank.rank - 0.48, rank.rank + 0.48], color=ORANGE, linewidth=3, zorder=9)
    axes.set_title(
        f"{schedule.name}: which micro-batch of which pass; the upright bar is where a rank is. "
        f"{_format_legend(looks)}",
        loc="left",
        fontsize=9,
        color=INK,
    )


def _format_legend(looks: Sequence[BarStyle]) -> str:
    hatches = {"": "plain", "//": "striped", "++": "crossed", "...": "dotted", "\\\\": "back-striped", "xx": "checked"}
    return ", ".join(f"{hatches.get(look.hatch, look.hatch)}: {look.name}" for look in looks)


def _describe_rank(rank: RankEvent) -> str:
    did, coming = format_step_label(rank.did, NOTHING), _describe_next(rank, format_step_label(rank.next, DONE))
    memory = f"values {format_bytes(rank.activation_bytes)}, process {format_bytes(rank.process_bytes)}"
    return f"Rank {rank.rank} ({rank.role}) did {did}; next {coming}; {memory}."
