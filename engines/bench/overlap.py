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
    if link_mbit_per_s:
        world = ThrottledWorld(world, link_mbit_per_s * (1e6 / 8))  # bytes per second
    both = [
        RankTraining(world, replace(recipe, plan=replace(recipe.plan, overlap_halos=overlap)))
        if halos
        else RankTraining(world, recipe, overlap=overlap)
        for overlap in (False, True)
    ]
    own = both[0].cut(make_batches(recipe, seed, steps=1)[0])
    sums: list[list[float]] = [[], []]

    def record_traffic(number: int) -> None:
        worker = both[number].worker
        if halos:  # pack, post, wait and unpack
            seconds = sum(event.end_s - event.start_s for event in worker.events if event.kind == "halo")
        else:  # pack, start, progress (also between other instructions), wait and unpack
            names = {item.name for item in both[number].program.select_instructions(SumGradients)}
            events = (event for event in worker.events if event.name in names)
            seconds = worker.helping_s + sum(event.end_s - event.start_s for event in events)
        # Collective after the step's own barrier (`time_interleaved`), so that it does not disturb the next
        # measurement.
        sums[number].append(statistics.mean(world.all_gather(seconds)))

    steps = time_interleaved(world, both, own, iterations + 1, record_traffic)
    blocking, exposed = (statistics.median(seconds[1:]) for seconds in sums)
    return {
        "blocking_s": round(blocking, 5),
        "exposed_s": round(exposed, 5),
        "link_mbit_per_s": link_mbit_per_s,
        "hidden": round(1 - exposed / blocking, 3) if blocking else None,
        "step_s": round(statistics.median(steps[1][1:]), 4),
        "step_blocking_s": round(statistics.median(steps[0][1:]), 4),
        **_count_traffic(both[1], halos),
    }


def _count_traffic(training: RankTraining, halos: bool) -> dict[str, int]:
    """Return the halo traffic of a step and how many exchanges were split, or else the gradient buckets."""
    if not halos:
        sums = list(training.program.select_instructions(SumGradients))
        return {"buckets": len({item.name for item in sums}), "bytes": sum(item.bytes for item in sums) // 2}
    sent = count_traffic(training.program).get("halo", Traffic(0, 0))
    halves = sum(isinstance(item, ExchangeHalf) for item in training.program.forward)
    whole = sum(isinstance(item, Exchange) and item.purpose == "halo" for item in training.program.forward)
    return {"messages": sent.messages, "bytes": sent.bytes, "split": halves // 2, "whole": whole}
