"""Images per second, printed in the format of common synthetic benchmarks.

One iteration is a number of steps on the same random images, from a barrier of all ranks until the last rank is done.
`+-` is 1.96 standard deviations over the iterations.
"""

from __future__ import annotations

import statistics
import time

from engines.comm.device import has_own_memory
from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.train.training import RankTraining, Recipe
from engines.train.verify import make_batches

__all__ = ["bench_throughput"]


def bench_throughput(
    world: World, recipe: Recipe, model: str, warmup: int, iterations: int, steps: int, seed: int
) -> dict[str, object]:
    """Print results as they arrive; return images per second per device and in total, the same on every rank."""
    training = RankTraining(world, recipe)
    device = "GPU" if has_own_memory(training.device) else "CPU"
    whole = make_batches(recipe, seed, steps=1)[0]
    images, own = len(whole["images"]), training.cut(whole)
    print(f"Model: {model}", f"Batch size: {images // recipe.plan.batches}", sep="\n", flush=True)
    print(f"Number of {device}s: {world.size}", "Running warmup...", sep="\n", flush=True)
    for _ in range(warmup):
        training.step(own)
    print("Running benchmark...", flush=True)
    each = []
    for index in range(iterations):
        world.barrier()
        start_s = time.perf_counter()
        for _ in range(steps):
            training.step(own)
        wait_for_device(training.device)
        slowest_s = max(world.all_gather(time.perf_counter() - start_s))
        each.append(images * steps / slowest_s / world.size)
        print(f"Iter #{index}: {each[-1]:.1f} img/sec per {device}", flush=True)
    # 1.96 standard deviations contain 95 % of the iterations if they are normally distributed.
    mean, around = statistics.fmean(each), 1.96 * statistics.pstdev(each)
    print(f"Img/sec per {device}: {mean:.1f} +-{around:.1f}", flush=True)
    total, around_total = mean * world.size, around * world.size
    print(f"Total img/sec on {world.size} {device}(s): {total:.1f} +-{around_total:.1f}", flush=True)
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
