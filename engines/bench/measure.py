"""Time and peak memory of what is compared.

Timed works take turns, so that a slow phase of the machine hits all of them. Memory is read from the kernel's figures
for the process (Linux), after everything is imported and traced.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from mpi4dl_nb.engines.comm.device import has_own_memory, measure_device_peak, read_process_bytes
from mpi4dl_nb.engines.comm.streams import measure_seconds, wait_for_device
from mpi4dl_nb.engines.comm.supervisor import end_with_parent
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.train.training import RankTraining

if TYPE_CHECKING:  # mpi4py starts MPI when it is imported
    from mpi4dl_nb.engines.comm.mpi import MpiWorld


def time_rank_step(world: World, training: RankTraining, own: Inputs) -> float:
    """Return the seconds from a barrier until all ranks have completed a step."""
    world.barrier()
    start_s = time.perf_counter()
    training.step(own)
    wait_for_device(training.device)
    # The step ends when the last rank is done: a rank that only sends early has not finished the step.
    world.barrier()
    return time.perf_counter() - start_s


def time_interleaved(
    world: World,
    trainings: Sequence[RankTraining],
    own: Inputs,
    times: int,
    after: Callable[[int], object] = lambda index: None,
) -> list[list[float]]:
    """Return the seconds of each step of each training. `after` is called after each with its training's index."""
    seconds: list[list[float]] = [[] for _ in trainings]
    for _ in range(times):
        for index, training in enumerate(trainings):
            seconds[index].append(time_rank_step(world, training, own))
            after(index)
    return seconds


def time_shuffled(
    world: MpiWorld,
    works: Mapping[str, Callable[[], Callable[[], object]]],
    iterations: int,
    warmup: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Return this rank's seconds of each of the `works` by name, each between two barriers.

    A work prepares a run, which is not timed, and returns the function to be timed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(warmup + iterations):
        # A changing order, as the predecessor determines the state of the caches. The seed is the number of the
        # iteration, so that all ranks take the same order: each work is collective.
        for name in Random(index).sample(sorted(works), len(works)):
            work = works[name]()
            world.comm.Barrier()
            wait_for_device(device)
            times[name].append(measure_seconds(work, device))
            world.comm.Barrier()  # what a finished rank does next must not take cores from the others
    return {name: seconds[warmup:] for name, seconds in times.items()}


def compute_spread(seconds: Sequence[float]) -> float:
    """Return (largest - smallest) / median.

    >>> compute_spread([1.0, 2.0, 4.0])
    1.5
    """
    median_s = statistics.median(seconds)
    return round((max(seconds) - min(seconds)) / median_s, 3) if median_s else 0.0


def compute_quartile_spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range, divided by the median; 0 of a single value."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return round((high - low) / middle, 3)


# Run a function in a process of its own without MPI; the last line that it prints is its result as JSON.


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
        command,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    if done.returncode:
        raise SubprocessExitError(
            f"{name} in a process of its own ended with code {done.returncode}: {done.stderr[-300:]}", done.returncode
        )
    return json.loads(done.stdout.splitlines()[-1])


STEPS = 2  # gradients and the optimiser's state exist from the second step on
KEPT_BYTES = 4 << 20
"""Freed blocks below this size are better kept: most tensors of a tile are smaller, and fresh pages are slow."""


def measure_steps(
    device: torch.device, begin: Callable[[], Callable[[], object]], count: int
) -> tuple[int, list[float]]:
    """Return the peak bytes beyond those before, of the process or a device's own memory, and the seconds of each step.

    `begin` returns the function that trains a step. A training that it makes counts: its weights, gradients, optimiser.
    """
    seconds: list[float] = []

    def run_steps() -> None:
        step = begin()
        seconds.extend(measure_seconds(step, device) for _ in range(count))

    measure = partial(measure_device_peak, device) if has_own_memory(device) else measure_host_peak_bytes
    return measure(run_steps), seconds


def measure_host_peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak host memory in bytes while `work` runs, beyond that of the process before."""
    before = read_process_bytes("VmRSS")
    # The kernel keeps the peak since the process began, imports and tracing included, so that it must start anew.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM = VmRSS
    work()
    return read_process_bytes("VmHWM") - before
