"""Charts of benchmark results against the quantity that grows: ratios, and the phases of the ranks' time."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from engines.bench.phases import PHASES
from engines.errors import PlanError
from engines.formatting import format_bytes, format_number, format_percent
from mpi4dl_nb.benchmarks.cases import BenchmarkStudy
from mpi4dl_nb.benchmarks.results import BenchmarkRow
from mpi4dl_nb.draw.bars import BarStyle, draw_legend, draw_rows
from mpi4dl_nb.draw.figure import BLUE, INK, Drawing

__all__ = ["show_growth"]

LOOKS = {
    "forward": BarStyle("forward", "#56b4e9", ""),
    "backward": BarStyle("backward", "#0072b2", "//"),
    "messages": BarStyle("messages", "#009e73", "xxx"),
    "sums": BarStyle("sums", "#f0e442", "|||"),
    "update": BarStyle("update", "#cc79a7", "--"),
    "waiting": BarStyle("waiting", "#ffffff", ".."),
}


def show_growth(study: BenchmarkStudy, rows: Sequence[BenchmarkRow]) -> Drawing:
    """Plot the ratio of a study, or its `drawn` columns, against what grows, and the phases of all ranks' time.

    Raises PlanError if nothing grows in the study or nothing was measured.
    """
    if not study.grows or not rows:
        raise PlanError(f"{study.title!r} has nothing that grows to show: give a study with `grows`, and its rows.")
    figure = Drawing(figsize=(11 if study.phases else 6.5, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 1 + study.phases, squeeze=False)[0]
    (_draw_lines if study.drawn else _draw_ratios)(left, study, rows)
    _draw_sizes(left, study, rows)
    for axes in right:
        _draw_phases(axes, rows)
    if right:
        draw_legend(figure, [LOOKS[name] for name in PHASES])
    what = "bytes" if study.drawn else study.columns[study.ratio]
    figure.suptitle(f"{study.title}: {what} by {study.grows}", x=0.01, ha="left", fontsize=10)
    figure.alt = f"{study.title}. {'; '.join(_describe_row(study, row) for row in rows)}."
    return figure


def _draw_ratios(axes: Axes, study: BenchmarkStudy, rows: Sequence[BenchmarkRow]) -> None:
    """Plot the ratios with error bars as long as each row's spread. The axis cuts off an excessively long bar."""
    ratios = [row.get_number(study.ratio) for row in rows]
    errors = [ratio * row.spread / 2 for ratio, row in zip(ratios, rows, strict=True)]
    axes.errorbar(_get_sizes(rows), ratios, yerr=errors, color=BLUE, marker="o", capsize=3, elinewidth=0.8)
    axes.axhline(1, color="#767676", linewidth=1, linestyle="--")
    highest = max(r + e for r, e in zip(ratios, errors, strict=True))
    axes.set(ylabel=study.columns[study.ratio])
    axes.set_ylim(bottom=0, top=1.15 * max(1.0, min(highest, 1.5 * max(ratios))))


def _draw_lines(axes: Axes, study: BenchmarkStudy, rows: Sequence[BenchmarkRow]) -> None:
    """Plot the `drawn` columns, in bytes, as one line each."""
    for column, marker in zip(study.drawn, "os^", strict=False):
        axes.plot(
            _get_sizes(rows), [row.get_number(column) for row in rows], marker=marker, label=study.columns[column]
        )
    axes.set_yscale("log", base=2)
    axes.set(ylabel="bytes")
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(int(value)))
    axes.legend(frameon=False)


def _get_sizes(rows: Sequence[BenchmarkRow]) -> list[int]:
    return [row.at or 1 for row in rows]


def _draw_sizes(axes: Axes, study: BenchmarkStudy, rows: Sequence[BenchmarkRow]) -> None:
    """Set up the x axis, the quantity that grows."""
    sizes = _get_sizes(rows)
    shown = sizes if len(sizes) <= 6 else sizes[::3]
    axes.set(xscale="log", xlabel=study.grows)
    axes.set_xticks(shown, [format_bytes(size) if study.grows == "bytes" else f"{size:,}" for size in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([], minor=True)
    axes.grid(color="#dddddd", linewidth=0.6)


def _draw_phases(axes: Axes, rows: Sequence[BenchmarkRow]) -> None:
    """Draw one stacked bar of phases per row."""
    bars: dict[str, list[tuple[int, float, float]]] = {name: [] for name in PHASES}
    for index, row in enumerate(rows):
        start = 0.0
        for name in PHASES:
            share = 100 * row.get_number(f"phases.{name}")
            if share:
                bars[name].append((index, start, start + share))
            start += share
    for name, spans in bars.items():
        draw_rows(axes, LOOKS[name], spans, -0.36, 0.72)
    axes.set(xlim=(0, 100), ylim=(len(rows) - 0.4, -0.6), xlabel="% of all ranks' time")
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9, color=INK)


def _describe_row(study: BenchmarkStudy, row: BenchmarkRow) -> str:
    drawn = (f"{format_bytes(int(row.get_number(column)))} {study.columns[column]}" for column in study.drawn)
    said = f"{row.name}: {', '.join(drawn) or format_number(row.get_number(study.ratio))}"
    if not study.phases:
        return said
    parts = ((name, row.get_number(f"phases.{name}")) for name in PHASES)
    return f"{said} ({', '.join(f'{format_percent(share)} {name}' for name, share in parts if share)})"
