"""How much traffic hides behind computing, gradients' sums or halos: the same training without and with overlap."""

from __future__ import annotations

import statistics
from dataclasses import replace

from engines.bench.time_interleaved import time_interleaved
from engines.bench.verify import make_batches
from engines.comm.throttled import ThrottledWorld
from engines.comm.world import World
from engines.program.instructions import Exchange, ExchangeHalf, SumGradients
from engines.program.traffic import Traffic, count_traffic
from engines.training import RankTraining, Recipe

__all__ = ["bench_overlap"]


_BYTES_PER_MBIT = 1e6 / 8


def bench_overlap(
    world: World, recipe: Recipe, iterations: int, seed: int, link_mbit_per_s: int | None = None, halos: bool = False
) -> dict[str, object]:
    """Medians over interleaved steps, after one of each to warm up; the same line on every rank.

    Of sums, `blocking_s` is what they take where each begins when backward is over; `exposed_s` where they begin as
    soon as they can, in instructions of their own and between others. `halos`: of a step's halos, there and back,
    what they take where each is waited for at once, and what is left in their instructions where tiles' interiors are
    computed meanwhile (`overlap_halos`). Both are means over ranks, and `hidden` is the difference as a part of the
    former; it holds waiting for a rank that comes later, too. `messages` and `bytes` are what rank 0 sends of halos,
    of which exchanges it has some in halves (`split`) and some not (`whole`); `buckets` are its messages of sums.

    Between ranks on one machine a message is copying, by the cores that compute, and there is little to hide.
    `link_mbit_per_s` lets messages take the time of a link between machines besides.
    """
    world = ThrottledWorld(world, link_mbit_per_s * _BYTES_PER_MBIT) if link_mbit_per_s else world
    both = [_make_training(world, recipe, overlap, halos) for overlap in (False, True)]
    in_traffic = _sum_halo_seconds if halos else _sum_reduce_seconds
    own = both[0].cut(make_batches(recipe, seed, steps=1)[0])
    sums: list[list[float]] = [[], []]

    def record_traffic(number: int) -> None:
        sums[number].append(statistics.mean(world.all_gather(in_traffic(both[number]))))

    steps = time_interleaved(world, both, own, iterations + 1, record_traffic)
    blocking, exposed = (statistics.median(seconds[1:]) for seconds in sums)
    return {
        "blocking_s": round(blocking, 5),
        "exposed_s": round(exposed, 5),
        "link_mbit_per_s": link_mbit_per_s,
        "hidden": round(1 - exposed / blocking, 3) if blocking else None,
        "step_s": round(statistics.median(steps[1][1:]), 4),
        "step_blocking_s": round(statistics.median(steps[0][1:]), 4),
        **(_count_halos(both[1]) if halos else _count_buckets(both[1])),
    }


def _make_training(world: World, recipe: Recipe, overlap: bool, halos: bool) -> RankTraining:
    if not halos:
        return RankTraining(world, recipe, overlap=overlap)
    return RankTraining(world, replace(recipe, plan=replace(recipe.plan, overlap_halos=overlap)))


def _count_buckets(training: RankTraining) -> dict[str, int]:
    sums = list(training.program.select_instructions(SumGradients))
    return {"buckets": len({item.name for item in sums}), "bytes": sum(item.bytes for item in sums) // 2}


def _count_halos(training: RankTraining) -> dict[str, int]:
    """What a step's halos are, and how many exchanges were split for a rank to compute meanwhile."""
    sent = count_traffic(training.program).get("halo", Traffic(0, 0))
    halves = sum(isinstance(item, ExchangeHalf) for item in training.program.forward)
    whole = sum(isinstance(item, Exchange) and item.purpose == "halo" for item in training.program.forward)
    return {"messages": sent.messages, "bytes": sent.bytes, "split": halves // 2, "whole": whole}


def _sum_halo_seconds(training: RankTraining) -> float:
    """Seconds of the last step in instructions that move halos: to pack, post, wait and unpack."""
    return sum(event.end_s - event.start_s for event in training.worker.events if event.kind == "halo")


def _collect_sum_names(training: RankTraining) -> set[str]:
    return {item.name for item in training.program.select_instructions(SumGradients)}


def _sum_reduce_seconds(training: RankTraining) -> float:
    """Seconds of the last step that summing gradients took: to pack, start, help along, wait and unpack."""
    names = _collect_sum_names(training)
    return training.worker.helping_s + sum(
        event.end_s - event.start_s for event in training.worker.events if event.name in names
    )
