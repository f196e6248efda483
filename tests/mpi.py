"""How tests start ranks: the command, and the environment that must be there before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_LOOK_S, _CHILDLESS, _LOOKS = 10.0, 3, 60
TRIES = 3


def has_begun(errors: str) -> bool:
    """Whether mpiexec could start its own listener: beside other starts it cannot, once in hundreds."""
    return "listener thread failed to start" not in errors


def make_mpi_command(ranks: int, *arguments: object) -> list[str]:
    """`python -m mpi4py *arguments` on that many ranks."""
    program = Path(sys.prefix, "bin", "mpiexec")
    return [
        str(each) for each in (program, "--with-ft", "ulfm", "-n", ranks, sys.executable, "-m", "mpi4py", *arguments)
    ]


def make_mpi_environment() -> dict[str, str]:
    """More ranks than cores, one thread each; the ranks can import `tests`."""
    found = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMP_NUM_THREADS": "1"}
    found |= {"GOMP_SPINCOUNT": "100000", "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONFAULTHANDLER": "1"}
    if os.geteuid() == 0:
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found


def run_launcher(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end. Once in thousands of runs prterun waits for itself when its ranks are gone (seen: its
    main thread in a mutex that nobody will unlock), or cannot start its own listener; then it is started again.

    Raises TimeoutError where ranks go on for ten minutes, with what each of them was doing.
    """
    for number in range(1, TRIES + 1):
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as launcher:
            try:
                done = _wait_for_end(launcher)
                if has_begun(done.stderr) or number == TRIES:
                    return done
            except _StuckError:
                continue
            finally:
                launcher.kill()
    raise TimeoutError(f"{' '.join(command)}: its ranks ended, and the launcher did not, {TRIES} times.")


class _StuckError(Exception):
    """The launcher has had no ranks for a while."""


def _wait_for_end(launcher: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    childless = 0
    for _ in range(_LOOKS):
        try:
            out, errors = launcher.communicate(timeout=_LOOK_S)
            return subprocess.CompletedProcess(launcher.args, launcher.returncode, out, errors)
        except subprocess.TimeoutExpired:
            childless = 0 if _list_ranks(launcher) else childless + 1
        if childless == _CHILDLESS:
            raise _StuckError
    raise TimeoutError(f"Its ranks went on for {_LOOKS * _LOOK_S:.0f} s. {_read_stacks(launcher)}")


def _list_ranks(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """Those that live: one that has ended is a zombie while the launcher does not ask."""
    children = psutil.Process(launcher.pid).children()
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


def _read_stacks(launcher: subprocess.Popen[str]) -> str:
    """Where the ranks are, which end by that."""
    for rank in _list_ranks(launcher):
        rank.send_signal(signal.SIGABRT)
    try:
        return "".join(launcher.communicate(timeout=_LOOK_S))
    except subprocess.TimeoutExpired:
        return "They do not tell where they are."
