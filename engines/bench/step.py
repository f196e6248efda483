"""Seconds per training step: the plan on its ranks against the plain model in one process with all cores, and against
the convolutions and products alone, which nobody can save.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from engines.bench.limit import arithmetic_share
from engines.bench.phases import phases, shares
from engines.bench.verify import batches
from engines.comm.container import cores
from engines.comm.device import give_memory_back
from engines.comm.streams import wait_for
from engines.comm.world import World
from engines.oracle import OneProcess
from engines.training import RankTraining, Recipe

__all__ = ["bench_step"]


def bench_step(
    world: World, recipe: Recipe, model: nn.Module, iterations: int, seed: int, in_turns: bool = False
) -> dict[str, object]:
    """Medians over `iterations` interleaved steps, after one of each to warm up; the same line on every rank.

    `in_turns`: memory that is free is given back after each step, so that ranks and process need not fit together; both
    then pay for fresh pages in every step. `spread` is (largest - smallest) / median of the ranks' seconds per step,
    `phases` where the time of all ranks went, `of_limit` how close they are to the kernels of convolutions and products
    alone, run as in one process with all cores: 1 is as fast.
    """
    training = RankTraining(world, recipe)
    batch = batches(recipe, seed, steps=1)[0]
    own = training.cut(batch)
    alone = OneProcess.of(model, nn.CrossEntropyLoss(), recipe) if world.rank == 0 else None
    threads = cores()
    ranks_s, alone_s, spent = [], [], Counter[str]()
    for number in range(iterations + 1):
        world.barrier()
        ranks_s.append(_seconds(lambda: (training.step(own), wait_for(training.device), world.barrier())))
        spent += phases(training.report.events if number else ())
        if in_turns:
            training.start({})  # the last step is let go of
            give_memory_back()
            world.barrier()
        if alone:
            torch.set_num_threads(threads)
            alone_s.append(_seconds(lambda: (alone.step(batch), wait_for(training.device))))
            if in_turns:
                give_memory_back()
        world.barrier()
    images, answer = recipe.step_specs["images"].shape[0], None
    if alone:
        torch.set_num_threads(threads)
        answer = _line(ranks_s[1:], alone_s[1:], images, threads, arithmetic_share(lambda: alone.step(batch)))
    line = world.all_gather(answer)[0]
    return {**line, "phases": shares(world.all_gather(spent))}


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _line(
    ranks_s: list[float], alone_s: list[float], images: int, threads: int, arithmetic: float
) -> dict[str, object]:
    ours, theirs = statistics.median(ranks_s), statistics.median(alone_s)
    return {
        "images_per_s": round(images / ours, 4),
        "one_process_images_per_s": round(images / theirs, 4),
        "ratio": round(theirs / ours, 3),
        "of_limit": round(arithmetic * theirs / ours, 3),
        "spread": round((max(ranks_s) - min(ranks_s)) / ours, 3),
        "threads": threads,
    }
