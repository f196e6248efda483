"""Candidate plans with their predicted and measured costs, as a figure and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from matplotlib.axes import Axes

from mpi4dl_nb.draw.figure import INK, BarStyle, Drawing, Style, draw_legend
from mpi4dl_nb.draw.memory import make_limit_look
from mpi4dl_nb.draw.tuning_points import KIND_LOOKS, TuningPoint, make_points
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes, format_number
from mpi4dl_nb.engines.predict.candidates import Candidate, sort_candidates
from mpi4dl_nb.engines.predict.explain import describe_plan, format_grids, format_rate
from mpi4dl_nb.engines.predict.forecast import Forecast, compute_throughput

PREDICTED = BarStyle("predicted", "#56b4e9", "")
MEASURED = BarStyle("measured", "#e69f00", "//")
SHOWN = 10
"""Rows of the figure. The table has all candidates."""

COLUMNS = (
    *((name,) for name in ("no.", "plan", "stages", "grid", "schedule", "parts")),
    ("images/s", "predicted", "measured"),
    ("memory of the fullest rank", "predicted", "measured"),
)
"""Headers of the table, each with its subheaders."""
NUMBERS = 5
"""Index of the first numeric column."""
MB = 1 << 20
MEMORY = "memory of the fullest rank, MB"
_CELL = "padding: 2px 10px 2px 4px; border-bottom: 1px solid currentColor; line-height: 1.3"
_WORDS, _NUMBER = f"text-align: left; {_CELL}", f"text-align: right; white-space: nowrap; {_CELL}"


def format_table_html(candidates: Sequence[Candidate], choose: str = "") -> str:
    """Return all candidates as an HTML table with headers for rows and columns.

    With `choose`, each row begins with a radio button. Its value is the plan as text; its label for screen readers is
    that word, the number from 1 and the plan's name.
    """
    upper = lower = ""  # two rows of headers, since some headers span two columns
    for column, (name, *parts) in enumerate(COLUMNS):
        style = f"{_NUMBER if column >= NUMBERS else _WORDS}; vertical-align: bottom"
        if not parts:
            upper += f'<th scope="col" rowspan="2" style="{style}">{name}</th>'
            continue
        upper += f'<th scope="colgroup" colspan="{len(parts)}" style="{style}">{name}</th>'
        for part in parts:
            label = f'scope="col" aria-label="{name} {part}"'
            lower += f'<th {label} style="{style}; font-weight: normal">{part}</th>'
    rows = ""
    for position, candidate in enumerate(candidates, 1):
        plan, name, first = candidate.plan, describe_plan(candidate.plan), str(position)
        rate = "–" if candidate.images_per_s is None else format_number(candidate.images_per_s)
        rest = (
            str(plan.split_size),
            format_grids(plan),
            plan.schedule if plan.parts > 1 or plan.bidirectional else "–",  # no micro-batches or directions to order
            str(plan.parts),
            format_number(candidate.predicted_images_per_s),
            "failed" if candidate.failure else rate,
            format_bytes(candidate.predicted_bytes),
            "–" if candidate.peak_bytes is None else format_bytes(candidate.peak_bytes),
        )
        if choose:
            label = escape(f"{choose} {position}: {name}")
            first = f'<input type="radio" value="{escape(repr(plan))}" aria-label="{label}"> {first}'
        rows += f'<tr title="{escape(candidate.failure)}">' if candidate.failure else "<tr>"
        rows += f'<td style="{_WORDS}; white-space: nowrap">{first}</td>'
        rows += f'<th scope="row" style="{_WORDS}; font-weight: normal">{escape(name)}</th>'
        for column, text in enumerate(rest, start=2):
            rows += f'<td style="{_NUMBER if column >= NUMBERS else _WORDS}">{escape(text)}</td>'
        rows += "</tr>"
    caption = f"{len(candidates)} plans, the best first: measured ones before those that are only predicted"
    return (
        f'<table style="border-collapse: collapse; color: inherit">'
        f'<caption style="text-align: left">{caption}</caption>'
        f"<thead><tr>{upper}</tr><tr>{lower}</tr></thead><tbody>{rows}</tbody></table>"
    )


def describe_measurements(measured: Sequence[Candidate], neutral_batch: int | None = None, by: str = "speed") -> str:
    """Describe which measured plan is the fastest, whether others may be, and how far off the predictions were.

    If plans are ordered `by` memory, the plan that needs least is described first.

    A plan may be as fast as the fastest one if the times of their steps overlap. `neutral_batch` as in `tune`.
    """
    # A prediction is judged by measured / predicted: 1 is exact, less means that the plan was slower.
    rates = [(candidate.images_per_s, candidate.predicted_images_per_s) for candidate in measured]
    ratios = [f"{measured_rate / predicted_rate:.2f}" for measured_rate, predicted_rate in rates if measured_rate]
    counted = f"{len(ratios)} of {len(measured)} plans measured, at {', '.join(ratios)} of their predicted images/s."
    failures = [(describe_plan(candidate.plan), candidate.failure) for candidate in measured]
    failed = [f"{name} failed: {failure}" for name, failure in failures if failure]
    if not ratios:
        return " ".join(failed)

    def compute_pace(each: Candidate, seconds: float) -> float:
        return compute_throughput(each.forecast.images, seconds, neutral_batch)

    in_order = sort_candidates(measured, neutral_batch)
    timed = [(candidate, candidate.measured) for candidate in in_order if candidate.measured]
    (best, measurement), *others = timed
    rate = format_rate(best.forecast.images, measurement.median_s, neutral_batch)
    title = "The fastest plan, as measured, is" if others else "Measured:"
    words = f"{title} {describe_plan(best.plan)}: {rate}."
    if by == "memory" and others:
        plans = (candidate for candidate, _ in timed)
        least = min(plans, key=lambda candidate: candidate.peak_bytes or candidate.predicted_bytes)
        held = format_bytes(least.peak_bytes or least.predicted_bytes)
        words = f"The plan with the least memory, as measured, is {describe_plan(least.plan)}: {held}. {words}"
    slowest = compute_pace(best, max(measurement.seconds))
    paces = [(candidate.plan, compute_pace(candidate, min(measurement.seconds))) for candidate, measurement in others]
    if ties := [describe_plan(plan) for plan, pace in paces if pace >= slowest]:
        words += f" As the times of steps vary, these may be as fast: {'; '.join(ties)}."
    return " ".join([words, counted, *failed])


def show_tuning(
    candidates: Sequence[Candidate],
    rank_bytes: int | None = None,
    neutral_batch: int | None = None,
    too_large: Sequence[Forecast] = (),
) -> Drawing:
    """Draw all candidates by time and memory, and the images per second and memory of the first ones as bars.

    The dotted line joins those that no other candidate beats in both, measured if it was measured, else as predicted;
    predictions are often too fast, so measure a plan before you trust its place. `rank_bytes` is what a rank may hold,
    and `too_large` are forecasts beyond it. `neutral_batch` as in `tune`. Raises PlanError if there is no candidate.

    >>> from mpi4dl_nb import Candidate, Plan, forecast, resnet20_v1, show_tuning
    >>> plans = [Plan(split_size=2, spatial_size=0), Plan(split_size=1, slice_method="1x2")]
    >>> foreseen = [forecast(resnet20_v1(), plan, (2, 3, 64, 64), "Summit") for plan in plans]
    >>> figure = show_tuning([Candidate(each) for each in foreseen])
    >>> figure.alt.count("images/s") > 1
    True
    """
    if not candidates:
        raise PlanError("There is no candidate to show: predict some plans first.")
    shown = list(candidates[:SHOWN])
    figure = Drawing(figsize=(11, 5.3 + 0.52 * len(shown)), layout="constrained")
    (above,), (below,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[3.6, 1.0 + 0.52 * len(shown)])
    points = make_points(candidates, neutral_batch, rank_bytes, too_large)
    _draw_points(above.add_subplot(), points, rank_bytes)
    left, right = below.subplots(1, 2, sharey=True)
    _draw_bars(left, [(candidate.predicted_images_per_s, candidate.images_per_s) for candidate in shown], format_number)
    # In MB, since the ticks of an axis in bytes would be powers of 10 and not of 2.
    held = [(candidate.predicted_bytes, candidate.peak_bytes) for candidate in shown]
    in_mb = [(predicted / MB, measured and measured / MB) for predicted, measured in held]
    _draw_bars(right, in_mb, lambda held: format_bytes(round(held * MB)))
    names = [f"{position}. {describe_plan(candidate.plan)}" for position, candidate in enumerate(shown, 1)]
    left.set(xlabel="images per second", ylim=(len(shown) - 0.4, -0.6))
    left.set_yticks(range(len(shown)), names, fontsize=9)
    right.set(xlabel=MEMORY)
    title = f"The best {len(shown)} of {len(candidates)} plans for {shown[0].plan.ranks} ranks"
    above.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, [PREDICTED, MEASURED])
    descriptions = []
    for name, candidate in zip(names, shown, strict=True):
        rate, memory = format_number(candidate.predicted_images_per_s), format_bytes(candidate.predicted_bytes)
        text = f"{name}: {rate} images/s and {memory} predicted"
        if candidate.images_per_s is not None and candidate.peak_bytes is not None:
            rate, memory = format_number(candidate.images_per_s), format_bytes(candidate.peak_bytes)
            text += f", {rate} images/s and {memory} measured"
        descriptions.append(text + (", failed" if candidate.failure else ""))
    front = ", ".join(str(point.number) for point in points if point.on_front)
    limit = f" A rank may hold {format_bytes(rank_bytes)}." if rank_bytes else ""
    figure.alt = f"{title}. {'; '.join(descriptions)}. No other plan beats these in time and memory: {front}.{limit}"
    return figure


def _get_state(point: TuningPoint) -> str:
    return "too large" if not point.number else "measured" if point.measured_image_s else "predicted"


def _draw_points(axes: Axes, points: Sequence[TuningPoint], rank_bytes: int | None) -> None:
    """Draw time against memory: marks are filled if measured, pale if predicted, hollow if the plan is too large."""
    for kind, look in KIND_LOOKS.items():
        faces = {"measured": look.colour, "predicted": f"{look.colour}33", "too large": "none"}
        marks = [(_get_state(point), point.cost) for point in points if point.kind == kind]
        for index, (state, face) in enumerate(faces.items()):
            places = [(size / MB, seconds * 1e3) for mark, (seconds, size) in marks if mark == state]
            style: Style = {"marker": look.marker, "s": 64, "facecolors": face, "edgecolors": look.colour}
            if places:
                style |= {"linewidths": 1.2, "label": f"{look.name}, {state}", "zorder": 4 - index}
                axes.scatter(*zip(*places, strict=True), **style)
    front = sorted((point.cost[1] / MB, point.cost[0] * 1e3) for point in points if point.on_front)
    if front:
        line: Style = {"color": INK, "linestyle": ":", "linewidth": 1.4, "label": "front (measured, else predicted)"}
        axes.step(*zip(*front, strict=True), where="post", **line)
    fitting = max((point.cost[1] for point in points if point.number), default=0) / MB
    if rank_bytes:
        line = make_limit_look(any(point.cost[1] > rank_bytes for point in points))
        axes.axvline(rank_bytes / MB, label=f"a rank may hold {format_bytes(rank_bytes)}", **line)
        low = axes.get_xlim()[0]
        axes.set_xlim(low, min(axes.get_xlim()[1], max(1.1 * fitting, 1.6 * rank_bytes / MB)))
    if rank_bytes and rank_bytes / MB > 4 * fitting:  # else all plans would share a corner
        axes.set_xlim(None, 1.25 * fitting)
    axes.set(xlabel=MEMORY, ylabel="time for an image in ms", ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8, borderaxespad=0)


def _draw_bars(axes: Axes, pairs: Sequence[tuple[float, float | None]], say: Callable[[float], str]) -> None:
    """Draw two bars per candidate, predicted and measured, or one if nothing was measured."""
    for look, lengths, shift in zip((PREDICTED, MEASURED), zip(*pairs, strict=True), (-0.19, 0.19), strict=True):
        known = {row + shift: length for row, length in enumerate(lengths) if length is not None}
        bars = axes.barh(list(known), list(known.values()), 0.36, **look.patch)
        axes.bar_label(bars, list(map(say, known.values())), padding=3, fontsize=8)
    axes.set_xlim(0, 1.3 * max(length for pair in pairs for length in pair if length is not None))
