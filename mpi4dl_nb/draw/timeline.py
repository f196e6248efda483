"""Charts of time, one row per rank: a training step, measured and predicted, and the schedule of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from mpi4dl_nb.draw.figure import (
    CASING,
    INK,
    BarStyle,
    Box,
    Drawing,
    draw_boxes,
    draw_legend,
    draw_row_frame,
    get_row_layout,
    write_first_fit,
)
from mpi4dl_nb.engines.checks import is_number
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import Layout
from mpi4dl_nb.engines.plan.make_schedule import compute_plan_bubble
from mpi4dl_nb.engines.plan.schedule import ActionKind, PipelineAction, Schedule
from mpi4dl_nb.engines.program.timeline import WORK, Timeline, TimelineEvent

# Labels in the bars of a timeline, where there is room for them.


LETTERS = {"forward": "F", "weights": "W"}  # else B, as in the charts of schedules
SMALL_ROW_PX = 40  # lower rows have no room for texts in their halves
ROOM_PX = 6  # margin of a text, for its outline
LEAST = 0.02  # fraction of the step; smaller bubbles are not labelled


def label_rows(axes: Axes, timeline: Timeline) -> None:
    """Label work with its pass and micro-batch, and larger bubbles with their share of the step.

    The layout of the figure must be final, since widths on the screen decide what fits.
    """
    if axes.bbox.height / len(timeline.ranks) < SMALL_ROW_PX:
        return
    for row, rank in enumerate(timeline.ranks):
        # Consecutive work on one micro-batch in one pass has one label.
        mine = [event for event in timeline.events if event.rank == rank and event.kind in ("compute", "ring")]
        mine.sort(key=lambda event: event.start_s)
        for name, events in groupby(mine, lambda event: f"{LETTERS.get(event.phase, 'B')}{event.micro_batch}"):
            run = list(events)
            span = run[0].start_s - timeline.start_s, run[-1].end_s - timeline.start_s
            _label_span(axes, [name], span, row - 0.22)
        # Work is in the upper half of a row. A bubble is labelled in the lower half, where waiting is drawn.
        for span in timeline.find_bubbles(rank):
            share = (span[1] - span[0]) / timeline.seconds
            if share >= LEAST:
                _label_span(axes, [f"waits {share:.0%}", f"{share:.0%}"], span, row + 0.22)


def _label_span(axes: Axes, forms: Sequence[str], span_s: tuple[float, float], height: float) -> None:
    """Write the first of `forms` that fits into the visible part of a span of seconds, in its middle."""
    low, high = axes.get_xlim()
    start, end = max(span_s[0] * 1e3, low), min(span_s[1] * 1e3, high)
    room_px = axes.bbox.width * (end - start) / (high - low) - ROOM_PX
    write_first_fit(axes, (start + end) / 2, height, forms, room_px, fontsize=8, path_effects=CASING, zorder=10)


HINT = "upper half of a row: own work; lower half: communication, and waiting for others with its share of the step"

FORWARD = BarStyle("compute, forward", "#56b4e9", "")
BACKWARD = BarStyle("compute, backward", "#e69f00", "//")
WEIGHTS = BarStyle("compute, weights' gradient", "#bfbfbf", "++")
PASSES = {"forward": FORWARD, "weights": WEIGHTS}
OTHER = BarStyle("other communication", "#d9d9d9", "ooo")
WAIT = BarStyle("waiting for others", "#ffffff", "..")
LOOKS = {
    "update": BarStyle("update of the weights", "#4d4d4d", "**"),
    "halo": BarStyle("halo", "#009e73", "xxx"),
    "stage": BarStyle("stage transfer", "#cc79a7", "\\\\"),
    "all-reduce": BarStyle("all-reduce", "#f0e442", "|||"),
    "ring": BarStyle("attention in a ring", "#9b8ce0", "---"),
}
ORDER = (FORWARD, BACKWARD, WEIGHTS, *LOOKS.values(), OTHER, WAIT)  # in the legend
ROW_LOOKS = (FORWARD, LOOKS["halo"], WAIT)  # of the shares of a rank's time: work, communication, waiting

RowLabels = Mapping[int, tuple[str, ...]]
"""Each rank's name and roles."""


def get_style(event: TimelineEvent) -> BarStyle:
    """Return the style of an event by its kind; of computation, also by its pass (forward, backward, weights)."""
    if event.kind == "compute":
        return PASSES.get(event.phase, BACKWARD)
    return LOOKS.get(event.kind, OTHER)


def show_timeline(
    timeline: Timeline,
    plan: Plan | None = None,
    predicted: Timeline | None = None,
    span_ms: tuple[float, float] | None = None,
) -> Drawing:
    """Draw one step on all ranks: a rank's computation in the upper half of its row, messages and waiting in the lower.

    Where a row is white, the rank was idle. `predicted` is drawn below on the same time axis. `span_ms` (start, end)
    is the part of the step to be shown. `plan` adds each rank's stage and tile and, for a pipeline, the share of time
    without computation and that of the formula. A bar is labelled with its pass and micro-batch (F0, B0, W0) where
    there is room. Raises PlanError if a timeline is empty or has other ranks than the plan, or if the span is invalid.

    >>> from mpi4dl_nb.engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, forecast, show_timeline
    >>> plan = Plan(split_size=2, num_spatial_parts=4)
    >>> figure = show_timeline(forecast(resnet20_v1(), plan, (2, 3, 64, 64), "Summit").timeline, plan)
    """
    charts = {"measured": timeline} | ({"predicted": predicted} if predicted is not None else {})
    rows = make_row_labels(charts, plan)
    end_ms = max(chart.seconds for chart in charts.values()) * 1e3
    span = span_ms or (0.0, end_ms)
    if not _is_span(span):
        raise PlanError(f"span_ms={span_ms} must be (start, end) in milliseconds, 0 <= start < end.")
    first, last = span
    if first >= end_ms:  # else the figure would be blank; a span that only ends later is shown up to its end
        raise PlanError(f"span_ms={span_ms} starts after the end of the step, at {end_ms:.4g} ms: nothing is there.")
    row_in, _ = get_row_layout(len(rows["measured"]))
    tall = [0.8 + row_in * len(labels) for labels in rows.values()]
    figure = Drawing(figsize=(11, 0.8 + sum(tall)), layout="constrained")
    axes = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=tall)[:, 0]
    titles = {name: format_timeline_title(name, charts, plan) for name in charts}
    met: set[BarStyle] = set()
    for panel, (name, chart) in zip(axes, charts.items(), strict=True):
        met |= _draw_chart(panel, chart, rows[name], titles[name])
    # The hint is below the title of the upper chart only, and the label of the shared axis below the lower chart only.
    axes[0].set_title(f"{titles['measured']}\n{HINT}", loc="left", fontsize=10)
    for panel in axes[:-1]:
        panel.set_xlabel("")
    axes[0].set_xlim(first, last)
    draw_legend(figure, [style for style in ORDER if style in met])
    figure.freeze_layout()  # the final width of a bar decides whether it is labelled
    for panel, chart in zip(axes, charts.values(), strict=True):
        label_rows(panel, chart)
    descriptions = []
    for name, chart in charts.items():
        shares = _format_shares(chart)
        ranks = [f"{', '.join(texts)}: {', '.join(shares[rank])}" for rank, texts in rows[name].items()]
        descriptions.append(f"{titles[name]}. {'; '.join(ranks)}.")
    figure.alt = " ".join(descriptions)
    return figure


def _is_span(span: object) -> bool:
    return isinstance(span, Sequence) and [*map(is_number, span)] == [True, True] and bool(0 <= span[0] < span[1])


def format_timeline_title(name: str, charts: Mapping[str, Timeline], plan: Plan | None) -> str:
    """Return the title of a chart, with its name if there are two charts."""
    chart, measured = charts[name], charts["measured"]
    title = "One training step" if len(charts) == 1 else f"One training step, {name}"
    beside = f" ({chart.seconds / measured.seconds - 1:+.0%})" if name == "predicted" else ""
    title += f": {chart.seconds * 1e3:.4g} ms{beside} on {len(chart.ranks)} ranks"
    if plan is None or plan.micro_batches == 1 or plan.split_size == 1:
        return title
    formula = compute_plan_bubble(plan)  # None for schedules without one
    beside = "" if formula is None else f" ({plan.schedule} of equal stages: {formula:.0%})"
    return f"{title}; idle or communicating {chart.idle:.0%}{beside}"


def make_row_labels(charts: Mapping[str, Timeline], plan: Plan | None) -> dict[str, RowLabels]:
    """Return each rank's name and roles in each chart, in ascending order of ranks.

    A prediction may have fewer ranks than were measured: it simulates only replicas that differ from one another.
    """
    if not all(chart.events for chart in charts.values()):
        raise PlanError("The timeline holds no event: run a training step first.")
    timeline = charts["measured"]
    if plan is None:
        measured: RowLabels = {rank: (f"rank {rank}",) for rank in timeline.ranks}
    else:
        layout = Layout.of(plan)
        roles = layout.roles
        if timeline.ranks != tuple(range(len(roles))):
            ranks = ", ".join(map(str, timeline.ranks))
            raise PlanError(
                f"The timeline is of ranks {ranks}, but the plan needs {len(roles)} ranks. "
                "Give the plan that was run, or none."
            )
        measured = {rank: (f"rank {rank}", *map(layout.describe_role, who)) for rank, who in enumerate(roles)}
    if unknown := [rank for chart in charts.values() for rank in chart.ranks if rank not in measured]:
        raise PlanError(
            f"The prediction is of ranks {', '.join(map(str, unknown))} too, but {len(measured)} ranks were measured. "
            "Predict the plan that was run."
        )
    return {name: {rank: measured[rank] for rank in chart.ranks} for name, chart in charts.items()}


def _draw_chart(axes: Axes, timeline: Timeline, rows: RowLabels, title: str) -> set[BarStyle]:
    """Draw work in the upper halves of the rows and messages in the lower, and the texts of the rows.

    Return the styles that occur.
    """
    axes.set_title(title, loc="left", fontsize=10)
    ranks = list(rows)
    bars: dict[tuple[int, BarStyle], list[Box]] = defaultdict(list)
    for event in timeline.events:
        # A message is drawn as its own time, followed by the time for which it waited.
        times_s = event.start_s, event.end_s - event.wait_s, event.end_s
        start, wait, end = ((time_s - timeline.start_s) * 1e3 for time_s in times_s)
        row = ranks.index(event.rank)
        top = row - 0.42 if event.kind in WORK else row + 0.02
        bars[row, get_style(event)].append((start, top, wait - start, 0.4))
        if event.wait_s:
            bars[row, WAIT].append((wait, row + 0.02, end - wait, 0.4))
    for (_, style), boxes in bars.items():
        draw_boxes(axes, boxes, **style.patch | {"linewidth": 0, "label": style.name})
    _, separator = get_row_layout(len(rows))
    texts = (list(map(separator.join, side.values())) for side in (rows, _format_shares(timeline)))
    draw_row_frame(axes, timeline.seconds * 1e3, "time, ms", *texts)
    return {style for _, style in bars}


def _format_shares(timeline: Timeline) -> dict[int, tuple[str, str]]:
    """Return `compute 71%` and `communicate 5%, wait 22%`, by rank."""
    return {
        rank: (f"compute {use.work:.0%}", f"communicate {use.communication:.0%}, wait {use.waiting:.0%}")
        for rank, use in timeline.time_shares.items()
    }


# The order of micro-batches on each rank, and the idle time, in units of one forward.


SCHEDULE_HINT = "in a bar: its micro-batch; white: idle; held: forwards that have not gone all the way back"
TOP, HIGH = -0.4, 0.8  # upper edge, relative to the middle of the row, and height of a bar
SLOTS = {
    (ActionKind.FORWARD, False): BarStyle("forward", "#56b4e9", ""),
    (ActionKind.BACKWARD, False): BarStyle("backward", "#e69f00", "//"),
    (ActionKind.WEIGHTS, False): BarStyle("weights' gradient", "#bfbfbf", "++"),
    (ActionKind.FORWARD, True): BarStyle("forward, mirrored", "#009e73", "..."),
    (ActionKind.BACKWARD, True): BarStyle("backward, mirrored", "#cc79a7", "\\\\"),
    (ActionKind.WEIGHTS, True): BarStyle("weights' gradient, mirrored", "#f0e442", "xx"),
}


def show_schedule(schedule: Schedule) -> Drawing:
    """Draw a row of bars per rank over time, in units of one forward; white is idle.

    Where there is room, a bar is labelled with its work (`schedule.format_action`), or its micro-batch alone. A row is
    labelled with the rank's stages, its idle share, and the most forwards that it holds (`schedule.count_in_flight`).
    Raises PlanError if there is no work.

    >>> from mpi4dl_nb.engines.plan.make_schedule import make_schedule
    >>> from mpi4dl_nb.engines.plan.schedule import Batch
    >>> from mpi4dl_nb import show_schedule
    >>> made = make_schedule("1f1b", [[(0,), (1,)]], [Batch(0, (0, 1, 2))])
    >>> figure = show_schedule(made)
    """
    if not schedule.length:
        raise PlanError("The schedule holds no work: make it of at least one batch with a micro-batch.")
    row_in, end = get_row_layout(schedule.ranks)
    figure = Drawing(figsize=(11, 1.6 + row_in * schedule.ranks), layout="constrained")
    axes = figure.add_subplot()
    length = f"{schedule.length} forwards long, idle {schedule.idle_share:.0%}"
    title = f"{schedule.name} on {schedule.ranks} ranks: {length}"
    axes.set_title(f"{title}\n{SCHEDULE_HINT}", loc="left", fontsize=10)
    draw_legend(figure, draw_slots(axes, schedule))
    left, right = [], []
    for rank in range(schedule.ranks):
        # The stages, such as `stages 0, 2 and mirrored 1`.
        actions = schedule.get_actions(rank)
        stages = [sorted({work.stage for work in actions if work.direction == way}) for way in (0, 1)]
        words = [f"{word}{', '.join(map(str, of))}" for word, of in zip(("", "mirrored "), stages, strict=True) if of]
        name = f"stage{'s' * (sum(map(len, stages)) > 1)} {' and '.join(words)}" if words else "no work"
        left.append((f"rank {rank}", name))
        idle, held = f"idle {schedule.compute_idle_share(rank):.0%}", schedule.count_in_flight(rank)
        right.append((idle, f"holds up to {held}"))
    draw_row_frame(axes, schedule.length, "time, in forwards", *(list(map(end.join, side)) for side in (left, right)))
    figure.freeze_layout()  # the final width of a bar decides which text fits
    label_slots(axes, schedule)
    descriptions = [f"{', '.join(who)}: {', '.join(numbers)}" for who, numbers in zip(left, right, strict=True)]
    figure.alt = f"{title}. {'; '.join(descriptions)}."
    return figure


def draw_slots(axes: Axes, schedule: Schedule) -> list[BarStyle]:
    """Draw every slot and return the styles that occur, in the order of the legend."""
    met: set[BarStyle] = set()
    for rank, lane in enumerate(schedule.lanes):
        bars: dict[BarStyle, list[Box]] = defaultdict(list)
        for slot in lane:
            look = SLOTS[slot.work.kind, slot.work.direction > 0]
            bars[look].append((slot.start, rank + TOP, slot.stop - slot.start, HIGH))
        for look, boxes in bars.items():
            draw_boxes(axes, boxes, **look.patch | {"linewidth": 0, "label": look.name})
        # Slots of one style are one patch without an outline. A line at each start separates those that touch.
        axes.vlines([slot.start for slot in lane], rank + TOP, rank + TOP + HIGH, color=INK, linewidth=0.6)
        met.update(bars)
    return [look for look in SLOTS.values() if look in met]


def label_slots(axes: Axes, schedule: Schedule) -> None:
    """Label all bars with their work, or their micro-batch, or not at all: the longest form that fits every bar."""
    slots = [(rank, slot) for rank, lane in enumerate(schedule.lanes) for slot in lane]
    unit_px = axes.bbox.width / schedule.length
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "path_effects": CASING}
    forms: tuple[Callable[[PipelineAction], str], ...] = (schedule.format_action, lambda work: str(work.micro_batch))
    for form in forms:
        # Only the text with most characters per unit of time is measured, as it decides for all.
        rank, slot = max(slots, key=lambda pair: len(form(pair[1].work)) / (pair[1].stop - pair[1].start))
        room_px = unit_px * (slot.stop - slot.start) - ROOM_PX
        if widest := write_first_fit(axes, slot.start, rank, [form(slot.work)], room_px, **style):
            widest.remove()
            for rank, slot in slots:
                axes.text((slot.start + slot.stop) / 2, rank, form(slot.work), **style)
            return
