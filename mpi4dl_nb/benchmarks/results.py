"""Results of benchmarks: rows of studies, parsed from the output of the commands, and stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines.errors import PlanError
from engines.formatting import format_bytes
from mpi4dl_nb.benchmarks.cases import BenchmarkCase

__all__ = ["BenchmarkResults", "BenchmarkRow", "make_rows"]


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
