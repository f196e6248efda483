"""The page of all figures, in Markdown, completely generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engines.formatting import format_bytes, format_number
from mpi4dl_nb.benchmarks.cases import BenchmarkStudy
from mpi4dl_nb.benchmarks.ratio_changes import RatioChange
from mpi4dl_nb.benchmarks.results import BenchmarkResults, BenchmarkRow

__all__ = ["build_page"]


def build_page(
    studies: Sequence[BenchmarkStudy],
    found: BenchmarkResults,
    pictures: Mapping[str, tuple[str, str]],
    changed: Sequence[RatioChange] | None,
) -> str:
    """Return the page with all tables and pictures.

    `pictures` maps a study to the path and alt text of its picture. `changed` is None if there were no earlier figures.
    """
    machine = "; ".join(f"{name}: {said}" for name, said in found.machine.items())
    lines = ["# Benchmarks", "", f"Written by `make bench`. {machine}.", ""]
    if changed is None:
        lines += ["There were no figures before."]
    elif not changed:
        lines += ["No ratio differs from the figures before by more than noise."]
    else:
        lines += ["Ratios that differ from the figures before by more than noise:", ""]
        lines += [f"- {change.words}" for change in changed]
    lines += ["", "Not measured:", "", *(f"- {said}" for said in found.failures)] if found.failures else []
    for study in studies:
        if rows := found.rows.get(study.title):
            lines += ["", f"## {study.title}", "", study.says, "", *_format_table(study, rows)]
            if study.title in pictures:
                path, alt = pictures[study.title]
                lines += ["", f"![{alt}]({path})"]
    return "\n".join(lines) + "\n"


def _format_table(study: BenchmarkStudy, rows: Sequence[BenchmarkRow]) -> Iterator[str]:
    yield f"| | {' | '.join(study.columns.values())} |"
    yield f"|---|{'---:|' * len(study.columns)}"
    for row in rows:
        yield f"| {row.name} | {' | '.join(_format_cell(row, column) for column in study.columns)} |"


def _format_cell(row: BenchmarkRow, column: str) -> str:
    value = row.get_number(column)
    if column.endswith("bytes"):
        return format_bytes(int(value))
    return f"{value:.0%}" if column.endswith("spread") else format_number(value)
