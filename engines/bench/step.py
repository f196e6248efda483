"""Seconds per training step: the plan on its ranks against the plain model in one process with all cores.

A second comparison is the time of convolutions and matrix products alone, a lower bound for any implementation.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.profiler import profile, supported_activities

from engines.comm.cgroup_limits import count_cores
from engines.comm.device import trim_memory
from engines.comm.streams import wait_for_device
from engines.comm.world import World
from engines.program.instructions import Phase
from engines.program.timeline import TimelineEvent
from engines.train.oracle import ReferenceTraining
from engines.train.training import RankTraining, Recipe
from engines.train.verify import make_batches

__all__ = ["PHASES", "bench_step", "compute_shares", "measure_arithmetic_share", "sum_by_phase"]

# Breakdown of the time of steps by phase, from each rank's own events.


PHASES = ("forward", "backward", "messages", "sums", "update", "waiting")


def sum_by_phase(events: Iterable[TimelineEvent]) -> Counter[str]:
    """Return the seconds of one rank by phase; waiting is counted apart from the phases in which it occurs."""
    found, kinds = Counter[str](), {"all-reduce": "sums", "update": "update"}
    for event in events:
        if event.kind == "compute":
            phase = "forward" if event.phase == Phase.FORWARD.value else "backward"
        else:
            phase = kinds.get(event.kind, "messages")
        found[phase] += event.busy_s
        found["waiting"] += event.wait_s
    return found


def compute_shares(ranks: Sequence[Counter[str]]) -> dict[str, float]:
    """Return the share of each phase in the time of all ranks.

    >>> compute_shares([Counter(forward=1.0, waiting=1.0), Counter(forward=2.0)])["forward"]
    0.75
    """
    together = sum(ranks, Counter())
    total = sum(together.values())
    return {name: round(together[name] / total, 4) if total else 0.0 for name in PHASES}


# Share of convolutions and matrix products in a step: a lower bound for its duration.


_KERNELS = ("conv", "addmm", "aten::mm", "aten::bmm", "matmul")
"""Parts of the profiler's operator names, on all devices."""


def measure_arithmetic_share(step: Callable[[], object]) -> float:
    """Return the share of operator time in convolutions and matrix products, forward and backward, in one step.

    Device time if there is any, else CPU time. The profiled step is not timed otherwise.
    """
    with profile(activities=supported_activities()) as seen:
        step()
    # Self times: an operator's own kernels without those of the operators that it calls, which have rows of their own.
    rows = [(row.key, row.self_device_time_total or row.self_cpu_time_total) for row in seen.key_averages()]
    total = sum(seconds for _, seconds in rows)
    return sum(seconds for name, seconds in rows if any(part in name for part in _KERNELS)) / total if total else 0.0


def bench_step(
    world: World, recipe: Recipe, model: nn.Module, iterations: int, seed: int, in_turns: bool = False
) -> dict[str, object]:
    """Return medians over `iterations` interleaved steps, after one warm-up step each; the same line on every rank.

    `in_turns`: return free memory to the system after each step, so that the ranks and the one process need not fit
    together; both then pay for fresh pages in every step. `spread` is (largest - smallest) / median of the ranks'
    seconds per step, `phases` the shares of all ranks' time, and `of_limit` the speed relative to the convolutions and
    matrix products alone, run as in one process with all cores: 1 is as fast.
    """
    training = RankTraining(world, recipe)
    batch = make_batches(recipe, seed, steps=1)[0]
    own = training.cut(batch)
    alone = ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe) if world.rank == 0 else None
    threads = count_cores()
    ranks_s, alone_s, spent = [], [], Counter[str]()
    for number in range(iterations + 1):
        # Ranks and one process take turns, so that a slow phase of the machine hits both. Meanwhile the other ranks
        # wait at the barrier below, and rank 0 may use all cores.
        world.barrier()
        ranks_s.append(_time_work(lambda: (training.step(own), wait_for_device(training.device), world.barrier())))
        spent += sum_by_phase(training.report.events if number else ())
        if in_turns:
            training.start({})  # release the tensors of the last step
            trim_memory()
            world.barrier()
        if alone:
            # The ranks' step has left the thread count of a rank's share of the cores.
            torch.set_num_threads(threads)
            alone_s.append(_time_work(lambda: (alone.step(batch), wait_for_device(training.device))))
            if in_turns:
                trim_memory()
        world.barrier()
    images, answer = recipe.step_specs["images"].shape[0], None
    if alone:
        # The profiled step comes last: a profiler slows down what it watches.
        torch.set_num_threads(threads)
        answer = _make_line(
            ranks_s[1:], alone_s[1:], images, threads, measure_arithmetic_share(lambda: alone.step(batch))
        )
    line = world.all_gather(answer)[0]
    return {**line, "phases": compute_shares(world.all_gather(spent))}


def _time_work(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _make_line(
    ranks_s: list[float], alone_s: list[float], images: int, threads: int, arithmetic: float
) -> dict[str, object]:
    ours, theirs = statistics.median(ranks_s), statistics.median(alone_s)
    return {
        "images_per_s": round(images / ours, 4),
        "one_process_images_per_s": round(images / theirs, 4),
        "ratio": round(theirs / ours, 3),
        "of_limit": round(arithmetic * theirs / ours, 3),
        "spread": round((max(ranks_s) - min(ranks_s)) / ours, 3),
        "threads": threads,
    }
