"""Results of benchmarks: rows of studies, parsed from the output of the commands, and stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import PlanError
from engines.formatting import format_bytes, format_number
from mpi4dl_nb.benchmarks.cases import BenchmarkCase, BenchmarkStudy

__all__ = ["BenchmarkResults", "BenchmarkRow", "RatioChange", "build_page", "find_changes", "make_rows"]

# From the line that a command prints to a cell of the page:
#
#     {"forward": {"ms": [1.0, 3.0], "spread": 0.04}}      one line of JSON on standard output
#     BenchmarkRow("1,024 px, 4 ranks", None, line)        get_number("forward.ms") = 3.0, of the slowest rank


@dataclass(frozen=True)
class BenchmarkRow:
    """One line of output of a case: its `name` in the study's table, and `at`, the value that grows."""

    name: str
    at: int | None
    line: Mapping[str, Any]

    def get_number(self, column: str) -> float:
        """Return a field of the line (`a.b`: field b of field a); of a list of numbers by rank, the maximum.

        >>> BenchmarkRow("halo", None, {"forward": {"ms": [1.0, 3.0]}}).get_number("forward.ms")
        3.0
        """
        value: Any = self.line
        for part in column.split("."):
            value = value[part]
        return float(max(value) if isinstance(value, list) else value)

    def has_number(self, column: str) -> bool:
        """Return whether the line has such a field; lines of an older version may not."""
        try:
            self.get_number(column)
        except (KeyError, TypeError, ValueError):
            return False
        return True

    @property
    def spread(self) -> float:
        """The spread of the measurements of this line; 0 if the line has none."""
        told = [self.line, *(part for part in self.line.values() if isinstance(part, dict))]
        found = [BenchmarkRow("", None, part).get_number("spread") for part in told if "spread" in part]
        return max(found, default=0.0)


def make_rows(case: BenchmarkCase, lines: Sequence[Mapping[str, Any]]) -> list[BenchmarkRow]:
    """Return the rows of a case: under the case's name if it has one, else each under its number of bytes."""
    if case.name:
        return [BenchmarkRow(case.name, case.at, line) for line in lines]
    return [BenchmarkRow(format_bytes(line["bytes"]), line["bytes"], line) for line in lines]


@dataclass(frozen=True)
class BenchmarkResults:
    """All rows by study title, a description of the machine and the run, and the failures."""

    machine: Mapping[str, str]
    rows: Mapping[str, Sequence[BenchmarkRow]] = field(default_factory=dict)
    failures: Sequence[str] = ()

    def save(self, path: Path) -> None:
        """Save the machine and the rows as JSON."""
        kept = {title: [asdict(row) for row in rows] for title, rows in self.rows.items()}
        path.write_text(json.dumps({"machine": dict(self.machine), "rows": kept}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> BenchmarkResults:
        """Load saved results. Raises PlanError if the file holds something else."""
        try:
            kept = json.loads(path.read_text())
            rows = {title: [BenchmarkRow(**row) for row in rows] for title, rows in kept["rows"].items()}
            return cls(kept["machine"], rows)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{path} holds no figures of benchmarks: {error}. Delete it, and measure all.") from error

    def get_rows(self, title: str) -> dict[str, BenchmarkRow]:
        """Return the rows of a study by name."""
        return {row.name: row for row in self.rows.get(title, ())}


# Compare figures with earlier ones: ratios rather than seconds, since machines differ, and only beyond noise.


LEAST = 0.1
"""Minimum change that is reported, however small the spread: medians of seven steps differ by as much."""


@dataclass(frozen=True)
class RatioChange:
    """A row whose ratio has changed; `noise` is the relative noise that the change exceeds."""

    study: str
    row: str
    before: float
    now: float
    noise: float
    more_is_better: bool

    @property
    def is_better(self) -> bool:
        """Whether the change is an improvement."""
        return (self.now > self.before) == self.more_is_better

    @property
    def words(self) -> str:
        """The change in one sentence.

        >>> RatioChange("Halos", "4 ranks", 1.5, 3.0, 0.25, more_is_better=False).words
        'Halos, 4 ranks: worse, 3.000 after 1.500 (noise 25%).'
        """
        way = "better" if self.is_better else "worse"
        return f"{self.study}, {self.row}: {way}, {self.now:.3f} after {self.before:.3f} (noise {self.noise:.0%})."


def find_changes(
    studies: Sequence[BenchmarkStudy], before: BenchmarkResults, now: BenchmarkResults
) -> Iterator[RatioChange]:
    """Iterate over rows in both results whose ratio has changed by more than noise."""
    for study in studies:
        earlier = before.get_rows(study.title)
        for name, row in now.get_rows(study.title).items():
            if name not in earlier or not earlier[name].has_number(study.ratio):
                continue
            was, is_ = earlier[name].get_number(study.ratio), row.get_number(study.ratio)
            noise = max(LEAST, earlier[name].spread, row.spread)
            if was > 0 and abs(is_ / was - 1) > noise:
                yield RatioChange(study.title, name, was, is_, noise, study.more_is_better)


# The page of all figures, in Markdown, completely generated.


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
