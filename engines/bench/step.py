"""Seconds per training step: of a plan, compiled or not, against one process, and in images per second."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.profiler import profile, supported_activities

from mpi4dl_nb.engines.bench.measure import compute_spread, time_interleaved, time_rank_step
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.device import count_cores, has_own_memory, trim_memory
from mpi4dl_nb.engines.comm.streams import measure_seconds, wait_for_device
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.predict.calibrate import measure_overheads
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.timeline import WORK, TimelineEvent
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

# The plan on its ranks against the plain model in one process with all cores.

PHASES = ("forward", "backward", "messages", "sums", "update", "waiting")


def add_by_phase(seconds: dict[str, float], events: Iterable[TimelineEvent]) -> None:
    """Add the seconds of one rank by phase; waiting is counted apart from the phases in which it occurs."""
    kinds = {"all-reduce": "sums", "update": "update"}
    for event in events:
        if event.kind in WORK and event.kind not in kinds:
            phase = "forward" if event.phase == Phase.FORWARD.value else "backward"
        else:
            phase = kinds.get(event.kind, "messages")
        seconds[phase] += event.busy_s
        seconds["waiting"] += event.wait_s


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
    inputs = training.cut(batch)
    alone = ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe) if world.rank == 0 else None
    threads = count_cores()
    ranks_s, alone_s, spent = [], [], dict.fromkeys(PHASES, 0.0)
    for iteration in range(iterations + 1):
        ranks_s.append(time_rank_step(world, training, inputs))
        add_by_phase(spent, training.report.events if iteration else ())
        if in_turns:
            training.start({})  # release the tensors of the last step
            trim_memory()
            world.barrier()
        if alone:
            # Meanwhile the other ranks wait at the barrier below, so that this process may use all cores. The ranks'
            # step has left the thread count of a rank's share of them.
            torch.set_num_threads(threads)
            alone_s.append(measure_seconds(partial(alone.step, batch), training.device))
            if in_turns:
                trim_memory()
        world.barrier()
    line: dict[str, object] = {}
    if alone:
        # The profiled step comes last: a profiler slows down what it watches.
        torch.set_num_threads(threads)
        arithmetic = measure_arithmetic_share(partial(alone.step, batch))
        images = recipe.step_specs["images"].shape[0]
        ours, theirs = statistics.median(ranks_s[1:]), statistics.median(alone_s[1:])
        line = {
            "images_per_s": round(images / ours, 4),
            "one_process_images_per_s": round(images / theirs, 4),
            "ratio": round(theirs / ours, 3),
            "of_limit": round(arithmetic * theirs / ours, 3),
            "spread": compute_spread(ranks_s[1:]),
            "threads": threads,
        }
    line = world.all_gather(line)[0]
    ranks = world.all_gather(spent)
    spent = {name: sum(seconds[name] for seconds in ranks) for name in PHASES}
    total = sum(spent.values())
    return {**line, "phases": {name: round(spent[name] / total, 4) if total else 0.0 for name in PHASES}}


def run_bench_step(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench step`."""
    flags = options.make_parser("Time training steps of a plan on the ranks, and of the plain model in one process.", 5)
    flags.add_argument(
        "--in-turns",
        action="store_true",
        help="release memory after each step, so that ranks and the one process need not fit together",
    )
    chosen = flags.parse_args(arguments)
    model, recipe = options.make_recipe(chosen, world.size, world)
    return bench_step(world, recipe, model, chosen.iterations, chosen.seed, chosen.in_turns)


def bench_compiled(world: World, recipe: Recipe, iterations: int, seed: int) -> dict[str, object]:
    """Return medians over interleaved steps in eager mode and with `compile_segments`; the same line on every rank.

    `ratio` is the speed-up by compiled segments. `first_s` is the duration in seconds of the first compiled step, which
    compiles, or loads from disk what an earlier process has compiled. `spread` is (largest - smallest) / median of the
    durations of compiled steps.
    """
    both = [
        RankTraining(world, replace(recipe, plan=replace(recipe.plan, compile_segments=compiles)))
        for compiles in (False, True)
    ]
    inputs = both[0].cut(make_batches(recipe, seed, steps=1)[0])
    plain, compiled = time_interleaved(world, both, inputs, iterations + 1)
    plain_s, compiled_s = (statistics.median(seconds[1:]) for seconds in (plain, compiled))
    return {
        "step_s": round(plain_s, 5),
        "compiled_step_s": round(compiled_s, 5),
        "first_s": round(compiled[0], 5),
        "ratio": round(plain_s / compiled_s, 3),
        "spread": compute_spread(compiled[1:]),
    }


def run_bench_compiled(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench compiled`."""
    flags = options.make_parser("Time training steps with eager segments, and with compiled segments.", 5)
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    return bench_compiled(world, recipe, chosen.iterations, chosen.seed)


def bench_overhead(times: int) -> dict[str, object]:
    """Return the overhead of a program's instruction, with tiny segments on one rank, in microseconds of one thread.

    All are medians over `times` measurements, each a median itself. `instruction_us` is the time of an instruction
    (forward or backward) minus that of its one kernel call and the call's gradient, which are `call_us` and
    `back_call_us`. `spread` is (largest - smallest) / median.
    """
    torch.set_num_threads(1)
    runs = [measure_overheads() for _ in range(times)]
    medians = {f"{name[:-2]}_us": round(1e6 * statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    return {**medians, "spread": compute_spread([run["instruction_s"] for run in runs])}


def run_bench_overhead(world: World, arguments: Sequence[str]) -> Iterator[dict[str, object]]:
    """Run `bench overhead`."""
    flags = options.FlagParser(
        description="Measure the cost of an instruction of a program in addition to its kernels."
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=7)
    chosen = flags.parse_args(arguments)
    # It needs one rank; the others wait, so that they do not take its cores.
    if world.rank == 0:
        yield bench_overhead(chosen.iterations)
    world.barrier()


# Images per second, in the format of common synthetic benchmarks.


def make_throughput_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench throughput`, with the flag names of common synthetic benchmarks."""
    flags = options.make_parser("Time training steps on random images, each rank a replica of the whole model.")
    flags.set_defaults(model="resnet50", image_size="224", num_classes=1000, batch_size=32)
    flags.set_defaults(split_size=1, spatial_size=0, data_parallel=None)
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


def bench_throughput(
    world: World, recipe: Recipe, model: str, warmup: int, iterations: int, steps: int, seed: int
) -> dict[str, object]:
    """Print results as they arrive; return images per second per device and in total, the same on every rank.

    One iteration is a number of steps on the same random images, from a barrier of all ranks until the last rank is
    done. `+-` is 1.96 standard deviations over the iterations, which contain 95 % of them if they are normally
    distributed.
    """
    training = RankTraining(world, recipe)
    device = "GPU" if has_own_memory(training.device) else "CPU"
    whole = make_batches(recipe, seed, steps=1)[0]
    images, inputs = len(whole["images"]), training.cut(whole)
    print(f"Model: {model}", f"Batch size: {images // recipe.plan.batches}", sep="\n", flush=True)
    print(f"Number of {device}s: {world.size}", "Running warmup...", sep="\n", flush=True)
    for _ in range(warmup):
        training.step(inputs)
    print("Running benchmark...", flush=True)
    speeds = []
    for index in range(iterations):
        world.barrier()
        start_s = time.perf_counter()
        for _ in range(steps):
            training.step(inputs)
        wait_for_device(training.device)
        slowest_s = max(world.all_gather(time.perf_counter() - start_s))
        speeds.append(images * steps / slowest_s / world.size)
        print(f"Iter #{index}: {speeds[-1]:.1f} img/sec per {device}", flush=True)
    mean, around = statistics.fmean(speeds), 1.96 * statistics.pstdev(speeds)
    print(f"Img/sec per {device}: {mean:.1f} +-{around:.1f}", flush=True)
    total, around_total = mean * world.size, around * world.size
    print(f"Total img/sec on {world.size} {device}(s): {total:.1f} +-{around_total:.1f}", flush=True)
    return {
        "model": model,
        "device": device,
        "ranks": world.size,
        "images_per_step": images,
        "images_per_s_each": round(mean, 4),
        "images_per_s_total": round(total, 4),
        "spread": round(around / mean, 4),
        "iterations": [round(speed, 4) for speed in speeds],
    }


def run_bench_throughput(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench throughput`."""
    chosen = make_throughput_parser().parse_args(arguments)
    recipe = make_throughput_recipe(chosen, world.size, world)
    counts = chosen.warmup, chosen.num_iters, chosen.num_batches_per_iter
    return bench_throughput(world, recipe, chosen.model, *counts, chosen.seed)
