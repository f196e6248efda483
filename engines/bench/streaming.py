"""Streamed tiles within a memory limit, against one process with the whole image and no limit.

The tiles are those of a plan, whose ranks run one after another in one thread, as in a cluster of `"in_turn"` ranks,
with their activations in a file meanwhile. Late layers have many weights and few pixels: a last stage that is not cut
holds them once.

Both train the same steps in processes of their own, one after the other. `needs` is the plain training's peak divided
by the limit, `time_ratio` the duration of a streamed step divided by that of a plain step, and `grad_rel` the relative
distance of the last gradients. The kernel enforces the limit (`RLIMIT_DATA`, Linux): an allocation beyond it fails.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.bench.memory import KEPT_BYTES, MIB, limit_memory, measure_host_peak_bytes, run_in_subprocess
from engines.comm.cgroup_limits import count_cores
from engines.comm.device import keep_memory_tight, share_process
from engines.errors import RankError
from engines.program.offloader import OffloadStore, find_disk_folder
from engines.program.rank_scheduler import RankScheduler
from engines.train.oracle import ReferenceTraining, to_plain_names
from engines.train.training import RankTraining, Recipe
from engines.train.verify import make_batches

__all__ = ["bench_streaming", "make_ranks_in_turn", "make_streaming_parser", "train_one_way"]


def make_ranks_in_turn(
    recipe: Recipe, folder: str | Path | None = None
) -> tuple[list[RankTraining], Callable[[Mapping[str, Tensor]], None]]:
    """Return the trainings of a plan's ranks in this thread, and a function that trains a step on a whole batch.

    What a rank holds while others compute is in a file in `folder`. Raises RankError if nothing can be stored.
    """
    recipe = replace(recipe, plan=replace(recipe.plan, offload_activations=True))
    scheduler = RankScheduler(recipe.plan.ranks)
    trainings = [RankTraining(world, recipe) for world in scheduler.worlds]
    for rank, training in enumerate(trainings):
        training.offloader.store = OffloadStore(folder)
        scheduler.register(rank, training.worker.offload)

    def train_rank(training: RankTraining, batch: Mapping[str, Tensor]) -> None:
        # Cut in the rank's turn, and held by no name here, so that each part is freed after its last use.
        training.start(training.cut(batch))
        while not training.worker.done:
            training.advance()

    return trainings, lambda batch: scheduler.run([partial(train_rank, each, batch) for each in trainings])


def make_streaming_parser() -> ArgumentParser:
    """Return the parser: the flags of a step, and the limit."""
    from engines.cli import options

    flags = options.make_parser(
        "Train an image tile after tile within a bound of memory, beside one process with it all."
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=3)
    flags.add_argument(
        "--memory-mb", type=options.parse_positive, default=512, help="beyond what the process has before"
    )
    flags.add_argument("--folder", default=find_disk_folder(), help="where values lie while other tiles compute")
    return flags


def bench_streaming(arguments: Sequence[str]) -> dict[str, object]:
    """Return one line of measurements. Raises PlanError, and RankError if the limit is too small."""
    from engines.cli import options

    chosen = make_streaming_parser().parse_args(list(arguments))
    options.make_plan(chosen)  # a fault of the plan is found before any training
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: Path(folder, name) for name in ("streamed", "alone")}
        # One process after another, each with all cores and with memory that no earlier work has enlarged.
        lines = {
            way: run_in_subprocess(f"{__name__}:{train_one_way.__name__}", [way, str(path), *arguments], count_cores())
            for way, path in ways.items()
        }
        tensors = [load_file(path) for path in ways.values()]
    # All gradients as one vector each, in one order of names.
    ours, theirs = (torch.cat([each[name].double().flatten() for name in sorted(tensors[0])]) for each in tensors)
    return {
        "memory_bytes": chosen.memory_mb * MIB,
        "peak_bytes": lines["streamed"]["peak_bytes"],
        "one_process_peak_bytes": lines["alone"]["peak_bytes"],
        "needs": round(lines["alone"]["peak_bytes"] / (chosen.memory_mb * MIB), 2),
        "step_s": round(lines["streamed"]["step_s"], 6),
        "one_process_step_s": round(lines["alone"]["step_s"], 6),
        "time_ratio": round(lines["streamed"]["step_s"] / lines["alone"]["step_s"], 3),
        "spread": round(max(line["spread"] for line in lines.values()), 3),
        "stored_bytes": lines["streamed"]["stored_bytes"],
        "grad_rel": float((ours - theirs).norm() / theirs.norm()),
    }


def train_one_way(arguments: Sequence[str]) -> None:
    """Train `streamed`, tile by tile within the limit, or `alone`, the plain model on the whole image without one.

    The way is the first argument, the file for the gradients the second; prints a line of JSON.
    """
    from engines.cli import options

    way, path, *rest = arguments
    chosen = make_streaming_parser().parse_args(rest)
    model, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks)
    whole = make_batches(recipe, chosen.seed, steps=1)[0]
    share_process(count_cores())  # all cores for the rank that computes
    if way == "alone":
        process = ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe, recipe.draws)
        line = _measure_steps(lambda: process.step(whole), chosen.iterations)
        gradients = process.gradients
    else:
        keep_memory_tight(True, KEPT_BYTES)
        trainings, step = make_ranks_in_turn(recipe, chosen.folder)
        try:
            with limit_memory(trainings[0].device, chosen.memory_mb * MIB):
                line = _measure_steps(lambda: step(whole), chosen.iterations)
        except RankError as error:
            sys.exit(str(error))
        except (RuntimeError, MemoryError) as error:
            sys.exit(f"{chosen.memory_mb} MB are too little ({error}). Use more tiles, or more memory.")
        line["stored_bytes"] = sum(training.offloader.store.end_bytes for training in trainings)
        gradients = dict(ChainMap(*(to_plain_names(each.copy_tensors()["gradients"]) for each in trainings)))
    save_file({name: grad.contiguous() for name, grad in gradients.items()}, path)
    print(json.dumps(line), flush=True)


def _measure_steps(step: Callable[[], object], iterations: int) -> dict[str, float]:
    """Return the peak of all steps, and the median and spread of the durations after the first."""
    seconds: list[float] = []

    def run_steps() -> None:
        for _ in range(iterations + 1):
            start_s = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start_s)

    peak_bytes = measure_host_peak_bytes(run_steps)
    median_s = statistics.median(seconds[1:])
    return {"peak_bytes": peak_bytes, "step_s": median_s, "spread": (max(seconds[1:]) - min(seconds[1:])) / median_s}
