"""Charts of benchmark results against the quantity that grows: ratios, and the phases of the ranks' time."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import NullFormatter

from engines.errors import PlanError
from engines.formatting import format_bytes, format_number, format_percent
from mpi4dl_nb.benchmarks.cases import BenchmarkStudy
from mpi4dl_nb.benchmarks.results import BenchmarkRow
from mpi4dl_nb.draw.figure import BLUE, INK, BarStyle, Drawing, draw_legend, draw_stacks

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
    sizes = [row.at or 1 for row in rows]
    if study.drawn:
        for column, marker in zip(study.drawn, "os^", strict=False):
            left.plot(sizes, [row.get_number(column) for row in rows], marker=marker, label=study.columns[column])
        what = "bytes"
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter(lambda value, _: format_bytes(int(value)))
        left.legend(frameon=False)
    else:
        what, ratios = study.columns[study.ratio], [row.get_number(study.ratio) for row in rows]
        errors = [ratio * row.spread / 2 for ratio, row in zip(ratios, rows, strict=True)]  # bars as long as the spread
        left.errorbar(sizes, ratios, yerr=errors, color=BLUE, marker="o", capsize=3, elinewidth=0.8)
        left.axhline(1, color="#767676", linewidth=1, linestyle="--")
        # One noisy row must not flatten the others: an error bar beyond 1.5 times the largest ratio is cut off.
        highest = max(r + e for r, e in zip(ratios, errors, strict=True))
        left.set_ylim(bottom=0, top=1.15 * max(1.0, min(highest, 1.5 * max(ratios))))
    left.set(ylabel=what, xscale="log", xlabel=study.grows)
    # Ticks at the measured sizes; every third of many, as labels of neighbours would overlap.
    shown = sizes if len(sizes) <= 6 else sizes[::3]
    left.set_xticks(shown, [format_bytes(size) if study.grows == "bytes" else f"{size:,}" for size in shown])
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xticks([], minor=True)
    left.grid(color="#dddddd", linewidth=0.6)
    shares = [{name: row.get_number(f"phases.{name}") for name in LOOKS if study.phases} for row in rows]
    if study.phases:
        draw_stacks(right[0], LOOKS, [{name: 100 * share for name, share in each.items()} for each in shares])
        right[0].set(xlim=(0, 100), xlabel="% of all ranks' time")
        right[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9, color=INK)
        draw_legend(figure, list(LOOKS.values()))
    figure.suptitle(f"{study.title}: {what} by {study.grows}", x=0.01, ha="left", fontsize=10)
    told = []
    for row, parts in zip(rows, shares, strict=True):
        drawn = (f"{format_bytes(int(row.get_number(column)))} {study.columns[column]}" for column in study.drawn)
        phases = ", ".join(f"{format_percent(share)} {name}" for name, share in parts.items() if share)
        numbers = ", ".join(drawn) or format_number(row.get_number(study.ratio))
        told.append(f"{row.name}: {numbers}{f' ({phases})' * study.phases}")
    figure.alt = f"{study.title}. {'; '.join(told)}."
    return figure
