"""Run a plan on the ranks and the plain model in one process, and say how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from engines.comm.world import World
from engines.layer.graph import TensorSpec
from engines.loss.classes import classes_drawn
from engines.oracle import Record, compare, one_process, plain
from engines.program.worker import Inputs
from engines.training import Loss, RankTraining, Recipe

__all__ = ["TIMES", "TOLERANCE", "batches", "comparable", "rank_record", "verdict", "verify"]

STEPS = 3

TOLERANCE = {"float64": 1e-10, "float32": 1e-3}
"""Relative errors against one process in float64; a single ReLU on the other side of zero may cost that of float32."""

TIMES = 4
"""Beyond that, ranks may be so many times as far from one process in float64 as one process in their precision is."""


def batches(recipe: Recipe, seed: int, steps: int = STEPS, classes: int | None = None) -> list[dict[str, Tensor]]:
    """Whole random batches, the same for a seed on every rank."""
    random = torch.Generator().manual_seed(seed)
    classes = classes or classes_drawn(recipe.graph)
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


def comparable(recipe: Recipe) -> Recipe:
    """The recipe with a loss scale so small that float16 skips no step."""
    return replace(recipe, loss_scale=2.0**8)


def verify(world: World, recipe: Recipe, model: nn.Module, loss: Loss, seed: int) -> dict[str, object]:
    """Three optimiser steps on random images, ranks against one process; the same answer on every rank."""
    start_s, recipe = time.perf_counter(), comparable(recipe)
    whole = batches(recipe, seed)
    training = RankTraining(world, recipe)
    records = world.collect(rank_record(training, map(training.cut, whole)))
    answer = None
    if world.rank == 0:
        answer = verdict(recipe, model, loss, whole, records)
        answer["seconds"] = round(time.perf_counter() - start_s, 2)
    return world.gather(answer)[0]  # type: ignore[no-any-return]


def verdict(
    recipe: Recipe, model: nn.Module, loss: Loss, whole: Sequence[Mapping[str, Tensor]], records: Sequence[Record]
) -> dict[str, object]:
    """How far the ranks' records of the batches `whole` are from one process in float64, as a line of JSON.

    `ok` where every error is within the precision's TOLERANCE, or TIMES that of `one_process` in the same precision.
    """

    def alone(dtype: torch.dtype) -> Record:
        count = recipe.plan.micro_batches
        return one_process(
            model, loss, recipe.optimiser, whole, dtype, recipe.draws, count, recipe.rules, recipe.has_whole_loss
        )

    oracle, precision = alone(torch.float64), recipe.plan.precision
    found = compare(oracle, records)
    line = {
        "ok": found.worst <= TOLERANCE.get(precision, 0.0),
        "ranks": len(records),
        **asdict(found),
        "dtype": precision,
    }
    if precision != "float64":
        same = alone(getattr(torch, precision))
        usual = compare(oracle, [same.like(record) for record in records])
        line |= {"ok": line["ok"] or found.is_within(TIMES, usual), "one_process": asdict(usual)}
    return line
