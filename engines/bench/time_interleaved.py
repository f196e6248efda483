"""Time several trainings with interleaved steps, so that a temporary slowdown of the machine affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.program.worker import Inputs
from engines.training import RankTraining

__all__ = ["time_interleaved"]


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
