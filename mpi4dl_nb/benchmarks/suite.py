"""Runs the commands, each on ranks of its own, one after another: nothing else may be at work meanwhile."""

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

from engines.comm.container import cores
from engines.errors import RankError
from engines.spoken import spoken_bytes
from mpi4dl_nb.benchmarks.cases import Case, Study
from mpi4dl_nb.benchmarks.rows import Findings, Row, rows_of
from mpi4dl_nb.launch.engine_command import engine_command
from mpi4dl_nb.launch.environment import mpi_environment

__all__ = ["measured", "run"]

_LONGEST_S = 900

Runner = Callable[[Case], Sequence[dict[str, Any]]]


def run(case: Case) -> list[dict[str, Any]]:
    """The lines that a case prints. Raises RankError where it fails or does not end."""
    environment = os.environ | mpi_environment(case.ranks)
    try:
        done = subprocess.run(
            engine_command(case.ranks, *case.arguments),
            env=environment, capture_output=True, text=True, timeout=_LONGEST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks took more than {_LONGEST_S} s.") from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[0]
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks ended with {done.returncode}: {said}")
    try:
        return [json.loads(line) for line in done.stdout.splitlines()]
    except json.JSONDecodeError as error:
        raise RankError(f"`{' '.join(case.arguments)}` on {case.ranks} ranks printed {error.doc!r}.") from error


def measured(studies: Sequence[Study], runner: Runner = run, told: Callable[[str], object] = print) -> Findings:
    """All rows of some studies, what machine it was, and which commands failed."""
    start_s = time.perf_counter()
    rows: dict[str, list[Row]] = {study.title: [] for study in studies}
    failures = []
    for study in studies:
        for case in study.cases:
            told(f"{study.title}: {case.name or ' '.join(case.arguments[:2])} ...")
            try:
                rows[study.title] += rows_of(case, runner(case))
            except RankError as error:
                failures.append(str(error))
    return Findings(machine() | {"took": f"{time.perf_counter() - start_s:.0f} s"}, rows, tuple(failures))


def machine() -> dict[str, str]:
    """Processor, memory, versions and date."""
    names = ("torch", "mpi4py", "numpy")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "processor": f"{_processor()}, {cores()} cores",
        "memory": spoken_bytes(psutil.virtual_memory().total),
        "GPU": device,
        "versions": ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)]),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
