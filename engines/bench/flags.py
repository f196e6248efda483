"""Flags of the throughput and all-reduce benchmarks."""

from __future__ import annotations

import argparse

from engines import options
from engines.comm.world import World
from engines.training import Recipe

__all__ = ["make_allreduce_parser", "make_throughput_parser", "make_throughput_recipe"]


def make_throughput_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench throughput`, with the flag names of common synthetic benchmarks."""
    flags = options.make_parser("Time training steps on random images, each rank a replica of the whole model.")
    flags.set_defaults(
        model="resnet50", image_size="224", num_classes=1000, batch_size=32, split_size=1, spatial_size=0
    )
    flags.set_defaults(data_parallel=None)
    flags.add_argument("--warmup", type=options.parse_positive, default=10, help="steps before anything is timed")
    flags.add_argument("--num-iters", type=options.parse_positive, default=10)
    flags.add_argument("--num-batches-per-iter", type=options.parse_positive, default=10)
    return flags


def make_throughput_recipe(chosen: argparse.Namespace, ranks: int, world: World | None = None) -> Recipe:
    """Return the recipe, with as many replicas as the ranks allow unless the flags set it. Raises PlanError."""
    if chosen.data_parallel is None:
        chosen.data_parallel = 1
        chosen.data_parallel = max(1, ranks // options.make_plan(chosen).ranks)
    return options.make_recipe(chosen, ranks, world)[1]


def make_allreduce_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench allreduce`."""
    flags = options.FlagParser(
        description="Time sums over all ranks against raw MPI_Allreduce and gloo.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    flags.add_argument(
        "--max-bytes", type=options.parse_positive, default=1 << 28, help="the largest sum; each 4 x the last"
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=30)
    return flags
