"""`bench memory`: the peak memory of a training step on each rank, and in one process with the whole image."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from mpi4dl_nb.engines.bench.measure import KEPT_BYTES, STEPS, measure_steps, run_in_subprocess
from mpi4dl_nb.engines.bench.memory_limit import limit_memory, make_limit_parser
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.device import choose_device, keep_memory_tight, trim_memory
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

_make_parser = partial(
    make_limit_parser, "Measure the peak memory of a training step on each rank, and in one process.", None
)


def run_bench_memory(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench memory`."""
    chosen = _make_parser().parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    return bench_memory(world, recipe, arguments, chosen.seed, chosen.memory_mb and chosen.memory_mb << 20)


def bench_memory(
    world: World, recipe: Recipe, arguments: Sequence[str], seed: int, limit_bytes: int | None = None
) -> dict[str, object]:
    """Return bytes beyond the memory before the steps: `peak_bytes` of each rank, in rank order, and of one process.

    What a process keeps of any training does not count, such as the code of kernels: one step runs before. Large blocks
    return to the system when they are freed (see `keep_memory_tight`), on the ranks as in one process.

    `share` is the largest peak of a rank relative to that of one process; `even_share` that of a rank that holds one
    tile's part of everything. With a limit, ranks train within it: `needs` says how many times as much one process
    takes. Raises RankError if it is too little.
    """
    peaks = world.all_gather(_measure_rank(world, recipe, seed, limit_bytes))
    trim_memory()  # make room for the one process with the whole image
    world.barrier()
    measure = partial(run_in_subprocess, "mpi4dl_nb.engines.bench.memory:measure_one_process", arguments)
    whole = world.all_gather(measure() if world.rank == 0 else None)[0]
    line: dict[str, object] = {
        "peak_bytes": peaks,
        "one_process_peak_bytes": whole,
        "share": round(max(peaks) / whole, 4),
        "even_share": round(1 / recipe.plan.grids[0].tiles, 4),
    }
    return line | ({"memory_bytes": limit_bytes, "needs": round(whole / limit_bytes, 2)} if limit_bytes else {})


def _measure_rank(world: World, recipe: Recipe, seed: int, limit_bytes: int | None) -> int:
    cut = RankTraining(world, recipe).cut(make_batches(recipe, seed, steps=1)[0])
    # Copies of this rank's parts: views would keep the whole batches alive, and count them as the rank's memory.
    inputs = {micro_batch: {name: part.clone() for name, part in parts.items()} for micro_batch, parts in cut.items()}
    del cut

    def begin() -> Callable[[], object]:
        return partial(RankTraining(world, recipe).step, inputs)

    device = choose_device(recipe.device, world.rank)
    try:
        return _measure_peak(device, begin, limit_bytes)
    except (RuntimeError, MemoryError) as error:
        if limit_bytes is None:
            raise
        raise RankError(
            f"{limit_bytes >> 20} MB are too little for rank {world.rank} ({error}). "
            "Use more tiles, offload activations, or allow more memory."
        ) from error


def measure_one_process(arguments: Sequence[str]) -> None:
    """Measure one process with the plain model; print its peak in bytes as JSON."""
    chosen = _make_parser().parse_args(list(arguments))
    model, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks)
    batch = make_batches(recipe, chosen.seed, steps=1)[0]
    device = choose_device(recipe.device, rank=0)

    def begin() -> Callable[[], object]:
        return partial(ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe).step, batch)

    print(json.dumps(_measure_peak(device, begin)), flush=True)


def _measure_peak(
    device: torch.device, begin: Callable[[], Callable[[], object]], limit_bytes: int | None = None
) -> int:
    keep_memory_tight(True, KEPT_BYTES)
    try:
        begin()()
        trim_memory()
        with limit_memory(device, limit_bytes) if limit_bytes else nullcontext():
            return measure_steps(device, begin, STEPS)[0]
    finally:
        keep_memory_tight(False)
