"""Run a plan on the ranks and the plain model in one process, and say how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict

import torch
from torch import Tensor, nn

from engines.comm.world import World
from engines.layer.graph import TensorSpec
from engines.oracle import Comparison, Record, compare, one_process, plain
from engines.program.worker import Inputs
from engines.training import Loss, RankTraining, Recipe

__all__ = ["TOLERANCE", "batches", "rank_record", "verdict", "verify"]

STEPS = 3
TOLERANCE = {"float64": 1e-10, "float32": 1e-3}


def batches(recipe: Recipe, seed: int, steps: int = STEPS, classes: int | None = None) -> list[dict[str, Tensor]]:
    """Whole random batches, the same for a seed on every rank."""
    random = torch.Generator().manual_seed(seed)
    graph = recipe.graph
    classes = classes or graph.specs[graph.prediction].shape[1]
    return [{name: _draw(spec, classes, random) for name, spec in recipe.step_specs.items()} for _ in range(steps)]


def _draw(spec: TensorSpec, classes: int, random: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.is_floating:
        return torch.randn(spec.shape, generator=random, dtype=torch.float64).to(dtype)
    return torch.randint(classes, spec.shape, generator=random, dtype=dtype)


def rank_record(training: RankTraining, parts: Iterable[Inputs]) -> Record:
    """Train on this rank's parts of some batches, and write down what was done."""
    losses, gradients = [], []
    for part in parts:
        report = training.step(part)
        losses.append(report.losses)
        gradients.append(plain(training.tensors()["gradients"]))
    final = training.tensors()
    return Record(tuple(losses), tuple(gradients), plain(final["weights"]), plain(final["buffers"]))


def verify(world: World, recipe: Recipe, model: nn.Module, loss: Loss, seed: int) -> dict[str, object]:
    """Three optimiser steps on random images, ranks against one process; the same answer on every rank."""
    start_s = time.perf_counter()
    whole = batches(recipe, seed)
    training = RankTraining(world, recipe)
    records = world.gather(rank_record(training, map(training.cut, whole)))
    answer = None
    if world.rank == 0:
        dtype, count = getattr(torch, recipe.plan.precision), recipe.plan.micro_batches
        oracle = one_process(model, loss, recipe.optimiser, whole, dtype, recipe.draws, count)
        answer = verdict(compare(oracle, records), recipe, world.size, time.perf_counter() - start_s)
    return world.gather(answer)[0]  # type: ignore[no-any-return]


def verdict(comparison: Comparison, recipe: Recipe, ranks: int, seconds: float) -> dict[str, object]:
    """The comparison as a line of JSON; ok where every error is within the precision's tolerance."""
    precision = recipe.plan.precision
    return {
        "ok": comparison.worst <= TOLERANCE[precision],
        "ranks": ranks,
        **asdict(comparison),
        "dtype": precision,
        "seconds": round(seconds, 2),
    }
