"""The largest square image that one process trains within a bound of memory, in one of several ways.

Each size is tried in a process of its own: two training steps, since the second one has the optimiser's state, too. The
bound is the kernel's (`RLIMIT_DATA`, Linux), or on a GPU that of its allocator: what goes beyond it fails.
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

from engines import options
from engines.bench.apart import EndedError, apart
from engines.bench.bounded import KEPT_BYTES, MIB, bounded
from engines.bench.memory import STEPS, peak_bytes
from engines.bench.verify import batches
from engines.comm.container import cores
from engines.comm.device import choose_device, keep_memory_tight
from engines.comm.loopback import loopback
from engines.comm.streams import wait_for
from engines.errors import PlanError, TraceError
from engines.oracle import OneProcess
from engines.training import RankTraining, Recipe

__all__ = ["bench_largest", "largest_parser", "searched", "tried"]

_UNCUT = {"split_size": 1, "spatial_size": 0, "num_spatial_parts": None, "slice_method": "square", "balance": "auto"}

Batch = Mapping[str, Tensor]
Trained = Callable[[], object]
"""Trains one step."""


def _plain(model: nn.Module, recipe: Recipe, batch: Batch) -> Trained:
    process = OneProcess.of(model, nn.CrossEntropyLoss(), recipe)
    return lambda: process.step(batch)


def _one_rank(_: nn.Module, recipe: Recipe, batch: Batch) -> Trained:
    training = RankTraining(loopback(1)[0], recipe)
    own = training.cut(batch)
    return lambda: training.step(own)


def _in_turn(_: nn.Module, recipe: Recipe, batch: Batch) -> Trained:
    from engines.streaming.training import StreamedTraining

    training = StreamedTraining(recipe)
    feed = training.cut(batch)
    return lambda: training.step(feed)


@dataclass(frozen=True)
class _Way:
    """How an image is trained: `begun` makes what does a step, `knobs` stand in place of the plan's."""

    says: str
    begun: Callable[[nn.Module, Recipe, Batch], Trained]
    knobs: Mapping[str, object] = field(default_factory=dict)


_WAYS = {
    "plain": _Way("plain: PyTorch's own loop", _plain, _UNCUT),
    "again": _Way(
        "again: activations are computed again for backward", _one_rank, {**_UNCUT, "checkpoint_activations": True}
    ),
    "away": _Way("away: they lie in a file meanwhile", _one_rank, {**_UNCUT, "offload_activations": True}),
    "in-turn": _Way("in-turn: the plan's tiles one after another", _in_turn),
}


def largest_parser() -> ArgumentParser:
    """The flags of a step, the way, and the bound."""
    flags = options.parser("Find the largest square image that one process trains within a bound of memory.")
    flags.add_argument("--way", choices=list(_WAYS), default="plain", help="; ".join(w.says for w in _WAYS.values()))
    flags.add_argument("--memory-mb", type=options.positive, default=512, help="beyond what the process has before")
    flags.add_argument("--step-px", type=options.positive, default=64, help="sizes are multiples of it")
    flags.add_argument("--most-px", type=options.positive, default=16384, help="larger ones are not tried")
    return flags


def bench_largest(arguments: Sequence[str]) -> dict[str, object]:
    """One line: images of `largest_px` a side train, of `next_px` do not, and why (None: it was not tried).

    The first size is that of `--image-size`. Raises PlanError where none of them trains, or TraceError.
    """
    chosen = largest_parser().parse_args(list(arguments))
    first, *others = set(options.image_size(chosen.image_size))
    if others:
        raise PlanError(f"--image-size {chosen.image_size}: images are square here. Name one number of pixels.")
    _check(chosen)
    seen: dict[int | None, Mapping[str, Any]] = {None: {"failure": None}}

    def fits(size_px: int) -> bool:
        seen[size_px] = _apart([*arguments, "--image-size", str(size_px)])
        return "failure" not in seen[size_px]

    found, beyond = searched(fits, first, chosen.step_px, chosen.most_px)
    if not found:
        raise PlanError(
            f"Not even {beyond} x {beyond} px train in this way within {chosen.memory_mb} MB "
            f"({seen[beyond]['failure']}). Use more memory (--memory-mb), or a smaller step (--step-px)."
        )
    line = {"way": chosen.way, "memory_bytes": chosen.memory_mb * MIB, "largest_px": found, **seen[found]}
    line["s_per_megapixel"] = round(1e6 * seen[found]["step_s"] / (chosen.batch_size * found**2), 6)
    return {**line, "next_px": beyond, "next_failure": seen[beyond]["failure"]}


def _apart(arguments: Sequence[str]) -> Mapping[str, Any]:
    """What a process of its own says of a size; libraries that get no memory may end it by a signal."""
    try:
        return apart("engines.bench.largest:tried", arguments, cores())
    except EndedError as error:
        if error.code >= 0:
            raise
        return {"failure": f"the process was ended by {Signals(-error.code).name}"}


def _check(chosen: Namespace) -> None:
    """Raises PlanError or TraceError where that is known without a try."""
    if chosen.most_px < chosen.step_px:
        raise PlanError(f"--most-px {chosen.most_px} is less than one step of {chosen.step_px} px (--step-px).")
    if chosen.way == "in-turn":
        from engines.streaming.training import check

        check(options.plan(chosen))
    _made(chosen)


def _made(chosen: Namespace) -> tuple[nn.Module, Recipe]:
    """The model, and what its way makes of the flags."""
    told = Namespace(**{**vars(chosen), **_WAYS[chosen.way].knobs})
    return options.recipe(told, options.plan(told).ranks if chosen.way == "in-turn" else 1)


def searched(fits: Callable[[int], bool], first: int, step: int, most: int) -> tuple[int, int | None]:
    """The largest multiple of `step` up to `most` that fits, 0 if none does, and the smallest that does not, if any.

    Sizes are doubled from `first` on until one does not fit, then halved between.

    >>> searched(lambda size: size <= 700, first=512, step=64, most=4096)
    (640, 704)
    >>> searched(lambda size: size <= 100, first=512, step=64, most=4096)
    (64, 128)
    >>> searched(lambda size: True, first=512, step=64, most=1000)
    (960, None)
    """
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


def tried(arguments: Sequence[str]) -> None:
    """Train some steps within the bound, in this process; prints `peak_bytes` and `step_s`, or the `failure`."""
    chosen = largest_parser().parse_args(list(arguments))
    device = choose_device(chosen.device, rank=0)
    keep_memory_tight(True, KEPT_BYTES)
    _warm_up(device)
    try:
        model, recipe = _made(chosen)
        batch = batches(recipe, chosen.seed, steps=1)[0]
        with bounded(device, chosen.memory_mb * MIB):
            line = _measured(device, lambda: _WAYS[chosen.way].begun(model, recipe, batch))
    except (RuntimeError, MemoryError, PlanError, TraceError) as error:
        line = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(line), flush=True)


def _measured(device: torch.device, begun: Callable[[], Trained]) -> dict[str, object]:
    seconds: list[float] = []

    def work() -> None:
        step = begun()
        for _ in range(STEPS):
            start_s = time.perf_counter()
            step()
            wait_for(device)
            seconds.append(time.perf_counter() - start_s)

    return {"peak_bytes": peak_bytes(device, work), "step_s": round(seconds[-1], 6)}


def _warm_up(device: torch.device) -> None:
    """What libraries take once is there before the bound: threads, and a GPU's context."""
    torch.set_num_threads(cores())
    layer = nn.Conv2d(4, 4, 3).to(device)
    layer(torch.zeros(1, 4, 64, 64, device=device)).sum().backward()
