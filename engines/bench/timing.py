"""Timing of what is compared: everything takes turns, so that a slow phase of the machine hits all of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

import torch

from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.program.worker import Inputs
from engines.train.training import RankTraining

if TYPE_CHECKING:  # mpi4py starts MPI when it is imported
    from engines.comm.mpi import MpiWorld

__all__ = ["compute_quartile_spread", "compute_spread", "time_interleaved", "time_rank_step", "time_shuffled"]


def time_rank_step(world: World, training: RankTraining, own: Inputs) -> float:
    """Return the seconds from a barrier until all ranks have completed a step."""
    world.barrier()
    start_s = time.perf_counter()
    training.step(own)
    wait_for_device(training.device)
    # The step ends when the last rank is done: a rank that only sends early has not finished the step.
    world.barrier()
    return time.perf_counter() - start_s


def time_interleaved(
    world: World,
    trainings: Sequence[RankTraining],
    own: Inputs,
    times: int,
    after: Callable[[int], object] = lambda number: None,
) -> list[list[float]]:
    """Return the seconds of each step of each training. `after` is called after each with its training's number."""
    seconds: list[list[float]] = [[] for _ in trainings]
    for _ in range(times):
        for number, training in enumerate(trainings):
            seconds[number].append(time_rank_step(world, training, own))
            after(number)
    return seconds


def time_shuffled(
    world: MpiWorld,
    works: Mapping[str, Callable[[], Callable[[], object]]],
    iterations: int,
    warmup: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Return this rank's seconds of each of the `works` by name, each between two barriers.

    A work prepares a run, which is not timed, and returns the function to be timed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for index in range(warmup + iterations):
        # A changing order, as the predecessor determines the state of the caches. The seed is the number of the
        # iteration, so that all ranks take the same order: each work is collective.
        for name in Random(index).sample(sorted(works), len(works)):
            work = works[name]()
            world.comm.Barrier()
            wait_for_device(device)
            start_s = time.perf_counter()
            work()
            wait_for_device(device)
            times[name].append(time.perf_counter() - start_s)
            world.comm.Barrier()  # what a finished rank does next must not take cores from the others
    return {name: seconds[warmup:] for name, seconds in times.items()}


def compute_spread(seconds: Sequence[float]) -> float:
    """Return (largest - smallest) / median.

    >>> compute_spread([1.0, 2.0, 4.0])
    1.5
    """
    median_s = statistics.median(seconds)
    return round((max(seconds) - min(seconds)) / median_s, 3) if median_s else 0.0


def compute_quartile_spread(seconds: Sequence[float]) -> float:
    """Return the interquartile range, divided by the median; 0 of a single value."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return round((high - low) / middle, 3)
