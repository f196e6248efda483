"""Find the largest square image that one process trains within a memory limit, by one of several methods.

Each size is tried in a process of its own, for two training steps, since only the second one has the optimiser's state.
The kernel enforces the limit (`RLIMIT_DATA`, Linux), or on a GPU the allocator: allocations beyond it fail.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn

from engines.bench.memory import (
    KEPT_BYTES,
    MIB,
    STEPS,
    SubprocessExitError,
    limit_memory,
    measure_peak_bytes,
    run_in_subprocess,
)
from engines.cli import options
from engines.comm.cgroup_limits import count_cores
from engines.comm.device import choose_device, keep_memory_tight, share_process
from engines.comm.loopback import make_loopback_worlds
from engines.comm.streams import wait_for_device
from engines.errors import PlanError, TraceError
from engines.train.oracle import ReferenceTraining
from engines.train.training import RankTraining, Recipe
from engines.train.verify import make_batches

__all__ = ["bench_largest", "make_largest_parser", "search_largest", "train_within_limit"]

_UNCUT = {"split_size": 1, "spatial_size": 0, "num_spatial_parts": None, "slice_method": "square", "balance": "auto"}

Batch = Mapping[str, Tensor]
Trained = Callable[[], object]
"""Function that trains one step."""


def _make_plain_step(model: nn.Module, recipe: Recipe, batch: Batch) -> Trained:
    process = ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe)
    return lambda: process.step(batch)


def _make_one_rank_step(_: nn.Module, recipe: Recipe, batch: Batch) -> Trained:
    training = RankTraining(make_loopback_worlds(1)[0], recipe)
    own = training.cut(batch)
    return lambda: training.step(own)


def _make_step_in_turn(_: nn.Module, recipe: Recipe, batch: Batch) -> Trained:
    from engines.bench.streaming import make_ranks_in_turn  # greenlet is not installed on every machine

    share_process(count_cores())  # all cores for the rank that computes
    _, step = make_ranks_in_turn(recipe)
    return lambda: step(batch)


@dataclass(frozen=True)
class _TrainingMethod:
    """A training method: `make_step` returns a function that trains one step; `knobs` replace options of the plan."""

    says: str
    make_step: Callable[[nn.Module, Recipe, Batch], Trained]
    knobs: Mapping[str, object] = field(default_factory=dict)


_WAYS = {
    "plain": _TrainingMethod("plain: PyTorch's own loop", _make_plain_step, _UNCUT),
    "again": _TrainingMethod(
        "again: activations are computed again for backward",
        _make_one_rank_step,
        {**_UNCUT, "checkpoint_activations": True},
    ),
    "away": _TrainingMethod(
        "away: they lie in a file meanwhile", _make_one_rank_step, {**_UNCUT, "offload_activations": True}
    ),
    "in-turn": _TrainingMethod("in-turn: the plan's tiles one after another", _make_step_in_turn),
}


def make_largest_parser() -> ArgumentParser:
    """Return the parser: the flags of a step, the method, and the limit."""
    flags = options.make_parser("Find the largest square image that one process trains within a bound of memory.")
    flags.add_argument("--way", choices=list(_WAYS), default="plain", help="; ".join(w.says for w in _WAYS.values()))
    flags.add_argument(
        "--memory-mb", type=options.parse_positive, default=512, help="beyond what the process has before"
    )
    flags.add_argument("--step-px", type=options.parse_positive, default=64, help="sizes are multiples of it")
    flags.add_argument("--most-px", type=options.parse_positive, default=16384, help="larger ones are not tried")
    return flags


def bench_largest(arguments: Sequence[str]) -> dict[str, object]:
    """Return one line: images of side `largest_px` train, those of `next_px` fail, and why (None: it was not tried).

    The first size is that of `--image-size`. Raises PlanError if no size trains, or TraceError.
    """
    chosen = make_largest_parser().parse_args(list(arguments))
    # A set: `512x512` is square as well, and has one element.
    first, *others = set(options.parse_image_size(chosen.image_size))
    if others:
        raise PlanError(f"--image-size {chosen.image_size}: images are square here. Name one number of pixels.")
    if chosen.most_px < chosen.step_px:
        raise PlanError(f"--most-px {chosen.most_px} is less than one step of {chosen.step_px} px (--step-px).")
    _make_recipe(chosen)  # a fault of the model or the plan is found before any trial
    seen: dict[int | None, Mapping[str, Any]] = {None: {"failure": None}}

    def can_train(size_px: int) -> bool:
        try:
            seen[size_px] = run_in_subprocess(
                "engines.bench.largest:train_within_limit", [*arguments, "--image-size", str(size_px)], count_cores()
            )
        except SubprocessExitError as error:  # a library that gets no memory may end its process by a signal
            if error.code >= 0:
                raise
            seen[size_px] = {"failure": f"the process was ended by {Signals(-error.code).name}"}
        return "failure" not in seen[size_px]

    found, beyond = search_largest(can_train, first, chosen.step_px, chosen.most_px)
    if not found:
        raise PlanError(
            f"Not even {beyond} x {beyond} px train in this way within {chosen.memory_mb} MB "
            f"({seen[beyond]['failure']}). Use more memory (--memory-mb), or a smaller step (--step-px)."
        )
    line = {"way": chosen.way, "memory_bytes": chosen.memory_mb * MIB, "largest_px": found, **seen[found]}
    line["s_per_megapixel"] = round(1e6 * seen[found]["step_s"] / (chosen.batch_size * found**2), 6)
    return {**line, "next_px": beyond, "next_failure": seen[beyond]["failure"]}


def _make_recipe(chosen: Namespace) -> tuple[nn.Module, Recipe]:
    """Return the model, and the recipe for the flags with the method's options."""
    told = Namespace(**{**vars(chosen), **_WAYS[chosen.way].knobs})
    return options.make_recipe(told, options.make_plan(told).ranks if chosen.way == "in-turn" else 1)


def search_largest(fits: Callable[[int], bool], first: int, step: int, most: int) -> tuple[int, int | None]:
    """Return the largest multiple of `step` up to `most` that fits (0 if none), and the smallest that does not, if any.

    Sizes are doubled from `first` until one does not fit, then bisected.

    >>> search_largest(lambda size: size <= 700, first=512, step=64, most=4096)
    (640, 704)
    >>> search_largest(lambda size: size <= 100, first=512, step=64, most=4096)
    (64, 128)
    >>> search_largest(lambda size: True, first=512, step=64, most=1000)
    (960, None)
    """
    # Invariant: `low` steps fit (0 is taken to), `high` do not, or are beyond `most` while `beyond` is False.
    low, high, last = 0, most // step + 1, most // step
    size = min(max(1, first // step), last)
    beyond = False
    while high - low > 1:
        if fits(size * step):
            low = size
        else:
            high, beyond = size, True
        size = (low + high) // 2 if beyond else min(2 * size, last)
    return low * step, high * step if beyond else None


def train_within_limit(arguments: Sequence[str]) -> None:
    """Train some steps in this process within the limit; print `peak_bytes` and `step_s`, or `failure`, as JSON."""
    chosen = make_largest_parser().parse_args(list(arguments))
    device = choose_device(chosen.device, rank=0)
    # Blocks that glibc keeps for reuse would count against the limit, although no tensor uses them.
    keep_memory_tight(True, KEPT_BYTES)
    # Whatever libraries allocate once, threads and a GPU's context, is allocated before the limit applies.
    torch.set_num_threads(count_cores())
    layer = nn.Conv2d(4, 4, 3).to(device)
    layer(torch.zeros(1, 4, 64, 64, device=device)).sum().backward()
    try:
        model, recipe = _make_recipe(chosen)
        batch = make_batches(recipe, chosen.seed, steps=1)[0]
        with limit_memory(device, chosen.memory_mb * MIB):
            line = _measure_steps(device, lambda: _WAYS[chosen.way].make_step(model, recipe, batch))
    except (RuntimeError, MemoryError, PlanError, TraceError) as error:
        line = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(line), flush=True)


def _measure_steps(device: torch.device, begun: Callable[[], Trained]) -> dict[str, object]:
    seconds: list[float] = []

    def run_steps() -> None:
        step = begun()
        for _ in range(STEPS):
            start_s = time.perf_counter()
            step()
            wait_for_device(device)
            seconds.append(time.perf_counter() - start_s)

    return {"peak_bytes": measure_peak_bytes(device, run_steps), "step_s": round(seconds[-1], 6)}
