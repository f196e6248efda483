"""Peak memory of a training step: of each rank, and of one process with the whole image.

Read from the kernel's figures for the process (Linux), after everything is imported and traced.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.comm.device import (
    choose_device,
    has_own_memory,
    limit_device_memory,
    measure_device_peak,
    read_process_bytes,
    trim_memory,
)
from engines.comm.supervisor import set_parent_death_signal
from engines.comm.world import World
from engines.errors import RankError
from engines.train.oracle import ReferenceTraining
from engines.train.training import RankTraining, Recipe
from engines.train.verify import make_batches

__all__ = [
    "KEPT_BYTES",
    "MIB",
    "STEPS",
    "SubprocessExitError",
    "bench_memory",
    "limit_memory",
    "measure_host_peak_bytes",
    "measure_one_process",
    "measure_peak_bytes",
    "run_in_subprocess",
]

# Enforce a memory limit, by the kernel or by a GPU's allocator.


MIB = 1 << 20
KEPT_BYTES = 4 * MIB
"""Freed blocks below this size are better kept: most tensors of a tile are smaller, and fresh pages are slow."""


@contextmanager
def limit_memory(device: torch.device, size_bytes: int) -> Iterator[None]:
    """Within the context, allocations beyond `size_bytes` fail.

    On the host the limit counts from the memory that the process has already (`RLIMIT_DATA`, Linux: mapped files do not
    count). On a GPU it covers everything, and it stays in force afterwards.
    """
    if has_own_memory(device):
        limit_device_memory(device, size_bytes)
        yield
        return
    # RLIMIT_DATA bounds private writable memory: heap and anonymous mappings, where tensors lie, but no libraries'
    # code.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_process_bytes("VmData") + size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


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
        command, env=environment, capture_output=True, text=True, check=False, preexec_fn=set_parent_death_signal
    )
    if done.returncode:
        raise SubprocessExitError(
            f"{name} in a process of its own ended with code {done.returncode}: {done.stderr[-300:]}", done.returncode
        )
    return json.loads(done.stdout.splitlines()[-1])


STEPS = 2  # gradients and the optimiser's state exist from the second step on


def bench_memory(world: World, recipe: Recipe, arguments: Sequence[str], seed: int) -> dict[str, object]:
    """Return bytes beyond the memory before the steps: `peak_bytes` of each rank, in rank order, and of one process.

    `share` is the largest peak of a rank relative to that of one process; `even_share` that of a rank that holds one
    tile's part of everything.
    """
    peaks = world.all_gather(_measure_rank(world, recipe, seed))
    trim_memory()  # make room for the one process with the whole image
    world.barrier()
    whole = world.all_gather(
        run_in_subprocess("engines.bench.memory:measure_one_process", arguments) if world.rank == 0 else None
    )[0]
    return {
        "peak_bytes": peaks,
        "one_process_peak_bytes": whole,
        "share": round(max(peaks) / whole, 4),
        "even_share": round(1 / recipe.plan.grids[0].tiles, 4),
    }


def _measure_rank(world: World, recipe: Recipe, seed: int) -> int:
    cut = RankTraining(world, recipe).cut(make_batches(recipe, seed, steps=1)[0])
    # Copies of this rank's parts: views would keep the whole batches alive, and count them as the rank's memory.
    own = {number: {name: part.clone() for name, part in parts.items()} for number, parts in cut.items()}
    del cut

    # The training is made inside, so that its weights, gradients and optimiser state count.
    def run_steps() -> None:
        training = RankTraining(world, recipe)
        for _ in range(STEPS):
            training.step(own)

    return measure_peak_bytes(choose_device(recipe.device, world.rank), run_steps)


def measure_one_process(arguments: Sequence[str]) -> None:
    """Measure one process with the plain model; print its peak in bytes as JSON."""
    from engines.cli import options

    chosen = options.make_parser("").parse_args(list(arguments))
    model, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks)
    batch = make_batches(recipe, chosen.seed, steps=1)[0]
    device = choose_device(recipe.device, rank=0)

    def train_plain() -> None:
        process = ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe)
        for _ in range(STEPS):
            process.step(batch)

    print(json.dumps(measure_peak_bytes(device, train_plain)), flush=True)


def measure_peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak bytes while `work` runs, beyond those before: of the process, or of a device's own memory."""
    return measure_device_peak(device, work) if has_own_memory(device) else measure_host_peak_bytes(work)


def measure_host_peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak host memory in bytes while `work` runs, beyond that of the process before."""
    before = read_process_bytes("VmRSS")
    # The kernel keeps the peak since the process began, imports and tracing included, so that it must start anew.
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM = VmRSS
    work()
    return read_process_bytes("VmHWM") - before
