"""`python -m mpi4dl_nb.benchmarks`: run all studies and write the page, its JSON and its pictures.

Ratios are compared with the earlier figures in the folder; changes beyond noise are reported, but are no failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mpi4dl_nb.benchmarks.cases import STUDIES
from mpi4dl_nb.benchmarks.comparison import show_growth
from mpi4dl_nb.benchmarks.results import BenchmarkResults, build_page, find_changes, measure_studies
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError

PAGE, DATA, PICTURES = "BENCHMARKS.md", "benchmarks.json", "figures"


def main(arguments: Sequence[str]) -> int:
    """Run the studies. Return 0, 1 if something could not be measured, or 2 if the request was invalid."""
    flags = argparse.ArgumentParser(prog="python -m mpi4dl_nb.benchmarks", description=__doc__.splitlines()[0])
    flags.add_argument("--folder", default=".", help="folder that the page is written to")
    flags.add_argument(
        "--only", nargs="+", default=[""], metavar="TITLE", help="run the studies whose titles begin with TITLE"
    )
    chosen = flags.parse_args(arguments)
    folder = Path(chosen.folder)
    try:
        studies = [study for study in STUDIES if study.title.startswith(tuple(chosen.only))]
        if not studies:
            known = ", ".join(study.title for study in STUDIES)
            raise PlanError(f"No study begins with {' or '.join(chosen.only)}. There are {known}.")
        before = BenchmarkResults.load(folder / DATA) if (folder / DATA).exists() else None
        measured = {study.title for study in studies}
        if before and (lost := [title for title, rows in before.rows.items() if rows and title not in measured]):
            raise PlanError(
                f"{folder / DATA} also has figures of {', '.join(lost)}. Choose another --folder, or measure all."
            )
        results = measure_studies(studies)
    except Mpi4dlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    changed = list(find_changes(studies, before, results)) if before else None
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    results.save(folder / DATA)  # at once: it has taken a quarter of an hour
    pictures = {}
    for study in studies:
        if study.grows and results.rows[study.title]:
            figure = show_growth(study, results.rows[study.title])
            path = f"{PICTURES}/{study.title.lower().replace(' ', '_')}.png"
            (folder / path).write_bytes(figure.to_png())
            pictures[study.title] = path, figure.alt
    (folder / PAGE).write_text(build_page(studies, results, pictures, changed), encoding="utf-8")
    print(f"{folder / PAGE}: {sum(map(len, results.rows.values()))} rows")
    for text in (*results.failures, *(changed or ())):
        print(text)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
