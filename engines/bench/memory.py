"""Peak memory of a training step: of each rank, and of one process with the whole image.

Read from the kernel's figures for the process (Linux), after everything is imported and traced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from engines.bench.subprocess_call import run_in_subprocess
from engines.bench.verify import make_batches
from engines.comm.device import choose_device, has_own_memory, measure_device_peak, read_process_bytes, trim_memory
from engines.comm.world import World
from engines.oracle import ReferenceTraining
from engines.training import RankTraining, Recipe

__all__ = ["STEPS", "bench_memory", "measure_host_peak_bytes", "measure_one_process", "measure_peak_bytes"]

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
    from engines import options

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
