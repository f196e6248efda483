"""What several test files share: how to start ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpiexec(ranks, *arguments)` runs `python -m mpi4py *arguments` on that many ranks."""
    environment = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # the ranks import `tests`
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    program = Path(sys.prefix) / "bin" / "mpiexec"

    def run(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [program, "--with-ft", "ulfm", "-n", ranks, sys.executable, "-m", "mpi4py", *arguments]
        return subprocess.run(
            [str(part) for part in command], env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    return run
