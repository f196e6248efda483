"""How much traffic hides behind computing, gradients' sums or halos: the same training without and with overlap."""

from __future__ import annotations

import statistics
from dataclasses import replace

from engines.bench.interleaved import interleaved
from engines.bench.verify import batches
from engines.comm.link import LinkedWorld
from engines.comm.world import World
from engines.program.instructions import Exchange, Half, SumGradients
from engines.program.traffic import Traffic, traffic
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
    world = LinkedWorld(world, link_mbit_per_s * _BYTES_PER_MBIT) if link_mbit_per_s else world
    both = [_training(world, recipe, overlap, halos) for overlap in (False, True)]
    in_traffic = _in_halos if halos else _in_sums
    own = both[0].cut(batches(recipe, seed, steps=1)[0])
    sums: list[list[float]] = [[], []]

    def after(number: int) -> None:
        sums[number].append(statistics.mean(world.all_gather(in_traffic(both[number]))))

    steps = interleaved(world, both, own, iterations + 1, after)
    blocking, exposed = (statistics.median(seconds[1:]) for seconds in sums)
    return {
        "blocking_s": round(blocking, 5),
        "exposed_s": round(exposed, 5),
        "link_mbit_per_s": link_mbit_per_s,
        "hidden": round(1 - exposed / blocking, 3) if blocking else None,
        "step_s": round(statistics.median(steps[1][1:]), 4),
        "step_blocking_s": round(statistics.median(steps[0][1:]), 4),
        **(_halos(both[1]) if halos else _buckets(both[1])),
    }


def _training(world: World, recipe: Recipe, overlap: bool, halos: bool) -> RankTraining:
    if not halos:
        return RankTraining(world, recipe, overlap=overlap)
    return RankTraining(world, replace(recipe, plan=replace(recipe.plan, overlap_halos=overlap)))


def _buckets(training: RankTraining) -> dict[str, int]:
    sums = list(training.program.of_kind(SumGradients))
    return {"buckets": len({item.name for item in sums}), "bytes": sum(item.bytes for item in sums) // 2}


def _halos(training: RankTraining) -> dict[str, int]:
    """What a step's halos are, and how many exchanges were split for a rank to compute meanwhile."""
    sent = traffic(training.program).get("halo", Traffic(0, 0))
    halves = sum(isinstance(item, Half) for item in training.program.forward)
    whole = sum(isinstance(item, Exchange) and item.purpose == "halo" for item in training.program.forward)
    return {"messages": sent.messages, "bytes": sent.bytes, "split": halves // 2, "whole": whole}


def _in_halos(training: RankTraining) -> float:
    """Seconds of the last step in instructions that move halos: to pack, post, wait and unpack."""
    return sum(event.end_s - event.start_s for event in training.worker.events if event.kind == "halo")


def _names(training: RankTraining) -> set[str]:
    return {item.name for item in training.program.of_kind(SumGradients)}


def _in_sums(training: RankTraining) -> float:
    """Seconds of the last step that summing gradients took: to pack, start, help along, wait and unpack."""
    names = _names(training)
    return training.worker.helping_s + sum(
        event.end_s - event.start_s for event in training.worker.events if event.name in names
    )
