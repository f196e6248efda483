"""Benchmark compiled segments: the same training in eager mode and with `compile_segments`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.program.worker import Inputs
from engines.train.training import RankTraining, Recipe
from engines.train.verify import make_batches

__all__ = ["bench_compiled", "time_interleaved"]

# Time several trainings with interleaved steps, so that a temporary slowdown of the machine affects all of them.


def time_interleaved(
    world: World,
    trainings: Sequence[RankTraining],
    own: Inputs,
    times: int,
    after: Callable[[int], object] = lambda number: None,
) -> list[list[float]]:
    """Return the seconds of each step of each training, measured until all ranks have completed it.

    `after` is called after each step with the number of its training.
    """
    seconds: list[list[float]] = [[] for _ in trainings]
    for _ in range(times):
        for number, training in enumerate(trainings):
            world.barrier()
            start_s = time.perf_counter()
            training.step(own)
            wait_for_device(training.device)
            # The step ends when the last rank is done: a rank that only sends early has not finished the step.
            world.barrier()
            seconds[number].append(time.perf_counter() - start_s)
            after(number)
    return seconds


def bench_compiled(world: World, recipe: Recipe, iterations: int, seed: int) -> dict[str, object]:
    """Return medians over interleaved steps; the same line on every rank.

    `ratio` is the speed-up by compiled segments. `first_s` is the duration in seconds of the first compiled step, which
    compiles, or loads from disk what an earlier process has compiled. `spread` is (largest - smallest) / median of the
    durations of compiled steps.
    """
    both = [
        RankTraining(world, replace(recipe, plan=replace(recipe.plan, compile_segments=compiles)))
        for compiles in (False, True)
    ]
    own = both[0].cut(make_batches(recipe, seed, steps=1)[0])
    plain, compiled = time_interleaved(world, both, own, iterations + 1)
    plain_s, compiled_s = (statistics.median(seconds[1:]) for seconds in (plain, compiled))
    return {
        "step_s": round(plain_s, 5),
        "compiled_step_s": round(compiled_s, 5),
        "first_s": round(compiled[0], 2),
        "ratio": round(plain_s / compiled_s, 3),
        "spread": round((max(compiled[1:]) - min(compiled[1:])) / compiled_s, 3),
    }
