"""How figures of benchmarks grow: the ratio of each row, and where the ranks' time goes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from engines.bench.phases import PHASES
from engines.errors import PlanError
from engines.spoken import spoken_rate, spoken_share
from mpi4dl_nb.benchmarks.cases import Study
from mpi4dl_nb.benchmarks.rows import Row
from mpi4dl_nb.draw.bars import Look, draw_legend, draw_rows
from mpi4dl_nb.draw.figure import BLUE, INK, Drawing

__all__ = ["show_growth"]

LOOKS = {
    "forward": Look("forward", "#56b4e9", ""),
    "backward": Look("backward", "#0072b2", "//"),
    "messages": Look("messages", "#009e73", "xxx"),
    "sums": Look("sums", "#f0e442", "|||"),
    "update": Look("update", "#cc79a7", "--"),
    "waiting": Look("waiting", "#ffffff", ".."),
}


def show_growth(study: Study, rows: Sequence[Row]) -> Drawing:
    """The ratio of a study against what grows; on the right, where it was counted, where the time of all ranks went.

    Raises PlanError where nothing grows or nothing was measured.
    """
    if not study.grows or not rows:
        raise PlanError(f"{study.title!r} has nothing that grows to show: give a study with `grows`, and its rows.")
    figure = Drawing(figsize=(11 if study.phases else 6.5, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 1 + study.phases, squeeze=False)[0]
    _draw_ratios(left, study, rows)
    for axes in right:
        _draw_phases(axes, rows)
    if right:
        draw_legend(figure, [LOOKS[name] for name in PHASES])
    figure.suptitle(f"{study.title}: {study.columns[study.ratio]} by {study.grows}", x=0.01, ha="left", fontsize=10)
    figure.alt = f"{study.title}. {'; '.join(_told(study, row) for row in rows)}."
    return figure


def _draw_ratios(axes: Axes, study: Study, rows: Sequence[Row]) -> None:
    """With bars as long as each row's spread."""
    sizes = [row.at or 1 for row in rows]
    ratios = [row.number(study.ratio) for row in rows]
    errors = [ratio * row.spread / 2 for ratio, row in zip(ratios, rows, strict=True)]
    axes.errorbar(sizes, ratios, yerr=errors, color=BLUE, marker="o", capsize=3, elinewidth=0.8)
    axes.axhline(1, color="#767676", linewidth=1, linestyle="--")
    axes.set(xscale="log", xlabel=study.grows, ylabel=study.columns[study.ratio])
    shown = sizes if len(sizes) <= 6 else sizes[::3]
    axes.set_xticks(shown, [spoken_rate(size) for size in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0, top=1.15 * max(1.0, *(r + e for r, e in zip(ratios, errors, strict=True))))
    axes.grid(color="#dddddd", linewidth=0.6)


def _draw_phases(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar for each row, its parts one behind the other."""
    bars: dict[str, list[tuple[int, float, float]]] = {name: [] for name in PHASES}
    for index, row in enumerate(rows):
        start = 0.0
        for name in PHASES:
            share = 100 * row.number(f"phases.{name}")
            if share:
                bars[name].append((index, start, start + share))
            start += share
    for name, spans in bars.items():
        draw_rows(axes, LOOKS[name], spans, -0.36, 0.72)
    axes.set(xlim=(0, 100), ylim=(len(rows) - 0.4, -0.6), xlabel="% of all ranks' time")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9, color=INK)


def _told(study: Study, row: Row) -> str:
    said = f"{row.name}: {spoken_rate(row.number(study.ratio))}"
    if not study.phases:
        return said
    parts = ((name, row.number(f"phases.{name}")) for name in PHASES)
    return f"{said} ({', '.join(f'{spoken_share(share)} {name}' for name, share in parts if share)})"
