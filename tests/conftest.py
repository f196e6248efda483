"""What several test files share: how to start ranks, and pages of a browser."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import settings

# pytest finds fixtures and hooks here by their names.
from tests.browser.pages import chromium, lab, notebook  # noqa: F401
from tests.images.saved_files import files  # noqa: F401
from tests.mpi import make_mpi_command, make_mpi_environment, run_launcher
from tests.sampling import pytest_collection_modifyitems  # noqa: F401
from tests.train.stored import recipe, stored  # noqa: F401

settings.register_profile("without time limits", deadline=None)  # a busy machine is no fault
settings.load_profile("without time limits")


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpiexec(ranks, *arguments)` runs `python -m mpi4py *arguments` on that many ranks."""
    environment = make_mpi_environment()
    return lambda ranks, *arguments: run_launcher(make_mpi_command(ranks, *arguments), environment)


@pytest.fixture(scope="session", autouse=True)
def _calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """This machine is measured by these tests, once for as many ranks, and not by an earlier notebook."""
    os.environ["MPI4DL_NB_MACHINES"] = str(tmp_path_factory.mktemp("machines"))


@pytest.fixture(scope="session", autouse=True)
def _heeds_interrupts() -> None:
    """A shell that starts the tests in the background has them, and all that they start, ignore interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
