"""The page of all figures, in Markdown: nothing in it by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engines.spoken import spoken_bytes, spoken_rate
from mpi4dl_nb.benchmarks.cases import Study
from mpi4dl_nb.benchmarks.guard import Change
from mpi4dl_nb.benchmarks.rows import Findings, Row

__all__ = ["page"]


def page(
    studies: Sequence[Study], found: Findings, pictures: Mapping[str, tuple[str, str]], changed: Sequence[Change] | None
) -> str:
    """All tables and pictures. `pictures` are path and alt text by study; `changed`: None where nothing was before."""
    lines = ["# Benchmarks", "", "Written by `make bench`. " + _where(found), ""]
    lines += _against(changed)
    lines += ["", "Not measured:", "", *(f"- {said}" for said in found.failures)] if found.failures else []
    for study in studies:
        if rows := found.rows.get(study.title):
            lines += ["", f"## {study.title}", "", study.says, "", *_table(study, rows)]
            if study.title in pictures:
                path, alt = pictures[study.title]
                lines += ["", f"![{alt}]({path})"]
    return "\n".join(lines) + "\n"


def _where(found: Findings) -> str:
    return f"{'; '.join(f'{name}: {said}' for name, said in found.machine.items())}."


def _against(changed: Sequence[Change] | None) -> Iterator[str]:
    if changed is None:
        yield "There were no figures before."
    elif not changed:
        yield "No ratio differs from the figures before by more than noise."
    else:
        yield "Ratios that differ from the figures before by more than noise:"
        yield ""
        yield from (f"- {change.words}" for change in changed)


def _table(study: Study, rows: Sequence[Row]) -> Iterator[str]:
    yield f"| | {' | '.join(study.columns.values())} |"
    yield f"|---|{'---:|' * len(study.columns)}"
    for row in rows:
        yield f"| {row.name} | {' | '.join(_cell(row, column) for column in study.columns)} |"


def _cell(row: Row, column: str) -> str:
    value = row.number(column)
    if column.endswith("bytes"):
        return spoken_bytes(int(value))
    return f"{value:.0%}" if column.endswith("spread") else spoken_rate(value)
