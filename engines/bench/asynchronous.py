"""Study asynchronous replicas on a small real task: losses, staleness, images per second."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.world import World, run_on_first
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.images.sample_data import StainCrops, immunohistochemistry
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.asynchrony import MODES, Asynchrony, ReplicaStudy
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.replica import Feed
from mpi4dl_nb.engines.train.train_replicas import train_replicas


def expand_modes(mode: str, **chosen: Any) -> list[Asynchrony]:
    """Return the studies for one mode, or for `all`, each with the options that apply to its mode. Raises PlanError."""
    if mode != "all":
        return [Asynchrony(mode=mode, **chosen)]
    only = {"max_staleness": "server", "staleness_aware": "server", "average_every": "peers"}
    return [
        Asynchrony(mode=kind, **{name: value for name, value in chosen.items() if only.get(name, kind) == kind})
        for kind in MODES
    ]


def make_crops_recipe(size_px: int = 32, batch_size: int = 8) -> Recipe:
    """Return a recipe for ResNet-20 v1 that classifies which crops of a stained tissue are browner than most."""
    torch.manual_seed(0)
    model, sgd = resnet20_v1(num_classes=2), partial(torch.optim.SGD, lr=0.005, momentum=0.9)
    return prepare(model, Plan(split_size=1, spatial_size=0), (batch_size, 3, size_px, size_px), optimiser=sgd)


def make_crops_feed(recipe: Recipe, count: int = 512) -> Feed:
    """Return a feed that cycles through batches of `count` crops of the tissue."""
    images = recipe.step_specs["images"]
    batch, _, height, width = images.shape
    if height != width:
        raise PlanError(f"The crops of this study are square, not {height} x {width} pixels. Use one --image-size.")
    crops = StainCrops(immunohistochemistry(), height, max(count, batch))
    # Cut once: a study measures waiting and staleness, which reading images in each step would blur.
    batches = list(crops.iterate_batches(batch))
    dtype = getattr(torch, images.dtype)

    def get_batch(number: int) -> Mapping[str, Tensor]:
        pixels, labels = batches[number % len(batches)]
        return {"images": pixels.to(dtype), "labels": labels}

    return get_batch


def bench_asynchronous(world: World, studies: Sequence[Asynchrony], recipe: Recipe | None = None) -> list[ReplicaStudy]:
    """Train once for each of the `studies`, from the same initial weights and on the same crops. Collective.

    Raises PlanError if there are too few ranks for one of them.
    """
    recipe = recipe or run_on_first(world, make_crops_recipe)
    for study in studies:
        study.check(recipe.plan, world.size)
    feed = make_crops_feed(recipe)
    return [train_replicas(world, recipe, study, feed) for study in studies]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    flags = options.make_parser("Train synchronous and asynchronous replicas, for study only.")
    flags.set_defaults(model="mpi4dl_nb:resnet20_v1", num_classes=2, image_size="32", batch_size=8)
    flags.set_defaults(learning_rate=0.005, split_size=1, spatial_size=0)
    flags.add_argument("--mode", choices=[*MODES, "all"], default="all")
    flags.add_argument("--replicas", type=options.parse_positive, default=3)
    flags.add_argument("--steps", type=options.parse_positive, default=30, help="batches of each replica, on average")
    flags.add_argument("--max-staleness", type=int, help="updates between reading weights and updating them, at most")
    flags.add_argument("--staleness-aware", action="store_true", help="divide the learning rate by the staleness")
    flags.add_argument(
        "--average-every", type=options.parse_positive, default=1, help="steps of a peer between its offers"
    )
    flags.add_argument(
        "--slow", type=_parse_slow, default={}, help="REPLICA:SECONDS[,...] that replicas sleep in each step"
    )
    return flags


def _parse_slow(text: str) -> dict[int, float]:
    """Parse `2:0.1,0:0.3` to {2: 0.1, 0: 0.3}."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(replica): float(seconds) for replica, seconds in pairs}
    except ValueError as error:
        message = f"{text!r} must be REPLICA:SECONDS, or several such as 2:0.1,0:0.3"
        raise argparse.ArgumentTypeError(message) from error


def parse_studies(chosen: argparse.Namespace, ranks: int) -> list[Asynchrony]:
    """Return the studies that the flags describe. Raises PlanError unless they need exactly `ranks` ranks."""
    names = ("replicas", "steps", "max_staleness", "staleness_aware", "average_every", "slow")
    studies = expand_modes(chosen.mode, **{name: getattr(chosen, name) for name in names})
    plan = options.make_plan(chosen)
    for study in studies:
        study.check(plan, ranks)
    if ranks > (needed := max(study.count_ranks(plan) for study in studies)):
        raise PlanError(f"mode={chosen.mode} needs {needed} ranks, but there are {ranks}. Start {needed} ranks.")
    return studies


def run_bench_asynchronous(world: World, arguments: Sequence[str]) -> list[dict[str, object]]:
    """Run `bench asynchronous`."""
    chosen = make_parser().parse_args(arguments)
    studies = parse_studies(chosen, world.size)
    _, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks, world)
    return [study.line for study in bench_asynchronous(world, studies, recipe)]
