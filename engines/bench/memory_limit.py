"""Training within a limit of memory: the largest image that one process trains, and tiles streamed through it.

Each trial runs in a process of its own. The kernel enforces the limit (`RLIMIT_DATA`, Linux), or on a GPU the
allocator: allocations beyond it fail.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.bench.measure import (
    KEPT_BYTES,
    STEPS,
    SubprocessExitError,
    compute_spread,
    measure_steps,
    run_in_subprocess,
)
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.device import (
    choose_device,
    count_cores,
    has_own_memory,
    keep_memory_tight,
    limit_device_memory,
    read_process_bytes,
    share_process,
)
from mpi4dl_nb.engines.comm.loopback import make_loopback_worlds
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import PlanError, RankError, TraceError
from mpi4dl_nb.engines.program.offloader import OffloadStore, find_disk_folder
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, to_plain_names
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

_MIB = 1 << 20


@contextmanager
def limit_memory(device: torch.device, size_bytes: int) -> Iterator[None]:
    """Within the context, allocations beyond `size_bytes` fail.

    On the host the limit counts from the memory that the process has already (`RLIMIT_DATA`, Linux: mapped files do not
    count). On a GPU it covers everything, and it stays in force afterwards.
    """
    if has_own_memory(device):
        limit_device_memory(device, size_bytes)
        yield
        return
    # RLIMIT_DATA bounds private writable memory: heap and anonymous mappings, where tensors lie, but no libraries'
    # code.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_process_bytes("VmData") + size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# The largest square image that trains within the limit, by one of several methods. Each size is tried for two training
# steps, since only the second one has the optimiser's state.

_UNCUT = {"split_size": 1, "spatial_size": 0, "num_spatial_parts": None, "slice_method": "square", "balance": "auto"}
_WAYS: Mapping[str, tuple[str, Mapping[str, object]]] = {  # what it is, and the plan's options that it replaces
    "plain": ("PyTorch's own loop", _UNCUT),
    "again": ("recomputed activations", {**_UNCUT, "checkpoint_activations": True}),
    "away": ("activations offloaded to a file", {**_UNCUT, "offload_activations": True}),
    "in-turn": ("the plan's tiles one after another", {}),
}


def make_limit_parser(description: str, memory_mb: int | None = 512) -> ArgumentParser:
    """Return a parser of the flags of a step, and of the limit; `memory_mb` is its default (None: no limit)."""
    flags = options.make_parser(description)
    help_text = "memory limit beyond the initial size of the process"
    flags.add_argument("--memory-mb", type=options.parse_positive, default=memory_mb, help=help_text)
    return flags


def make_largest_parser() -> ArgumentParser:
    """Return the parser: the flags of a step, the method, and the limit."""
    flags = make_limit_parser("Find the largest square image that one process trains within a memory limit.")
    says = "; ".join(f"{way}: {what}" for way, (what, _) in _WAYS.items())
    flags.add_argument("--way", choices=list(_WAYS), default="plain", help=says)
    flags.add_argument("--step-px", type=options.parse_positive, default=64, help="image sizes are multiples of this")
    flags.add_argument("--most-px", type=options.parse_positive, default=16384, help="the largest image size to try")
    return flags


def bench_largest(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Return one line: images of side `largest_px` train, those of `next_px` fail, and why (None: it was not tried).

    The first size is that of `--image-size`. Raises PlanError if no size trains, or TraceError.
    """
    if world.size > 1:
        raise PlanError(f"The largest image is looked for by one process, but there are {world.size}. Start 1.")
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
                "mpi4dl_nb.engines.bench.memory_limit:train_within_limit",
                [*arguments, "--image-size", str(size_px)],
                count_cores(),
            )
        except SubprocessExitError as error:  # a library that gets no memory may end its process by a signal
            if error.code >= 0:
                raise
            seen[size_px] = {"failure": f"the process was ended by {Signals(-error.code).name}"}
        return "failure" not in seen[size_px]

    largest, beyond = search_largest(can_train, first, chosen.step_px, chosen.most_px)
    if not largest:
        raise PlanError(
            f"Not even {beyond} x {beyond} px train in this way within {chosen.memory_mb} MB "
            f"({seen[beyond]['failure']}). Use more memory (--memory-mb), or a smaller step (--step-px)."
        )
    line = {"way": chosen.way, "memory_bytes": chosen.memory_mb * _MIB, "largest_px": largest, **seen[largest]}
    line["s_per_megapixel"] = round(1e6 * seen[largest]["step_s"] / (chosen.batch_size * largest**2), 6)
    return {**line, "next_px": beyond, "next_failure": seen[beyond]["failure"]}


def _make_recipe(chosen: Namespace) -> tuple[nn.Module, Recipe]:
    """Return the model, and the recipe for the flags with the method's options."""
    flags_of_way = Namespace(**{**vars(chosen), **_WAYS[chosen.way][1]})
    return options.make_recipe(flags_of_way, options.make_plan(flags_of_way).ranks if chosen.way == "in-turn" else 1)


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

        def begin() -> Callable[[], object]:
            if chosen.way == "plain":
                return partial(ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe).step, batch)
            if chosen.way == "in-turn":
                share_process(count_cores())  # all cores for the rank that computes
                return partial(make_ranks_in_turn(recipe)[1], batch)
            training = RankTraining(make_loopback_worlds(1)[0], recipe)
            return partial(training.step, training.cut(batch))

        with limit_memory(device, chosen.memory_mb * _MIB):
            peak, seconds = measure_steps(device, begin, STEPS)
        line: dict[str, object] = {"peak_bytes": peak, "step_s": round(seconds[-1], 6)}
    except (RuntimeError, MemoryError, PlanError, TraceError) as error:
        line = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(line), flush=True)


# Streamed tiles within a limit, against one process with the whole image and no limit.
#
# The tiles are those of a plan, whose ranks run one after another in one thread, as in a cluster of `"in_turn"` ranks,
# with their activations in a file meanwhile. Late layers have many weights and few pixels: a last stage that is not cut
# holds them once. Both train the same steps, one after the other.


def make_ranks_in_turn(
    recipe: Recipe, folder: str | Path | None = None
) -> tuple[list[RankTraining], Callable[[Mapping[str, Tensor]], object]]:
    """Return the trainings of a plan's ranks in this thread, and a function that trains a step on a whole batch.

    What a rank holds while others compute is in a file in `folder`. Raises RankError if nothing can be stored.
    """
    from mpi4dl_nb.engines.program.rank_scheduler import RankScheduler  # greenlet is not installed on every machine

    recipe = replace(recipe, plan=replace(recipe.plan, offload_activations=True))
    scheduler = RankScheduler(recipe.plan.ranks)
    trainings = scheduler.run([partial(RankTraining, world, recipe) for world in scheduler.worlds])
    store = OffloadStore(folder)
    for rank, training in enumerate(trainings):
        training.offloader.store = store
        scheduler.register(rank, training.offload)

    def train_rank(training: RankTraining, batch: Mapping[str, Tensor]) -> None:
        # Cut in the rank's turn, and held by no name here, so that each part is freed after its last use.
        training.start(training.cut(batch))
        while not training.worker.done:
            training.advance()

    return trainings, lambda batch: scheduler.run([partial(train_rank, training, batch) for training in trainings])


def make_streaming_parser() -> ArgumentParser:
    """Return the parser: the flags of a step, and the limit."""
    flags = make_limit_parser(
        "Train an image tile after tile within a memory limit, and compare with one process without a limit."
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=3)
    flags.add_argument("--folder", default=find_disk_folder(), help="folder of the file of offloaded activations")
    return flags


def bench_streaming(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Return one line of measurements. Raises PlanError, and RankError if the limit is too small.

    `needs` is the plain training's least peak divided by the limit, `time_ratio` the duration of a streamed step
    divided by that of a plain step, and `grad_rel` the relative distance of the last gradients.
    """
    from safetensors.torch import load_file  # not installed on every machine, as greenlet

    if world.size > 1:
        raise PlanError(f"Tiles in turn are one process's work, but there are {world.size}. Start 1.")
    chosen = make_streaming_parser().parse_args(list(arguments))
    options.make_plan(chosen)  # a fault of the plan is found before any training
    with tempfile.TemporaryDirectory() as folder:
        ways = {name: Path(folder, name) for name in ("streamed", "alone", "tight")}
        # One process after another, each with all cores and with memory that no earlier work has enlarged.
        lines = {
            way: run_in_subprocess(f"{__name__}:{train_one_way.__name__}", [way, str(path), *arguments], count_cores())
            for way, path in ways.items()
        }
        tensors = [load_file(ways[way]) for way in ("streamed", "alone")]
    # All gradients as one vector each, in one order of names.
    ours, theirs = (torch.cat([grads[name].double().flatten() for name in sorted(tensors[0])]) for grads in tensors)
    return {
        "memory_bytes": chosen.memory_mb * _MIB,
        "peak_bytes": lines["streamed"]["peak_bytes"],
        "one_process_peak_bytes": lines["tight"]["peak_bytes"],
        "needs": round(lines["tight"]["peak_bytes"] / (chosen.memory_mb * _MIB), 2),
        "step_s": round(lines["streamed"]["step_s"], 6),
        "one_process_step_s": round(lines["alone"]["step_s"], 6),
        "time_ratio": round(lines["streamed"]["step_s"] / lines["alone"]["step_s"], 3),
        "spread": max(lines["streamed"]["spread"], lines["alone"]["spread"]),
        "stored_bytes": lines["streamed"]["stored_bytes"],
        "grad_rel": float((ours - theirs).norm() / theirs.norm()),
    }


def train_one_way(arguments: Sequence[str]) -> None:
    """Train `streamed`, tile by tile within the limit, or `alone`, the plain model on the whole image without one.

    `tight` is `alone` with the least memory: freed blocks are returned at once, as when streaming, which takes time.
    The way is the first argument, the file for the gradients the second; prints a line of JSON.
    """
    from safetensors.torch import save_file

    way, path, *rest = arguments
    chosen = make_streaming_parser().parse_args(rest)
    model, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks)
    whole = make_batches(recipe, chosen.seed, steps=1)[0]
    share_process(count_cores())  # all cores for the rank that computes
    host, stored = torch.device("cpu"), {}
    if way != "alone":
        keep_memory_tight(True, KEPT_BYTES)
    if way != "streamed":
        process = ReferenceTraining.of(model, nn.CrossEntropyLoss(), recipe, recipe.draws)
        peak, seconds = measure_steps(host, lambda: partial(process.step, whole), chosen.iterations + 1)
        gradients = process.gradients
    else:
        trainings, step = make_ranks_in_turn(recipe, chosen.folder)
        try:
            with limit_memory(trainings[0].device, chosen.memory_mb * _MIB):
                peak, seconds = measure_steps(host, lambda: partial(step, whole), chosen.iterations + 1)
        except RankError as error:
            sys.exit(str(error))
        except (RuntimeError, MemoryError) as error:
            sys.exit(f"{chosen.memory_mb} MB are too little ({error}). Use more tiles, or more memory.")
        # They share one file.
        stored["stored_bytes"] = max(training.offloader.store.end_bytes for training in trainings if training.offloader)
        gradients = dict(ChainMap(*(to_plain_names(training.copy_tensors()["gradients"]) for training in trainings)))
    save_file({name: grad.contiguous() for name, grad in gradients.items()}, path)
    line = {"peak_bytes": peak, "step_s": statistics.median(seconds[1:]), "spread": compute_spread(seconds[1:])}
    print(json.dumps(line | stored), flush=True)
