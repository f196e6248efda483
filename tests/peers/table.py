"""The comparison as a table in a Markdown file: a row for each job, a column for each system and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mpi4dl_nb.engines.errors import PlanError

BEGIN, END = "<!-- table of peers: begin -->", "<!-- table of peers: end -->"
Line = Mapping[str, object]


def make_table(lines: Sequence[Line]) -> str:
    """Return the lines as a Markdown table. A number is the largest of the three errors of a job.

    >>> line = {"system": "A", "version": "1", "ranks": 2, "job": "pool", "verdict": "wrong", "image": 2.0}
    >>> print(make_table([line]))
    | | A 1, 2 ranks |
    |---|---|
    | pool | **2** |
    """
    columns = list(dict.fromkeys((line["system"], line["version"], line["ranks"]) for line in lines))
    cells = {(line["job"], line["system"], line["ranks"]): _make_cell(line) for line in lines}
    heads = [f"{system} {version or ''}".strip() + f", {ranks} ranks" for system, version, ranks in columns]
    rows = [
        [str(job), *(cells.get((job, system, ranks), "") for system, _, ranks in columns)]
        for job in dict.fromkeys(line["job"] for line in lines)
    ]
    return "\n".join(
        f"| {' | '.join(row)} |".replace("|  |", "| |", 1) if row is not None else "|" + "---|" * (len(heads) + 1)
        for row in [["", *heads], None, *rows]
    )


def _make_cell(line: Line) -> str:
    if line["verdict"] not in ("exact", "wrong"):
        return str(line["verdict"])
    errors = [line[name] for name in ("output", "image", "weights") if name in line]
    if None in errors:
        return "**other shape**"
    worst = max(map(float, errors))  # type: ignore[arg-type]
    return f"**{worst:.2g}**" if line["verdict"] == "wrong" else f"{worst:.0e}" if worst else "0"


def write_table(path: Path, lines: Sequence[Line]) -> None:
    """Replace the table of a Markdown file. Raises PlanError if it has no place for one."""
    before, after = split_page(path)
    path.write_text(f"{before}{BEGIN}\n\n{make_table(lines)}\n\n{END}{after}", encoding="utf-8")


def split_page(path: Path) -> tuple[str, str]:
    """Return what stands before BEGIN and after END in a Markdown file. Raises PlanError if it lacks one of them."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN) if path.is_file() else ("", "", "")
    _, end, after = rest.partition(END)
    if not end:
        raise PlanError(f"{path} has no place for the table. Write these two lines into it: {BEGIN} and {END}.")
    return before, after
