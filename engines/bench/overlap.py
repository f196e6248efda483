"""Communication hidden behind computation, all-reduces or halos: the same training without and with overlap."""

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
    """Return medians over interleaved steps, after one warm-up step each; the same line on every rank.

    For gradient all-reduces, `blocking_s` is their duration if each starts after the backward pass; `exposed_s` if they
    start as soon as possible: the time spent in their own instructions and in progressing them between others. `halos`:
    for a step's halos, forward and backward, the duration if each exchange blocks, and the time that remains in their
    instructions if tiles' interiors are computed meanwhile (`overlap_halos`). Both are means over ranks, and include
    waiting for a rank that is late. `hidden` is 1 - exposed_s / blocking_s. `messages` and `bytes` are what rank 0
    sends for halos; its exchanges are counted as split in halves (`split`) or not (`whole`). `buckets` is the number of
    its gradient buckets.

    Between ranks on one machine a message is a copy by the cores that compute, so that there is little to hide.
    `link_mbit_per_s` adds the transfer time of a link between machines.
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
    """Return the halo traffic of a step, and how many exchanges were split to overlap them with computation."""
    sent = count_traffic(training.program).get("halo", Traffic(0, 0))
    halves = sum(isinstance(item, ExchangeHalf) for item in training.program.forward)
    whole = sum(isinstance(item, Exchange) and item.purpose == "halo" for item in training.program.forward)
    return {"messages": sent.messages, "bytes": sent.bytes, "split": halves // 2, "whole": whole}


def _sum_halo_seconds(training: RankTraining) -> float:
    """Return the seconds of the last step in halo instructions: pack, post, wait and unpack."""
    return sum(event.end_s - event.start_s for event in training.worker.events if event.kind == "halo")


def _collect_sum_names(training: RankTraining) -> set[str]:
    return {item.name for item in training.program.select_instructions(SumGradients)}


def _sum_reduce_seconds(training: RankTraining) -> float:
    """Return the seconds of the last step in gradient all-reduces: pack, start, progress, wait and unpack."""
    names = _collect_sum_names(training)
    return training.worker.helping_s + sum(
        event.end_s - event.start_s for event in training.worker.events if event.name in names
    )
