"""Timeline of one training step, one row per rank, with the predicted timeline below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from torch import nn

from engines.errors import PlanError
from engines.formatting import format_bytes
from engines.plan import Plan
from engines.program.compile import compile_plan
from engines.program.make_schedule import compute_plan_bubble
from engines.program.program import Traffic, count_traffic
from engines.program.timeline import WORK, Timeline, TimelineEvent
from engines.spatial.layout import Layout
from engines.train.training import prepare
from mpi4dl_nb.draw.figure import (
    CASING,
    BarStyle,
    Box,
    Drawing,
    draw_boxes,
    draw_legend,
    draw_row_frame,
    draw_stacks,
    get_row_layout,
    write_first_fit,
)

__all__ = ["get_style", "label_rows", "show_timeline", "show_traffic"]

# Labels in the bars of a timeline, where there is room for them.


LETTERS = {"forward": "F", "weights": "W"}  # else B, as in the charts of schedules
SMALL_ROW_PX = 40  # lower rows have no room for texts in their halves
ROOM_PX = 6  # margin of a text
LEAST = 0.02  # fraction of the step; smaller bubbles are not labelled


def label_rows(axes: Axes, timeline: Timeline) -> None:
    """Label work with its pass and micro-batch, and larger bubbles with their share of the step.

    The layout of the figure must be final, since widths on the screen decide what fits.
    """
    if axes.bbox.height / len(timeline.ranks) < SMALL_ROW_PX:
        return
    for row, rank in enumerate(timeline.ranks):
        # Consecutive work on one micro-batch in one pass has one label.
        mine = [event for event in timeline.events if event.rank == rank and event.kind == "compute"]
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
}
ORDER = (FORWARD, BACKWARD, WEIGHTS, *LOOKS.values(), OTHER, WAIT)  # in the legend

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

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, forecast, show_timeline
    >>> plan = Plan(split_size=2, num_spatial_parts=4)
    >>> figure = show_timeline(forecast(resnet20_v1(), plan, (2, 3, 64, 64), "Summit").timeline, plan)
    """
    charts = {"measured": timeline} | ({"predicted": predicted} if predicted is not None else {})
    rows = {name: _make_row_labels(chart, plan) for name, chart in charts.items()}
    end_ms = max(chart.seconds for chart in charts.values()) * 1e3
    first, last = span_ms or (0.0, end_ms)
    if not 0 <= first < last:
        raise PlanError(f"span_ms={span_ms} must be (start, end) in milliseconds, 0 <= start < end.")
    if first >= end_ms:  # else the figure would be blank; a span that only ends later is shown up to its end
        raise PlanError(f"span_ms={span_ms} starts after the end of the step, at {end_ms:.4g} ms: nothing is there.")
    row_in, _ = get_row_layout(len(rows["measured"]))
    tall = [0.8 + row_in * len(each) for each in rows.values()]
    figure = Drawing(figsize=(11, 0.8 + sum(tall)), layout="constrained")
    axes = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=tall)[:, 0]
    titles = {name: _format_title(name, charts, plan) for name in charts}
    met = {
        style
        for place, (name, chart) in zip(axes, charts.items(), strict=True)
        for style in _draw_chart(place, chart, rows[name], titles[name])
    }
    # The hint is below the title of the upper chart only, and the label of the shared axis below the lower chart only.
    axes[0].set_title(f"{titles['measured']}\n{HINT}", loc="left", fontsize=10)
    for place in axes[:-1]:
        place.set_xlabel("")
    axes[0].set_xlim(first, last)
    draw_legend(figure, [style for style in ORDER if style in met])
    figure.freeze_layout()  # the final width of a bar decides whether it is labelled
    for place, chart in zip(axes, charts.values(), strict=True):
        label_rows(place, chart)
    told = []
    for name, chart in charts.items():
        shares = _format_shares(chart)
        ranks = [f"{', '.join(texts)}: {', '.join(shares[rank])}" for rank, texts in rows[name].items()]
        told.append(f"{titles[name]}. {'; '.join(ranks)}.")
    figure.alt = " ".join(told)
    return figure


def _format_title(name: str, charts: Mapping[str, Timeline], plan: Plan | None) -> str:
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


def _make_row_labels(timeline: Timeline, plan: Plan | None) -> RowLabels:
    """Return each rank's name and roles, in ascending order of ranks."""
    if not timeline.events:
        raise PlanError("The timeline holds no event: run a training step first.")
    if plan is None:
        return {rank: (f"rank {rank}",) for rank in timeline.ranks}
    roles = Layout.of(plan).roles
    if timeline.ranks != tuple(range(len(roles))):
        ranks = ", ".join(map(str, timeline.ranks))
        raise PlanError(
            f"The timeline is of ranks {ranks}, but the plan needs {len(roles)} ranks. "
            "Give the plan that was run, or none."
        )
    texts = [[f"stage {role.stage}, tile {role.tile}{', mirrored' * role.direction}" for role in who] for who in roles]
    return {rank: (f"rank {rank}", *told) for rank, told in enumerate(texts)}


def _draw_chart(axes: Axes, timeline: Timeline, rows: RowLabels, title: str) -> set[BarStyle]:
    """Draw work in the upper halves of the rows and messages in the lower, and the texts of the rows.

    Return the styles that occur.
    """
    axes.set_title(title, loc="left", fontsize=10)
    ranks = list(rows)
    bars: dict[tuple[int, BarStyle], list[Box]] = defaultdict(list)
    for event in timeline.events:
        # A message is drawn as its own time, followed by the time for which it waited.
        start, wait, end = (
            (s - timeline.start_s) * 1e3 for s in (event.start_s, event.end_s - event.wait_s, event.end_s)
        )
        row = ranks.index(event.rank)
        top = row - 0.42 if event.kind in WORK else row + 0.02
        bars[row, get_style(event)].append((start, top, wait - start, 0.4))
        if event.wait_s:
            bars[row, WAIT].append((wait, row + 0.02, end - wait, 0.4))
    for (_, style), boxes in bars.items():
        draw_boxes(axes, boxes, **style.patch | {"linewidth": 0, "label": style.name})
    _, separator = get_row_layout(len(rows))
    texts = [[separator.join(words) for words in side] for side in (rows.values(), _format_shares(timeline).values())]
    draw_row_frame(axes, timeline.seconds * 1e3, "time, ms", *texts)
    return {style for _, style in bars}


def _format_shares(timeline: Timeline) -> dict[int, tuple[str, str]]:
    """Return `compute 71%` and `communicate 5%, wait 22%`, by rank."""
    return {
        rank: (f"compute {use.work:.0%}", f"communicate {use.communication:.0%}, wait {use.waiting:.0%}")
        for rank, use in timeline.time_shares.items()
    }


# Messages and bytes sent in a training step under several plans, counted from the ranks' programs.


KINDS = ("halo", "stage", "all-reduce")
TrafficByKind = Mapping[str, Traffic]


def show_traffic(model: nn.Module, plans: Mapping[str, Plan], image_shape: Sequence[int]) -> Drawing:
    """Draw the messages and bytes of one training step (forward and backward) of the busiest rank under each plan.

    `plans` are keyed by their names in the figure; `image_shape` is (N, C, H, W).
    Raises PlanError, TraceError or ImageError, as `Training` does.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Plan, show_traffic
    >>> plans = {"before each layer": Plan(split_size=1), "fused": Plan(split_size=1, halo_d2=True)}
    >>> figure = show_traffic(resnet20_v1(), plans, (2, 3, 64, 64))
    """
    if not plans:
        raise PlanError("There is no plan to show: give at least one, such as {'D1': Plan()}.")
    # Counted from the compiled programs, so that nothing runs and no rank is needed.
    sent: dict[str, TrafficByKind] = {}
    for name, plan in plans.items():
        traffic = map(count_traffic, compile_plan(prepare(model, plan, image_shape).graph, plan))
        sent[name] = max(traffic, key=lambda parts: sum(part.bytes for part in parts.values()))  # of the busiest rank
    figure = Drawing(figsize=(11, 1.9 + 0.5 * len(sent)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    looks = {kind: LOOKS[kind] for kind in KINDS}
    messages = [{kind: part.messages for kind, part in parts.items()} for parts in sent.values()]
    sizes = [{kind: part.bytes / 2**20 for kind, part in parts.items()} for parts in sent.values()]
    draw_stacks(left, looks, messages, [str(sum(row.values())) for row in messages])
    draw_stacks(right, looks, sizes, [format_bytes(round(sum(row.values()) * 2**20)) for row in sizes])
    left.set(xlabel="messages sent", yticks=range(len(sent)), yticklabels=sent)
    right.set(xlabel="megabytes sent")
    for axes in (left, right):
        axes.margins(x=0.16)  # room for the number at the end of the longest bar
        axes.set_xlim(left=0)
    title = "One training step, forward and back: what the busiest rank sends"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, list(looks.values()))
    told = []
    for name, parts in sent.items():
        texts = [
            f"{part.messages} messages of {format_bytes(part.bytes)} for {LOOKS[kind].name}"
            for kind in KINDS
            if (part := parts.get(kind))
        ]
        told.append(f"{name}: {', '.join(texts)}")
    figure.alt = f"{title}. {'; '.join(told)}."
    return figure
