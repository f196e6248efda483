"""Run the benchmark commands one after another, each on its own ranks. No other work may run meanwhile."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from engines.comm.cgroup_limits import count_cores
from engines.errors import RankError
from engines.formatting import format_bytes
from mpi4dl_nb.benchmarks.cases import BenchmarkCase, BenchmarkStudy
from mpi4dl_nb.benchmarks.results import BenchmarkResults, BenchmarkRow, make_rows
from mpi4dl_nb.launch.exec_launcher import make_engine_command
from mpi4dl_nb.launch.mpi_library import make_mpi_environment

__all__ = ["measure_studies", "run_case"]

_LONGEST_S = 900

Runner = Callable[[BenchmarkCase], Sequence[dict[str, Any]]]


def run_case(case: BenchmarkCase) -> list[dict[str, Any]]:
    """Return the lines that a case prints. Raises RankError if it fails or does not end."""
    environment = os.environ | make_mpi_environment(case.ranks)
    try:
        command = make_engine_command(case.ranks, *case.arguments)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks took more than {_LONGEST_S} s.") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[0]
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks ended with {done.returncode}: {said}")
    try:
        return [json.loads(line) for line in done.stdout.splitlines()]
    except json.JSONDecodeError as error:
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks printed {error.doc!r}.") from error


def measure_studies(
    studies: Sequence[BenchmarkStudy], runner: Runner = run_case, told: Callable[[str], object] = print
) -> BenchmarkResults:
    """Run studies; return their rows, a description of the machine, and the commands that failed."""
    start_s = time.perf_counter()
    rows: dict[str, list[BenchmarkRow]] = {study.title: [] for study in studies}
    failures = []
    for study in studies:
        for case in study.cases:
            told(f"{study.title}: {case.name or ' '.join(case.arguments[:2])} ...")
            try:
                rows[study.title] += make_rows(case, runner(case))
            except RankError as error:
                failures.append(str(error))
    return BenchmarkResults(
        describe_machine() | {"took": f"{time.perf_counter() - start_s:.0f} s"}, rows, tuple(failures)
    )


def describe_machine() -> dict[str, str]:
    """Return the processor, memory, GPU, versions and date."""
    names = ("torch", "mpi4py", "numpy")
    path = Path("/proc/cpuinfo")  # on Linux `platform.processor()` says no more than "x86_64"
    lines = path.read_text().splitlines() if path.exists() else []
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
