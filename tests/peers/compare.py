"""`python -m tests.peers [--write docs/who-is-exact.md]`: which systems that split an image are exact.

Each system does the same jobs on two and on four ranks of this machine's CPU, in float64. Its errors are the largest
differences from PyTorch in one process, of the output, of the image's gradient and of the weights' gradients, each
relative to the largest value; null if a result has another shape, or values that are no numbers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from math import isfinite
from pathlib import Path

import numpy as np

from mpi4dl_nb.engines.cli.options import FlagParser, parse_positive
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import describe_unknown
from tests.peers.jobs import JOBS, Arrays, find_job
from tests.peers.outcome import CUT_OFF, EXACT, measure_errors
from tests.peers.table import split_page, write_table
from tests.peers.torch_operators import compute_reference
from tests.peers.work import NEEDS, SYSTEMS

RANKS = (2, 4)
ABSENT = "not installed here"
_LIMIT_S = 300.0
"""How long a system may take for all jobs on as many ranks; each job of a peer has a limit of its own."""

Line = dict[str, object]


def make_peers_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags of `peers`."""
    flags = FlagParser(prog="python -m tests.peers", description=__doc__.splitlines()[0])
    flags.add_argument("--systems", default=",".join(SYSTEMS), help="names, separated by commas (default: all)")
    flags.add_argument("--jobs", default="", help="only jobs whose name contains this text, as 'norm'")
    flags.add_argument("--ranks", type=parse_positive, nargs="+", default=RANKS, choices=RANKS, help="2, 4 or both")
    flags.add_argument("--write", type=Path, help="a Markdown file in which the table is replaced")
    return flags


def compare_peers(arguments: Sequence[str]) -> Iterator[Line]:
    """Yield a line for each job of each system, as soon as it is known; write the table at the end, if asked to.

    Raises PlanError for an unknown system.
    """
    chosen = make_peers_parser().parse_args(arguments)
    systems = chosen.systems.split(",")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise PlanError(describe_unknown(f"--systems {unknown[0]!r} is unknown", unknown[0], SYSTEMS))
    jobs = [job.name for job in JOBS if chosen.jobs in job.name]
    if not jobs:
        raise PlanError(f"--jobs {chosen.jobs!r} is in no name. The jobs are: {'; '.join(job.name for job in JOBS)}.")
    if chosen.write:
        split_page(chosen.write)  # before anything is computed
    lines = []
    for system in systems:
        for ranks in chosen.ranks:
            for line in run_system(system, ranks, jobs):
                lines.append(line)
                yield line
    if chosen.write:
        write_table(chosen.write, lines)


def print_comparison(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the comparison as JSON."""
    yield from map(json.dumps, compare_peers(arguments))


def run_system(system: str, ranks: int, jobs: Sequence[str], limit_s: float = _LIMIT_S) -> Iterator[Line]:
    """Yield a line for each job that one system does on as many ranks."""
    about: Line = {"system": system, "ranks": ranks, "version": None}
    if not _is_installed(NEEDS.get(system)):
        yield from ({**about, "job": job, "verdict": ABSENT} for job in jobs)
        return
    left = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        for answer in _ask(system, ranks, folder, jobs, limit_s):
            if "version" in answer:
                about |= answer
            elif "job" in answer:
                left.remove(answer["job"])
                yield {**about, **_evaluate_answer(answer)}
            else:
                yield from ({**about, "job": job, **_name_failure(answer["failure"])} for job in left)


def _ask(system: str, ranks: int, folder: str, jobs: Sequence[str], limit_s: float) -> Iterator[dict[str, str]]:
    """Yield what a system in a process of its own says: its version, its jobs, and its `failure`, if it has one."""
    command = [sys.executable, "-m", "tests.peers.work", system, str(ranks), folder, *jobs]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # Lines, since a system that hangs has done some jobs.
        limited = ["timeout", f"{limit_s:g}", *command]
        with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8") as process:
            for line in process.stdout or ():
                if line.startswith("{"):
                    yield json.loads(line)
        if code := process.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [""])[-1]
            yield {"failure": f"{CUT_OFF} after {limit_s:g} s" if code == 124 else f"ended with code {code}: {last}"}


def _evaluate_answer(answer: dict[str, str]) -> Line:
    """A result that is wrong counts, also where the job fails after it; one that is missing is a failure."""
    reference = _get_reference(answer["job"])
    with np.load(answer["results"]) as file:
        results = dict(file)
    errors = measure_errors(results, reference)
    missing = ", ".join(reference.keys() - results.keys())
    failure = answer["refusal"] or (f"no result for {missing}" if missing else "")
    verdict: Line = _name_failure(failure) if failure else {"verdict": "exact"}
    if max(errors.values(), default=0.0) > EXACT:
        verdict |= {"verdict": "wrong"}
    rounded = {name: float(f"{error:.2g}") if isfinite(error) else None for name, error in errors.items()}
    return {"job": answer["job"], **rounded, **verdict}


def _name_failure(reason: str) -> Line:
    return {"verdict": "cut off" if reason.startswith(CUT_OFF) else "error", "reason": reason}


def _is_installed(package: str | None) -> bool:
    with suppress(PackageNotFoundError):
        return not package or bool(distribution(package))
    return False


@cache
def _get_reference(name: str) -> Arrays:
    return compute_reference(find_job(name))
