"""Jobs in processes of their own, forked for each job: one that fails or hangs harms no other."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from mpi4dl_nb.engines.comm.supervisor import end_with_parent
from tests.peers.jobs import Arrays, Job, find_job
from tests.peers.outcome import CUT_OFF, Outcome

LIMIT_S = 60.0
"""How long a job may take."""

Compute = Callable[[Job, int, Path], Iterable[Arrays]]


def run_forked(names: list[str], processes: int, compute: Compute, limit_s: float = LIMIT_S) -> Iterator[Outcome]:
    """Do each job by `compute(job, rank, folder)` in as many processes; what the first one yields are the results.

    Of a job that fails, those count that were there before. The folder is empty at first, and the job's own. Libraries
    are imported before, so that a job begins at once; they must not have started threads.
    """
    context = multiprocessing.get_context("fork")
    for name in names:
        with tempfile.TemporaryDirectory() as path:
            folder, job = Path(path), find_job(name)
            ranks: list[BaseProcess] = [
                context.Process(target=_write_results, args=(compute, job, rank, folder, os.getpid()), daemon=True)
                for rank in range(processes)
            ]
            reason = _wait(ranks, limit_s)
            yield Outcome(name, _read_results(folder), _read_error(folder) or reason)


def _write_results(compute: Compute, job: Job, rank: int, folder: Path, parent: int) -> None:
    end_with_parent(parent)  # which is killed if it takes too long
    try:
        for number, results in enumerate(compute(job, rank, folder)):
            if rank == 0:
                np.savez(folder / f"{number}.npz", **results)  # type: ignore[arg-type]
    except Exception as error:
        (folder / f"error {rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise SystemExit(1) from error


def _wait(ranks: list[BaseProcess], limit_s: float) -> str:
    """Let the processes work until all have ended, one has failed, or it is too late; return what went wrong."""
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + limit_s
    # The others would wait for one that has failed.
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(codes):
        return f"its processes ended with codes {codes}"
    return f"{CUT_OFF} after {limit_s:g} s" if None in codes else ""


def _read_results(folder: Path) -> Arrays:
    results: Arrays = {}
    for path in sorted(folder.glob("*.npz")):
        with suppress(ValueError, OSError, BadZipFile), np.load(path) as file:  # one may have been killed as it wrote
            results |= dict(file)
    return results


def _read_error(folder: Path) -> str:
    return next((path.read_text(encoding="utf-8") for path in sorted(folder.glob("error *"))), "")
