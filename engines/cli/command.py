"""The commands, each run on every rank. Exit codes: 0: success; 1: it ran, with a wrong result; 2: invalid request.

Commands that read images or files import their modules themselves: a machine that only checks its GPU needs nothing but
torch and mpi4py.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn

from engines.bench.allreduce import bench_allreduce
from engines.bench.bubble import bench_bubble
from engines.bench.compiled import bench_compiled
from engines.bench.halo import bench_halo
from engines.bench.memory import bench_memory
from engines.bench.overhead import bench_overhead
from engines.bench.overlap import bench_overlap
from engines.bench.step import bench_step
from engines.bench.throughput import bench_throughput
from engines.cli import options
from engines.cli.options import make_allreduce_parser, make_throughput_parser, make_throughput_recipe
from engines.comm.world import World
from engines.errors import CheckpointError, ImageError, PlanError, RankError, ReleasedError, TraceError
from engines.formatting import format_bytes
from engines.spatial.layout import check_fits
from engines.train.interrupts import StoppedError
from engines.train.verify import verify

__all__ = ["main"]

# PyTorch's messages: on a CPU, memory that runs out has no exception type of its own.
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)

Command = Callable[[World, Sequence[str]], bool]


def main(arguments: Sequence[str]) -> int:
    """Run one command on this rank; rank 0 prints one line of JSON, or a one-line error."""
    words = 2 if arguments[:1] == ["bench"] else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name == "gpu-check":
        from engines.bench.gpu_check import run_gpu_checks

        return run_gpu_checks(rest)
    if name == "table":
        from engines.cli.table_command import run_table

        return run_table(rest)
    if name == "published":
        from engines.cli.published_command import run_published

        return run_published(rest)
    from engines.comm.mpi import MpiWorld

    world = MpiWorld()
    if world.rank:
        # Every rank runs the same command, and would print the same lines.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (only rank 0 prints, whatever the user's model prints)
    try:
        world.exit_process(0 if _run_command(name, world, rest) else 1)
    except (PlanError, TraceError, ImageError, CheckpointError) as error:  # raised on every rank alike
        _print_error(world, f"{type(error).__name__}: {error}")
        world.exit_process(2)
    except StoppedError as stopped:  # raised on every rank; the exit code is a shell's code for the signal
        _print_error(world, str(stopped))
        world.exit_process(128 + stopped.number)
    except RankError as error:  # raised on one rank; `abort` releases the others
        # A rank that only stopped waiting has nothing to tell: the rank that failed prints the cause.
        if not isinstance(error, ReleasedError):
            print(f"rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        world.abort()
        os._exit(1)


def _run_command(name: str, world: World, arguments: Sequence[str]) -> bool:
    """Run a command, and return whether its result is right.

    Raises PlanError if the command is unknown, and RankError if memory runs out.
    """
    if name not in _COMMANDS:
        commands = ", ".join([*_COMMANDS, "table", "published", "gpu-check"])
        raise PlanError(f"Unknown command {name[:80]!r}. Commands: {commands}.")
    try:
        return _COMMANDS[name](world, arguments)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RankError) or not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        told = f" ({format_bytes(int(asked[1]))} were asked for at once)" if asked else ""
        raise RankError(
            f"there is not enough memory for what the flags ask{told}. Use more ranks or tiles, or smaller images."
        ) from error


def _print_error(world: World, text: str) -> None:
    if world.rank == 0:
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def _print(world: World, line: dict[str, object]) -> None:
    if world.rank == 0:
        print(json.dumps(line), flush=True)


def _train(world: World, arguments: Sequence[str]) -> bool:
    """Train for some epochs on images, with checkpoints."""
    from engines.cli.train_command import run_train

    return run_train(world, arguments)


def _predict(world: World, arguments: Sequence[str]) -> bool:
    """Predict a region of a picture, tile after tile."""
    from engines.inference.command import predict

    _print(world, predict(world, arguments))
    return True


def _verify(world: World, arguments: Sequence[str]) -> bool:
    """Compare ranks to one process over three optimiser steps."""
    flags = options.make_parser("Compare a plan on the ranks with the plain model in one process.")
    given = any(argument.split("=")[0] in ("--dtype", "--precision") for argument in arguments)
    chosen = flags.parse_args([*([] if given else ["--dtype", "float64"]), *arguments])
    model, recipe = options.make_recipe(chosen, world.size, world)
    line = verify(world, recipe, model, nn.CrossEntropyLoss(), chosen.seed)
    _print(world, line)
    return bool(line["ok"])


def _run_bench_step(world: World, arguments: Sequence[str]) -> bool:
    """Measure images per second on the ranks and in one process, interleaved."""
    flags = options.make_parser("Time training steps of a plan on the ranks, and of the plain model in one process.")
    flags.add_argument("--iterations", type=options.parse_positive, default=5)
    flags.add_argument(
        "--in-turns",
        action="store_true",
        help="give memory back after each step: ranks and process need not fit together",
    )
    chosen = flags.parse_args(arguments)
    model, recipe = options.make_recipe(chosen, world.size, world)
    _print(world, bench_step(world, recipe, model, chosen.iterations, chosen.seed, chosen.in_turns))
    return True


def _run_bench_overlap(world: World, arguments: Sequence[str]) -> bool:
    """Measure the gradient all-reduce, or the halo exchange, with and without overlap, interleaved."""
    flags = options.make_parser(
        "Measure how much of the gradients' sums over ranks, or of halos, hides behind computing."
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=5)
    flags.add_argument("--link-mbit-per-s", type=options.parse_positive, help="as if each rank were behind such a link")
    flags.add_argument("--halos", action="store_true", help="halos behind tiles' interiors, and not sums")
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    _print(world, bench_overlap(world, recipe, chosen.iterations, chosen.seed, chosen.link_mbit_per_s, chosen.halos))
    return True


def _run_bench_compiled(world: World, arguments: Sequence[str]) -> bool:
    """Measure steps with and without compiled segments, interleaved."""
    flags = options.make_parser("Time training steps with segments as PyTorch runs them, and compiled.")
    flags.add_argument("--iterations", type=options.parse_positive, default=5)
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    _print(world, bench_compiled(world, recipe, chosen.iterations, chosen.seed))
    return True


def _run_bench_memory(world: World, arguments: Sequence[str]) -> bool:
    """Measure the peak memory of each rank, and of one process with the whole image."""
    flags = options.make_parser("Measure the peak memory of a training step on each rank, and in one process.")
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    _print(world, bench_memory(world, recipe, arguments, chosen.seed))
    return True


def _run_bench_halo(world: World, arguments: Sequence[str]) -> bool:
    """Compare a halo exchange, forward and backward, to the same exchange written by hand."""
    chosen = options.make_halo_parser().parse_args(arguments)
    case = options.make_halo_case(chosen)
    line = bench_halo(world, case, chosen.warmup, chosen.iterations, chosen.with_compute, chosen.validate)
    _print(world, line)
    return bool(line.get("valid", True))


def _run_bench_bubble(world: World, arguments: Sequence[str]) -> bool:
    """Measure the idle share of a schedule, and compute it by formula."""
    flags = options.make_parser("Measure how long ranks stand idle in a schedule of equal stages, beside the formula.")
    flags.add_argument(
        "--stage-seconds", type=options.parse_seconds, default=0.02, help="how long a stage takes forward"
    )
    flags.set_defaults(spatial_size=0)
    chosen = flags.parse_args(arguments)
    plan = options.make_plan(chosen)
    check_fits(plan, world.size)
    _print(world, bench_bubble(world, plan, chosen.stage_seconds))
    return True


def _run_bench_streaming(world: World, arguments: Sequence[str]) -> bool:
    """Compute tiles one after another within a bound of memory."""
    if world.size > 1:
        raise PlanError(f"Tiles in turn are one process's work, but there are {world.size}. Start 1.")
    from engines.bench.streaming import bench_streaming

    _print(world, bench_streaming(arguments))
    return True


def _run_bench_largest(world: World, arguments: Sequence[str]) -> bool:
    """Find the largest image that trains within a bound of memory."""
    if world.size > 1:
        raise PlanError(f"The largest image is looked for by one process, but there are {world.size}. Start 1.")
    from engines.bench.largest import bench_largest

    _print(world, bench_largest(arguments))
    return True


def _run_bench_throughput(world: World, arguments: Sequence[str]) -> bool:
    """Measure images per second, printed in the format of the field's synthetic benchmarks."""
    chosen = make_throughput_parser().parse_args(arguments)
    recipe = make_throughput_recipe(chosen, world.size, world)
    line = bench_throughput(
        world, recipe, chosen.model, chosen.warmup, chosen.num_iters, chosen.num_batches_per_iter, chosen.seed
    )
    _print(world, line)
    return True


def _run_bench_allreduce(world: World, arguments: Sequence[str]) -> bool:
    """Compare all-reduces over all ranks: ours, MPI's own, and gloo's."""
    chosen = make_allreduce_parser().parse_args(arguments)
    for line in bench_allreduce(world, chosen.max_bytes, chosen.iterations):
        _print(world, line)
    return True


def _run_bench_overhead(world: World, arguments: Sequence[str]) -> bool:
    """Measure the cost of an instruction besides its kernels."""
    flags = options.FlagParser(description="Measure what an instruction of a program costs beside its kernels.")
    flags.add_argument("--iterations", type=options.parse_positive, default=7)
    chosen = flags.parse_args(arguments)
    # It needs one rank; the others wait, so that they do not take its cores.
    if world.rank == 0:
        _print(world, bench_overhead(chosen.iterations))
    world.barrier()
    return True


def _run_bench_read(world: World, arguments: Sequence[str]) -> bool:
    """Read a picture's pixels on the ranks and in one process."""
    from engines.bench.read import bench_read, make_read_parser

    chosen = make_read_parser().parse_args(arguments)
    line = bench_read(world, chosen.image, chosen.slice_method, chosen.halo_px, chosen.level)
    _print(world, line)
    return bool(line["ok"])


def _run_bench_asynchronous(world: World, arguments: Sequence[str]) -> bool:
    """Train asynchronous replicas, and print one line for each mode."""
    from engines.bench import asynchronous

    chosen = asynchronous.make_parser().parse_args(arguments)
    studies = asynchronous.parse_studies(chosen, world.size)
    _, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks, world)
    for study in asynchronous.bench_asynchronous(world, studies, recipe):
        _print(world, study.line)
    return True


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "predict": _predict,
    "verify": _verify,
    "bench step": _run_bench_step,
    "bench memory": _run_bench_memory,
    "bench halo": _run_bench_halo,
    "bench bubble": _run_bench_bubble,
    "bench overhead": _run_bench_overhead,
    "bench overlap": _run_bench_overlap,
    "bench compiled": _run_bench_compiled,
    "bench streaming": _run_bench_streaming,
    "bench largest": _run_bench_largest,
    "bench throughput": _run_bench_throughput,
    "bench allreduce": _run_bench_allreduce,
    "bench read": _run_bench_read,
    "bench asynchronous": _run_bench_asynchronous,
}
