"""Candidate plans side by side: what was predicted, and what was measured; as a figure, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from engines.errors import PlanError
from engines.plan import Plan
from mpi4dl_nb.draw.bars import Look, draw_legend
from mpi4dl_nb.draw.figure import INK, Drawing, spoken_bytes

if TYPE_CHECKING:
    from mpi4dl_nb.tuning import Candidate

__all__ = ["COLUMNS", "cells", "name_of", "show_tuning", "table_html"]

PREDICTED = Look("predicted", "#56b4e9", "")
MEASURED = Look("measured", "#e69f00", "//")
SHOWN = 10
"""Rows of the figure: the rest is in the table."""

COLUMNS = (
    "no.", "plan", "stages", "grid of tiles", "schedule", "parts", "images/s predicted", "images/s measured",
    "MB of a rank predicted", "MB of a rank measured",
)  # fmt: skip


def name_of(plan: Plan) -> str:
    """A plan in a few words, unlike any other that is searched for the same ranks.

    >>> name_of(Plan(split_size=2, spatial_size=1)), name_of(Plan(split_size=1, spatial_size=0, data_parallel=4))
    ('2x2 tiles + 1 stage', '4 replicas')
    """
    words = [f"{_grid(plan)} tiles"] if plan.spatial_size else []
    behind = plan.split_size - plan.spatial_size
    if behind and (plan.spatial_size or behind > 1):
        words.append(f"{behind} stage{'s'[: behind > 1]}")
    words += [f"{plan.local_dp} ranks share"] if plan.local_dp > 1 else []
    words += [f"{plan.parts} parts, {plan.schedule}"] if plan.parts > 1 else []
    words += ["both ways"] if plan.bidirectional else []
    words += ["fused halos"] if plan.halo_d2 else []
    words += [f"{plan.data_parallel} replicas"] if plan.data_parallel > 1 else []
    return " + ".join(words) or "1 rank"


def _grid(plan: Plan) -> str:
    return " ".join(str(grid) for grid in plan.grids[: plan.spatial_size]) or "–"


def _order(plan: Plan) -> str:
    """The schedule, where there is anything to be put in order."""
    return plan.schedule if plan.parts > 1 or plan.bidirectional else "–"


def cells(number: int, each: Candidate) -> tuple[str, ...]:
    """The row of a candidate, one text for each of `COLUMNS`."""
    plan = each.plan
    measured = "failed" if each.failure else _said(each.images_per_s, _rate)
    return (
        str(number), name_of(plan), str(plan.split_size), _grid(plan), _order(plan), str(plan.parts),
        _rate(each.predicted_images_per_s), measured, _mb(each.predicted_bytes), _said(each.peak_bytes, _mb),
    )  # fmt: skip


def _said(value: float | None, say: Callable[[float], str]) -> str:
    return "–" if value is None else say(value)


def _rate(value: float) -> str:
    """
    >>> _rate(2359.8), _rate(1.2345)
    ('2,360', '1.23')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _mb(count: float) -> str:
    return f"{count / 1e6:,.3g}" if count < 1e9 else f"{count / 1e6:,.0f}"


def table_html(candidates: Sequence[Candidate], choose: str = "") -> str:
    """All candidates as an HTML table with headers for rows and columns.

    With `choose` each row begins with a radio button, whose value is the row's number from 0, and whose name for those
    who do not see the table is that word, the number and the plan.
    """
    head = "".join(f'<th scope="col" style="{_CELL}">{name}</th>' for name in COLUMNS)
    rows = "".join(_row(number, each, choose) for number, each in enumerate(candidates, 1))
    caption = f"{len(candidates)} plans, the best first: measured ones before those that are only predicted"
    return (
        f'<table style="border-collapse: collapse; color: inherit">'
        f'<caption style="text-align: left">{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


_CELL = "text-align: left; padding: 2px 10px 2px 4px; border-bottom: 1px solid currentColor; line-height: 1.3"


def _row(number: int, each: Candidate, choose: str) -> str:
    first, name, *rest = cells(number, each)
    if choose:
        said = escape(f"{choose} {number}: {name}")
        first = f'<input type="radio" value="{number - 1}" aria-label="{said}"> {first}'
    tip = f' title="{escape(each.failure)}"' if each.failure else ""
    told = f'<td style="{_CELL}; white-space: nowrap">{first}</td><th scope="row" style="{_CELL}">{escape(name)}</th>'
    told += "".join(f'<td style="{_CELL}">{escape(text)}</td>' for text in rest)
    return f"<tr{tip}>{told}</tr>"


def show_tuning(candidates: Sequence[Candidate]) -> Drawing:
    """Images per second and memory of the first candidates, predicted beside measured.

    Raises PlanError where there is none.
    """
    if not candidates:
        raise PlanError("There is no candidate to show: predict some plans first.")
    shown = list(candidates[:SHOWN])
    figure = Drawing(figsize=(11, 1.6 + 0.52 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, shown, lambda each: each.predicted_images_per_s, lambda each: each.images_per_s, _rate)
    _draw(
        right, shown, lambda each: each.predicted_bytes / 1e6,
        lambda each: None if each.peak_bytes is None else each.peak_bytes / 1e6, "{:,.3g}".format,
    )  # fmt: skip
    names = [f"{number}. {name_of(each.plan)}" for number, each in enumerate(shown, 1)]
    left.set(xlabel="images per second", yticks=range(len(shown)), yticklabels=names, ylim=(len(shown) - 0.4, -0.6))
    right.set(xlabel="MB of tensors of the fullest rank")
    title = f"The best {len(shown)} of {len(candidates)} plans"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    draw_legend(figure, [PREDICTED, MEASURED])
    told = [f"{name}: {_told(each)}" for name, each in zip(names, shown, strict=True)]
    figure.alt = f"{title}. {'; '.join(told)}."
    return figure


def _told(each: Candidate) -> str:
    words = [f"{_rate(each.predicted_images_per_s)} images/s and {spoken_bytes(each.predicted_bytes)} predicted"]
    if each.images_per_s is not None and each.peak_bytes is not None:
        words.append(f"{_rate(each.images_per_s)} images/s and {spoken_bytes(each.peak_bytes)} measured")
    return ", ".join(words) + (", failed" if each.failure else "")


def _draw(
    axes: Axes, shown: Sequence[Candidate], predicted: Callable[[Candidate], float],
    measured: Callable[[Candidate], float | None], say: Callable[[float], str],
) -> None:  # fmt: skip
    """Two bars for each candidate, or one where nothing was measured."""
    for row, each in enumerate(shown):
        found = [(PREDICTED, predicted(each)), (MEASURED, measured(each))]
        for (look, length), shift in zip(found, (-0.19, 0.19), strict=True):
            if length is not None:
                place = row + shift
                axes.barh(place, length, 0.36, color=look.colour, hatch=look.hatch, edgecolor=INK, linewidth=0.5)
                axes.text(length, place, f" {say(length)}", va="center", fontsize=8)
    axes.set_xlim(0, 1.2 * max(bar.get_width() for bar in axes.patches))
