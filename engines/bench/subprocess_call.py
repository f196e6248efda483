"""Run a function in a process of its own without MPI; the last line that it prints is its result as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from engines.errors import RankError
from engines.supervisor import set_parent_death_signal

__all__ = ["SubprocessExitError", "run_in_subprocess"]


class SubprocessExitError(RankError):
    """The process failed with exit status `code`, negative if a signal ended it."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run_in_subprocess(function: str, arguments: Sequence[str], threads: int | None = None) -> Any:
    """Call `PACKAGE.MODULE:FUNCTION` with a list of strings in a new process and return its result.

    `threads` is the number of threads of torch (None: unchanged). The process ends when this one does. Raises
    SubprocessExitError if it fails.
    """
    # A child that inherits a rank's variables would take itself for that rank, and wait for the others.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    environment |= {"THP_MEM_ALLOC_ENABLE": "1"}  # huge pages make fresh memory cheap
    environment |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    module, _, name = function.partition(":")
    code = f"import sys; from {module} import {name}; {name}(sys.argv[1:])"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, preexec_fn=set_parent_death_signal
    )
    if done.returncode:
        raise SubprocessExitError(
            f"{name} in a process of its own ended with code {done.returncode}: {done.stderr[-300:]}", done.returncode
        )
    return json.loads(done.stdout.splitlines()[-1])
