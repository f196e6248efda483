"""Candidate plans with their predicted and measured costs, as a figure and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from matplotlib.axes import Axes

from engines.errors import PlanError
from engines.formatting import format_bytes, format_number
from engines.predict.explain import describe_plan, format_grids
from mpi4dl_nb.draw.figure import BarStyle, Drawing, draw_legend
from mpi4dl_nb.plan_benchmark import Candidate

__all__ = ["describe_measurements", "format_table_html", "show_tuning"]

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
_CELL = "padding: 2px 10px 2px 4px; border-bottom: 1px solid currentColor; line-height: 1.3"
_WORDS, _NUMBER = f"text-align: left; {_CELL}", f"text-align: right; white-space: nowrap; {_CELL}"


def format_table_html(candidates: Sequence[Candidate], choose: str = "") -> str:
    """Return all candidates as an HTML table with headers for rows and columns.

    With `choose`, each row begins with a radio button. Its value is the row's number from 0; its label for screen
    readers is that word, the number from 1 and the plan.
    """
    upper = lower = ""  # two rows of headers, since some headers span two columns
    for place, (name, *parts) in enumerate(COLUMNS):
        style = f"{_NUMBER if place >= NUMBERS else _WORDS}; vertical-align: bottom"
        if not parts:
            upper += f'<th scope="col" rowspan="2" style="{style}">{name}</th>'
            continue
        upper += f'<th scope="colgroup" colspan="{len(parts)}" style="{style}">{name}</th>'
        for part in parts:
            label = f'scope="col" aria-label="{name} {part}"'
            lower += f'<th {label} style="{style}; font-weight: normal">{part}</th>'
    rows = ""
    for number, each in enumerate(candidates, 1):
        plan, name, first = each.plan, describe_plan(each.plan), str(number)
        rest = (
            str(plan.split_size),
            format_grids(plan),
            plan.schedule if plan.parts > 1 or plan.bidirectional else "–",  # no micro-batches or directions to order
            str(plan.parts),
            format_number(each.predicted_images_per_s),
            "failed" if each.failure else "–" if each.images_per_s is None else format_number(each.images_per_s),
            format_bytes(each.predicted_bytes),
            "–" if each.peak_bytes is None else format_bytes(each.peak_bytes),
        )
        if choose:
            label = escape(f"{choose} {number}: {name}")
            first = f'<input type="radio" value="{number - 1}" aria-label="{label}"> {first}'
        rows += f'<tr title="{escape(each.failure)}">' if each.failure else "<tr>"
        rows += f'<td style="{_WORDS}; white-space: nowrap">{first}</td>'
        rows += f'<th scope="row" style="{_WORDS}; font-weight: normal">{escape(name)}</th>'
        for place, text in enumerate(rest, start=2):
            rows += f'<td style="{_NUMBER if place >= NUMBERS else _WORDS}">{escape(text)}</td>'
        rows += "</tr>"
    caption = f"{len(candidates)} plans, the best first: measured ones before those that are only predicted"
    return (
        f'<table style="border-collapse: collapse; color: inherit">'
        f'<caption style="text-align: left">{caption}</caption>'
        f"<thead><tr>{upper}</tr><tr>{lower}</tr></thead><tbody>{rows}</tbody></table>"
    )


def describe_measurements(measured: Sequence[Candidate]) -> str:
    """Describe how many plans were measured, how far off the predictions were, and why others failed."""
    # A prediction is judged by measured / predicted: 1 is exact, less means that the plan was slower.
    ratios = [f"{each.images_per_s / each.predicted_images_per_s:.2f}" for each in measured if each.images_per_s]
    counted = f"{len(ratios)} of {len(measured)} plans measured, at {', '.join(ratios)} of their predicted images/s."
    failed = (f"{describe_plan(each.plan)} failed: {each.failure}" for each in measured if each.failure)
    return " ".join([*[counted] * bool(ratios), *failed])


def show_tuning(candidates: Sequence[Candidate]) -> Drawing:
    """Draw predicted and measured images per second and memory of the first candidates.

    Raises PlanError if there is none.

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
    figure = Drawing(figsize=(11, 1.6 + 0.52 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_bars(left, [(each.predicted_images_per_s, each.images_per_s) for each in shown], format_number)
    # In MB, since the ticks of an axis in bytes would be powers of 10 and not of 2.
    in_mb = [(each.predicted_bytes / MB, each.peak_bytes and each.peak_bytes / MB) for each in shown]
    _draw_bars(right, in_mb, lambda held: format_bytes(round(held * MB)))
    names = [f"{number}. {describe_plan(each.plan)}" for number, each in enumerate(shown, 1)]
    left.set(xlabel="images per second", yticks=range(len(shown)), yticklabels=names, ylim=(len(shown) - 0.4, -0.6))
    right.set(xlabel="memory of the fullest rank in MB, of its tensors")
    title = f"The best {len(shown)} of {len(candidates)} plans for {shown[0].plan.ranks} ranks"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, [PREDICTED, MEASURED])
    descriptions = []
    for name, each in zip(names, shown, strict=True):
        rate, memory = format_number(each.predicted_images_per_s), format_bytes(each.predicted_bytes)
        text = f"{name}: {rate} images/s and {memory} predicted"
        if each.images_per_s is not None and each.peak_bytes is not None:
            text += f", {format_number(each.images_per_s)} images/s and {format_bytes(each.peak_bytes)} measured"
        descriptions.append(text + (", failed" if each.failure else ""))
    figure.alt = f"{title}. {'; '.join(descriptions)}."
    return figure


def _draw_bars(axes: Axes, pairs: Sequence[tuple[float, float | None]], say: Callable[[float], str]) -> None:
    """Draw two bars per candidate, predicted and measured, or one if nothing was measured."""
    for look, lengths, shift in zip((PREDICTED, MEASURED), zip(*pairs, strict=True), (-0.19, 0.19), strict=True):
        known = {row + shift: length for row, length in enumerate(lengths) if length is not None}
        bars = axes.barh(list(known), list(known.values()), 0.36, **look.patch)
        axes.bar_label(bars, list(map(say, known.values())), padding=3, fontsize=8)
    axes.set_xlim(0, 1.2 * max(bar.get_width() for bar in axes.patches))
