"""Run the benchmark commands one after another; keep their rows as JSON, compare them, and write the page."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from mpi4dl_nb.benchmarks.cases import BenchmarkCase, BenchmarkStudy
from mpi4dl_nb.engines.comm.device import count_cores
from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.engines.formatting import format_bytes, format_number
from mpi4dl_nb.launch.mpi_library import make_engine_command, make_mpi_environment

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

    @property
    def spread(self) -> float:
        """The spread of the measurements of this line; 0 if the line has none."""
        lines = [self.line, *(part for part in self.line.values() if isinstance(part, dict))]
        spreads = [BenchmarkRow("", None, part).get_number("spread") for part in lines if "spread" in part]
        return max(spreads, default=0.0)


@dataclass(frozen=True)
class BenchmarkResults:
    """All rows by study title, a description of the machine and the run, and the failures."""

    machine: Mapping[str, str]
    rows: Mapping[str, Sequence[BenchmarkRow]] = field(default_factory=dict)
    failures: Sequence[str] = ()

    def save(self, path: Path) -> None:
        """Save the machine and the rows as JSON."""
        kept = {title: [asdict(row) for row in rows] for title, rows in self.rows.items()}
        path.write_text(json.dumps({"machine": dict(self.machine), "rows": kept}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> BenchmarkResults:
        """Load saved results. Raises PlanError if the file holds something else."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            rows = {title: [BenchmarkRow(**row) for row in rows] for title, rows in kept["rows"].items()}
            return cls(kept["machine"], rows)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"{path} holds no figures of benchmarks: {error}. Delete it, and measure all.") from error


# Run the commands, each on its own ranks. No other work may run meanwhile.

_LONGEST_S = 900

Runner = Callable[[BenchmarkCase], Sequence[dict[str, Any]]]


def run_case(case: BenchmarkCase) -> list[dict[str, Any]]:
    """Return the lines that a case prints. Raises RankError if it fails or does not end."""
    environment = os.environ | make_mpi_environment(case.ranks)
    try:
        command = make_engine_command(case.ranks, *case.arguments)
        done = subprocess.run(
            command, env=environment, capture_output=True, encoding="utf-8", timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks took more than {_LONGEST_S} s.") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[0]
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks ended with {done.returncode}: {reason}")
    try:
        return [json.loads(line) for line in done.stdout.splitlines()]
    except json.JSONDecodeError as error:
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks printed {error.doc!r}.") from error


def measure_studies(studies: Sequence[BenchmarkStudy], runner: Runner = run_case) -> BenchmarkResults:
    """Run studies; return their rows, a description of the machine, and the commands that failed."""
    start_s = time.perf_counter()
    rows: dict[str, list[BenchmarkRow]] = {study.title: [] for study in studies}
    failures = []
    for study in studies:
        for case in study.cases:
            print(f"{study.title}: {case.name or ' '.join(case.arguments[:2])} ...")
            try:
                for line in runner(case):
                    # A case without a name has a row for each number of bytes.
                    rows[study.title].append(
                        BenchmarkRow(case.name, case.at, line)
                        if case.name
                        else BenchmarkRow(format_bytes(line["bytes"]), line["bytes"], line)
                    )
            except RankError as error:
                failures.append(str(error))
    took = {"took": f"{time.perf_counter() - start_s:.0f} s"}
    return BenchmarkResults(describe_machine() | took, rows, tuple(failures))


def describe_machine() -> dict[str, str]:
    """Return the processor, memory, GPU, versions and date."""
    names = ("torch", "mpi4py", "numpy")
    path = Path("/proc/cpuinfo")  # on Linux `platform.processor()` says no more than "x86_64"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    processor = next(named, platform.processor() or platform.machine())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": f"{processor}, {count_cores()} cores",
        "memory": format_bytes(psutil.virtual_memory().total),
        "GPU": device,
        "versions": ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)]),
        "date": time.strftime("%Y-%m-%d"),
    }


# Compare figures with earlier ones: ratios rather than seconds, since machines differ, and only beyond noise.

LEAST = 0.1
"""Minimum change that is reported, however small the spread: medians of seven steps differ by as much."""


def find_changes(studies: Sequence[BenchmarkStudy], before: BenchmarkResults, now: BenchmarkResults) -> Iterator[str]:
    """Yield a sentence on each row in both results whose ratio has changed by more than noise."""
    for study in studies:
        earlier = {row.name: row for row in before.rows.get(study.title, ())}
        for row in now.rows.get(study.title, ()):
            try:
                old = earlier[row.name]
                was = old.get_number(study.ratio)
            except (KeyError, TypeError, ValueError):
                continue  # there was no such row, or an older version's line has no such field
            is_ = row.get_number(study.ratio)
            noise = max(LEAST, old.spread, row.spread)
            if was > 0 and abs(is_ / was - 1) > noise:
                way = "better" if (is_ > was) == study.more_is_better else "worse"
                yield f"{study.title}, {row.name}: {way}, {is_:.3f} after {was:.3f} (noise {noise:.0%})."


# The page of all figures, in Markdown, completely generated.


def build_page(
    studies: Sequence[BenchmarkStudy],
    found: BenchmarkResults,
    pictures: Mapping[str, tuple[str, str]],
    changed: Sequence[str] | None,
) -> str:
    """Return the page with all tables and pictures.

    `pictures` maps a study to the path and alt text of its picture. `changed` is None if there were no earlier figures.
    """
    machine = "; ".join(f"{name}: {value}" for name, value in found.machine.items())
    lines = ["# Benchmarks", "", f"Written by `make bench`. {machine}.", ""]
    if changed is None:
        lines += ["There were no figures before."]
    elif not changed:
        lines += ["No ratio differs from the figures before by more than noise."]
    else:
        lines += ["Ratios that differ from the figures before by more than noise:", ""]
        lines += [f"- {text}" for text in changed]
    lines += ["", "Not measured:", "", *(f"- {text}" for text in found.failures)] if found.failures else []
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
        cells = [row.name]
        for column in study.columns:
            value = row.get_number(column)
            if column.endswith("bytes"):
                cells.append(format_bytes(int(value)))
            else:
                cells.append(f"{value:.0%}" if column.endswith("spread") else format_number(value))
        yield f"| {' | '.join(cells)} |"
