"""Seconds per training step: the plan on its ranks against the plain model in one process with all cores."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from engines.bench.verify import batches
from engines.comm.world import World
from engines.training import RankTraining, Recipe

__all__ = ["OneProcess", "bench_step"]


class OneProcess:
    """The plain model, trained as anyone would in one process."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = copy.deepcopy(model).to(getattr(torch, recipe.plan.precision))
        self.loss = nn.CrossEntropyLoss()
        self.optimiser = recipe.optimiser(self.model.parameters())

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """One training step; the loss."""
        self.optimiser.zero_grad()
        loss = self.loss(self.model(batch["images"]), batch["labels"])
        loss.backward()
        self.optimiser.step()
        return float(loss.item())


def bench_step(world: World, recipe: Recipe, model: nn.Module, iterations: int, seed: int) -> dict[str, object]:
    """Medians over `iterations` interleaved steps, after one of each to warm up; the same line on every rank.

    `spread` is (largest - smallest) / median of the ranks' seconds per step.
    """
    training = RankTraining(world, recipe)
    batch = batches(recipe, seed, steps=1)[0]
    own = training.cut(batch)
    alone = OneProcess(model, recipe) if world.rank == 0 else None
    cores = os.cpu_count() or 1
    ranks_s, alone_s = [], []
    for _ in range(iterations + 1):
        world.rest()
        ranks_s.append(_seconds(lambda: (training.step(own), world.rest())))
        if alone:
            torch.set_num_threads(cores)
            alone_s.append(_seconds(lambda: alone.step(batch)))
        world.rest()
    images, answer = recipe.graph.inputs["images"].shape[0], None
    if alone:
        answer = _line(ranks_s[1:], alone_s[1:], images, cores)
    return world.gather(answer)[0]  # type: ignore[no-any-return]


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _line(ranks_s: list[float], alone_s: list[float], images: int, cores: int) -> dict[str, object]:
    ours, theirs = statistics.median(ranks_s), statistics.median(alone_s)
    return {
        "images_per_s": round(images / ours, 4),
        "one_process_images_per_s": round(images / theirs, 4),
        "ratio": round(theirs / ours, 3),
        "spread": round((max(ranks_s) - min(ranks_s)) / ours, 3),
        "threads": cores,
    }
