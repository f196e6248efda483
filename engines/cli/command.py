"""The commands, each run on every rank. Exit codes: 0: success; 1: it ran, with a wrong result; 2: invalid request.

Commands that read images or files import their modules themselves: a machine that only checks its GPU needs nothing but
torch and mpi4py.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from engines.bench.allreduce import bench_allreduce, make_allreduce_parser
from engines.bench.bubble import bench_bubble
from engines.bench.halo import bench_halo, make_halo_case, make_halo_parser
from engines.bench.memory import bench_memory
from engines.bench.overlap import bench_overlap
from engines.bench.step import (
    bench_compiled,
    bench_overhead,
    bench_step,
    bench_throughput,
    make_throughput_parser,
    make_throughput_recipe,
)
from engines.cli import options
from engines.comm.world import World
from engines.errors import CheckpointError, ImageError, PlanError, RankError, ReleasedError, TraceError
from engines.formatting import format_bytes
from engines.spatial.layout import check_fits
from engines.train.interrupts import StoppedError
from engines.train.verify import verify

__all__ = ["main"]

# PyTorch's messages: on a CPU, memory that runs out has no exception type of its own.
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)

Line = Mapping[str, object]
Command = Callable[[World, Sequence[str]], Iterable[Line]]
"""Runs on every rank, and returns the lines to print; `ok` or `valid` in a line says whether its result is right."""


def main(arguments: Sequence[str]) -> int:
    """Run one command on this rank; rank 0 prints its lines as JSON, or a one-line error."""
    words = 2 if arguments[:1] == ["bench"] else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name in ("gpu-check", "table", "published"):  # these need no ranks
        try:
            if name == "gpu-check":
                from engines.bench.gpu_check import run_gpu_checks

                return run_gpu_checks(rest)
            from engines.cli.data_commands import run_published, run_table

            (run_table if name == "table" else run_published)(rest)
            return 0
        except (PlanError, TraceError, ImageError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
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
    """Run a command, print its lines, and return whether its result is right.

    Raises PlanError if the command is unknown, and RankError if memory runs out.
    """
    if name not in _COMMANDS:
        commands = ", ".join([*_COMMANDS, "table", "published", "gpu-check"])
        raise PlanError(f"Unknown command {name[:80]!r}. Commands: {commands}.")
    try:
        right = True
        for line in _COMMANDS[name](world, arguments):
            if world.rank == 0:
                print(json.dumps(line), flush=True)
            right = right and bool(line.get("ok", line.get("valid", True)))
        return right
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


def _train(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    from engines.cli.train_command import run_train

    run_train(world, arguments)
    return ()


def _predict(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    from engines.inference.command import predict

    return [predict(world, arguments)]


def _verify(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    flags = options.make_parser("Compare a plan on the ranks with the plain model in one process.")
    given = any(argument.split("=")[0] in ("--dtype", "--precision") for argument in arguments)
    chosen = flags.parse_args([*([] if given else ["--dtype", "float64"]), *arguments])
    model, recipe = options.make_recipe(chosen, world.size, world)
    return [verify(world, recipe, model, nn.CrossEntropyLoss(), chosen.seed)]


def _bench_step(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    flags = options.make_parser("Time training steps of a plan on the ranks, and of the plain model in one process.", 5)
    flags.add_argument(
        "--in-turns",
        action="store_true",
        help="give memory back after each step: ranks and process need not fit together",
    )
    chosen = flags.parse_args(arguments)
    model, recipe = options.make_recipe(chosen, world.size, world)
    return [bench_step(world, recipe, model, chosen.iterations, chosen.seed, chosen.in_turns)]


def _bench_overlap(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    flags = options.make_parser(
        "Measure how much of the gradients' sums over ranks, or of halos, hides behind computing.", 5
    )
    flags.add_argument("--link-mbit-per-s", type=options.parse_positive, help="as if each rank were behind such a link")
    flags.add_argument("--halos", action="store_true", help="halos behind tiles' interiors, and not sums")
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    return [bench_overlap(world, recipe, chosen.iterations, chosen.seed, chosen.link_mbit_per_s, chosen.halos)]


def _bench_compiled(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    flags = options.make_parser("Time training steps with segments as PyTorch runs them, and compiled.", 5)
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    return [bench_compiled(world, recipe, chosen.iterations, chosen.seed)]


def _bench_memory(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    flags = options.make_parser("Measure the peak memory of a training step on each rank, and in one process.")
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    return [bench_memory(world, recipe, arguments, chosen.seed)]


def _bench_halo(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    chosen = make_halo_parser().parse_args(arguments)
    case = make_halo_case(chosen)
    return [bench_halo(world, case, chosen.warmup, chosen.iterations, chosen.with_compute, chosen.validate)]


def _bench_bubble(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    flags = options.make_parser("Measure how long ranks stand idle in a schedule of equal stages, beside the formula.")
    flags.add_argument(
        "--stage-seconds", type=options.parse_seconds, default=0.02, help="how long a stage takes forward"
    )
    flags.set_defaults(spatial_size=0)
    chosen = flags.parse_args(arguments)
    plan = options.make_plan(chosen)
    check_fits(plan, world.size)
    return [bench_bubble(world, plan, chosen.stage_seconds)]


def _bench_streaming(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    if world.size > 1:
        raise PlanError(f"Tiles in turn are one process's work, but there are {world.size}. Start 1.")
    from engines.bench.memory_limit import bench_streaming

    return [bench_streaming(arguments)]


def _bench_largest(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    if world.size > 1:
        raise PlanError(f"The largest image is looked for by one process, but there are {world.size}. Start 1.")
    from engines.bench.memory_limit import bench_largest

    return [bench_largest(arguments)]


def _bench_throughput(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    chosen = make_throughput_parser().parse_args(arguments)
    recipe = make_throughput_recipe(chosen, world.size, world)
    counts = chosen.warmup, chosen.num_iters, chosen.num_batches_per_iter
    return [bench_throughput(world, recipe, chosen.model, *counts, chosen.seed)]


def _bench_allreduce(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    chosen = make_allreduce_parser().parse_args(arguments)
    return bench_allreduce(world, chosen.max_bytes, chosen.iterations)


def _bench_overhead(world: World, arguments: Sequence[str]) -> Iterator[Line]:
    flags = options.FlagParser(description="Measure what an instruction of a program costs beside its kernels.")
    flags.add_argument("--iterations", type=options.parse_positive, default=7)
    chosen = flags.parse_args(arguments)
    # It needs one rank; the others wait, so that they do not take its cores.
    if world.rank == 0:
        yield bench_overhead(chosen.iterations)
    world.barrier()


def _bench_read(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    from engines.bench.read import bench_read, make_read_parser

    chosen = make_read_parser().parse_args(arguments)
    return [bench_read(world, chosen.image, chosen.slice_method, chosen.halo_px, chosen.level)]


def _bench_asynchronous(world: World, arguments: Sequence[str]) -> Iterable[Line]:
    from engines.bench import asynchronous

    chosen = asynchronous.make_parser().parse_args(arguments)
    studies = asynchronous.parse_studies(chosen, world.size)
    _, recipe = options.make_recipe(chosen, options.make_plan(chosen).ranks, world)
    return [study.line for study in asynchronous.bench_asynchronous(world, studies, recipe)]


_COMMANDS: dict[str, Command] = {
    "train": _train,
    "predict": _predict,
    "verify": _verify,
    "bench step": _bench_step,
    "bench memory": _bench_memory,
    "bench halo": _bench_halo,
    "bench bubble": _bench_bubble,
    "bench overhead": _bench_overhead,
    "bench overlap": _bench_overlap,
    "bench compiled": _bench_compiled,
    "bench streaming": _bench_streaming,
    "bench largest": _bench_largest,
    "bench throughput": _bench_throughput,
    "bench allreduce": _bench_allreduce,
    "bench read": _bench_read,
    "bench asynchronous": _bench_asynchronous,
}
