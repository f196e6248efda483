"""Benchmark compiled segments: the same training in eager mode and with `compile_segments`."""

from __future__ import annotations

import statistics
from dataclasses import replace

from engines.bench.time_interleaved import time_interleaved
from engines.bench.verify import make_batches
from engines.comm.world import World
from engines.training import RankTraining, Recipe

__all__ = ["bench_compiled"]


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
