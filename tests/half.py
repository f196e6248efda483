"""`python -m tests.half`: ResNet-20 learns from a real picture in bfloat16 and in float32; do they end alike?

Prints one line of JSON: the mean loss over the last pass through the crops for each seed, and whether the mean of
bfloat16 lies among the runs of float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.images.sample_data import StainCrops, immunohistochemistry
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining

PRECISIONS = ("float32", "bfloat16")
Batch = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train from each seed in each precision, on 2 x 2 tiles."""
    flags = argparse.ArgumentParser(description="Train in bfloat16 and in float32, and compare where they end.")
    for name, default in {"seeds": 5, "steps": 40, "crops": 32, "crop-px": 64, "batch-size": 8}.items():
        flags.add_argument(f"--{name}", type=int, default=default)
    chosen = flags.parse_args(arguments)
    crops = StainCrops(immunohistochemistry(), chosen.crop_px, chosen.crops, seed=0)
    batches = list(crops.iterate_batches(chosen.batch_size))
    found = {
        precision: [_compute_final_loss(precision, seed, batches, chosen.steps) for seed in range(chosen.seeds)]
        for precision in PRECISIONS
    }
    usual, mean = found["float32"], statistics.fmean(found["bfloat16"])
    print(json.dumps({"steps": chosen.steps, **found, "within_spread": min(usual) <= mean <= max(usual)}), flush=True)


def _compute_final_loss(precision: str, seed: int, batches: Sequence[Batch], steps: int) -> float:
    torch.manual_seed(seed)
    plan = Plan(split_size=1, slice_method="2x2", precision=precision)
    shape, adam = tuple(batches[0][0].shape), partial(torch.optim.Adam, lr=1e-3)
    recipe = prepare(resnet20_v1(num_classes=2), plan, shape, optimiser=adam, device="cpu")
    losses, *_ = run_ranks(plan.ranks, lambda world: _compute_losses(world, recipe, batches, steps))
    return round(statistics.fmean(losses[-len(batches) :]), 5)


def _compute_losses(world: LoopbackWorld, recipe: Recipe, batches: Sequence[Batch], steps: int) -> list[float]:
    training, losses = RankTraining(world, recipe), []
    for step in range(steps):
        images, labels = batches[step % len(batches)]
        training.step(training.cut({"images": images, "labels": labels}))
        losses.append(training.worker.loss or float("nan"))
    return losses


if __name__ == "__main__":
    main()
