"""Images per second, printed in the format of common synthetic benchmarks.

One iteration is a number of steps on the same random images, from a barrier of all ranks until the last rank is done.
`+-` is 1.96 standard deviations over the iterations.
"""

from __future__ import annotations

import statistics
import time

from engines.bench.verify import make_batches
from engines.comm.device import has_own_memory
from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.program.worker import Inputs
from engines.training import RankTraining, Recipe

__all__ = ["bench_throughput"]


def bench_throughput(
    world: World, recipe: Recipe, model: str, warmup: int, iterations: int, steps: int, seed: int
) -> dict[str, object]:
    """Print results as they arrive; return images per second per device and in total, the same on every rank."""
    training = RankTraining(world, recipe)
    device = "GPU" if has_own_memory(training.device) else "CPU"
    whole = make_batches(recipe, seed, steps=1)[0]
    images, own = len(whole["images"]), training.cut(whole)
    _print_lines(
        f"Model: {model}", f"Batch size: {images // recipe.plan.batches}", f"Number of {device}s: {world.size}"
    )
    _print_lines("Running warmup...")
    for _ in range(warmup):
        training.step(own)
    _print_lines("Running benchmark...")
    each = []
    for index in range(iterations):
        each.append(images * steps / _time_steps(world, training, own, steps) / world.size)
        _print_lines(f"Iter #{index}: {each[-1]:.1f} img/sec per {device}")
    mean, around = statistics.fmean(each), 1.96 * statistics.pstdev(each)
    _print_lines(f"Img/sec per {device}: {mean:.1f} +-{around:.1f}")
    _print_lines(f"Total img/sec on {world.size} {device}(s): {mean * world.size:.1f} +-{around * world.size:.1f}")
    return {
        "model": model,
        "device": device,
        "ranks": world.size,
        "images_per_step": images,
        "images_per_s_each": round(mean, 4),
        "images_per_s_total": round(mean * world.size, 4),
        "spread": round(around / mean, 4),
        "iterations": [round(speed, 4) for speed in each],
    }


def _time_steps(world: World, training: RankTraining, own: Inputs, steps: int) -> float:
    """Return the seconds of `steps` steps on the slowest rank."""
    world.barrier()
    start_s = time.perf_counter()
    for _ in range(steps):
        training.step(own)
    wait_for_device(training.device)
    return max(world.all_gather(time.perf_counter() - start_s))  # type: ignore[no-any-return]


def _print_lines(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
