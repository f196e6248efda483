"""How much of the gradients' sums over ranks hides behind backward: the same training with and without overlap."""

from __future__ import annotations

import statistics
import time

from engines.bench.verify import batches
from engines.comm.link import LinkedWorld
from engines.comm.world import World
from engines.program.instructions import SumGradients
from engines.training import RankTraining, Recipe

__all__ = ["bench_overlap"]


_BYTES_PER_MBIT = 1e6 / 8


def bench_overlap(
    world: World, recipe: Recipe, iterations: int, seed: int, link_mbit_per_s: int | None = None
) -> dict[str, object]:
    """Medians over interleaved steps, after one of each to warm up; the same line on every rank.

    `blocking_s` is what the sums take where each begins when backward is over; `exposed_s` where they begin as soon as
    they can, in instructions of their own and between others. Both are means over ranks, and `hidden` is the
    difference as a part of the former. `buckets` are the messages of rank 0.

    Between ranks on one machine a message is copying, by the cores that compute, and there is little to hide.
    `link_mbit_per_s` lets messages take the time of a link between machines besides.
    """
    world = LinkedWorld(world, link_mbit_per_s * _BYTES_PER_MBIT) if link_mbit_per_s else world
    both = [RankTraining(world, recipe, overlap=overlap) for overlap in (False, True)]
    own = both[0].cut(batches(recipe, seed, steps=1)[0])
    sums: list[list[float]] = [[], []]
    steps: list[list[float]] = [[], []]
    for _ in range(iterations + 1):
        for index, training in enumerate(both):
            world.rest()
            start_s = time.perf_counter()
            training.step(own)
            world.rest()
            steps[index].append(time.perf_counter() - start_s)
            sums[index].append(statistics.mean(world.gather(_in_sums(training))))
    blocking, exposed = (statistics.median(seconds[1:]) for seconds in sums)
    return {
        "blocking_s": round(blocking, 5),
        "exposed_s": round(exposed, 5),
        "link_mbit_per_s": link_mbit_per_s,
        "hidden": round(1 - exposed / blocking, 3) if blocking else None,
        "step_s": round(statistics.median(steps[1][1:]), 4),
        "step_blocking_s": round(statistics.median(steps[0][1:]), 4),
        "buckets": len(_names(both[1])),
        "bytes": sum(item.bytes for item in both[1].program.of_kind(SumGradients)) // 2,
    }


def _names(training: RankTraining) -> set[str]:
    return {item.name for item in training.program.of_kind(SumGradients)}


def _in_sums(training: RankTraining) -> float:
    """Seconds of the last step that summing gradients took: to pack, start, help along, wait and unpack."""
    names = _names(training)
    return training.worker.helping_s + sum(
        event.end_s - event.start_s for event in training.worker.events if event.name in names
    )
