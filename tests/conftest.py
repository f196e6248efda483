"""What several test files share: how to start ranks, and pages of a browser."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.browser.pages import chromium, lab, notebook
from tests.checkpoint.stored import recipe, stored
from tests.images.saved_files import files
from tests.mpi import mpi_command, mpi_environment, run_launcher

__all__ = ["chromium", "files", "lab", "mpiexec", "notebook", "recipe", "stored"]


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpiexec(ranks, *arguments)` runs `python -m mpi4py *arguments` on that many ranks."""
    environment = mpi_environment()
    return lambda ranks, *arguments: run_launcher(mpi_command(ranks, *arguments), environment)
