"""The commands, each run on every rank. Exit codes: 0: success; 1: it ran, with a wrong result; 2: invalid request.

A command's module is imported when it runs: a machine that only checks its GPU needs nothing but torch and mpi4py.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.errors import Mpi4dlError, PlanError, RankError, ReleasedError
from mpi4dl_nb.engines.formatting import describe_unknown, format_bytes
from mpi4dl_nb.engines.train.interrupts import StoppedError
from mpi4dl_nb.engines.train.verify import verify

if TYPE_CHECKING:
    from mpi4dl_nb.engines.comm.mpi import MpiWorld
    from mpi4dl_nb.engines.predict.published_replay import ReplayOutcome

_COMMANDS = {
    "train": "mpi4dl_nb.engines.cli.train_command:run_train",
    "predict": "mpi4dl_nb.engines.cli.predict_command:predict",
    "verify": f"{__name__}:run_verify",
    "bench step": "mpi4dl_nb.engines.bench.step:run_bench_step",
    "bench memory": "mpi4dl_nb.engines.bench.memory:run_bench_memory",
    "bench halo": "mpi4dl_nb.engines.bench.halo:run_bench_halo",
    "bench bubble": "mpi4dl_nb.engines.bench.bubble:run_bench_bubble",
    "bench overhead": "mpi4dl_nb.engines.bench.step:run_bench_overhead",
    "bench overlap": "mpi4dl_nb.engines.bench.communication:run_bench_overlap",
    "bench compiled": "mpi4dl_nb.engines.bench.step:run_bench_compiled",
    "bench streaming": "mpi4dl_nb.engines.bench.memory_limit:bench_streaming",
    "bench largest": "mpi4dl_nb.engines.bench.memory_limit:bench_largest",
    "bench throughput": "mpi4dl_nb.engines.bench.step:run_bench_throughput",
    "bench allreduce": "mpi4dl_nb.engines.bench.communication:run_bench_allreduce",
    "bench read": "mpi4dl_nb.engines.bench.read:run_bench_read",
    "bench asynchronous": "mpi4dl_nb.engines.bench.asynchronous:run_bench_asynchronous",
}
"""MODULE:FUNCTION of a world and the flags, which returns the line to print, several, or None.

`ok` or `valid` in a line says whether its result is right.
"""

_WITHOUT_RANKS = {
    "table": f"{__name__}:run_table",
    "published": f"{__name__}:run_published",
    "plans": "mpi4dl_nb.engines.cli.plans_command:run_plans",
    "gpu-check": "mpi4dl_nb.engines.bench.gpu_check:run_gpu_checks",
}
"""MODULE:FUNCTION of the flags, which returns the exit code."""

# How the variables begin that mpiexec or a batch system gives to the processes that it starts.
_LAUNCHED = ("OMPI_COMM_", "PMIX_", "PMI_", "SLURM_PROCID")
_TRANSPORTS = "OMPI_MCA_btl"
# PyTorch's messages: on a CPU, memory that runs out has no exception type of its own.
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory|bad_alloc", re.IGNORECASE)


def main(arguments: Sequence[str]) -> int:
    """Run one command on this rank; rank 0 prints its lines as JSON, or a one-line error."""
    words = 2 if arguments[:1] == ["bench"] else 1
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name in _WITHOUT_RANKS:
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") != "0":  # -n 4: one rank is enough, the others leave it to it
            return 0
        try:
            return int(_import_command(_WITHOUT_RANKS[name])(rest))
        except Mpi4dlError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
    world = _join_world()
    if world.rank:
        # Every rank runs the same command, and would print the same lines.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (only rank 0 prints, whatever the user's model prints)
    try:
        world.exit_process(0 if _run_command(name, world, rest) else 1)
    except StoppedError as stopped:  # raised on every rank; the exit code is a shell's code for the signal
        _print_error(world, str(stopped))
        world.exit_process(128 + stopped.number)
    except RankError as error:  # raised on one rank; `revoke` releases the others
        # Released ranks print nothing; the failed rank prints the cause.
        if not isinstance(error, ReleasedError):
            print(f"rank {world.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        world.revoke()
        os._exit(1)
    except Mpi4dlError as error:  # raised on every rank alike
        _print_error(world, f"{type(error).__name__}: {error}")
        world.exit_process(2)


def _join_world() -> MpiWorld:
    # For a rank that is alone Open MPI makes shared memory all the same, 16 MB, and leaves it when the rank ends.
    is_alone = _TRANSPORTS not in os.environ and not any(name.startswith(_LAUNCHED) for name in os.environ)
    if is_alone:
        os.environ[_TRANSPORTS] = "self"
    from mpi4dl_nb.engines.comm.mpi import MpiWorld

    world = MpiWorld()
    if is_alone:
        del os.environ[_TRANSPORTS]  # what this process starts may be ranks that are not alone
    return world


def _run_command(name: str, world: World, arguments: Sequence[str]) -> bool:
    """Run a command, print its lines, and return whether its result is right.

    Raises PlanError if the command is unknown, and RankError if memory runs out.
    """
    if name not in _COMMANDS:
        raise PlanError(describe_unknown(f"Unknown command {name[:80]!r}", name[:80], [*_COMMANDS, *_WITHOUT_RANKS]))
    try:
        right, output = True, _import_command(_COMMANDS[name])(world, arguments)
        for line in [output] if isinstance(output, Mapping) else output or ():
            if world.rank == 0:
                print(json.dumps(line), flush=True)
            right = right and bool(line.get("ok", line.get("valid", True)))
        return right
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RankError) or not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        size = f" ({format_bytes(int(asked[1]))} were asked for at once)" if asked else ""
        raise RankError(
            f"there is not enough memory for what the flags ask{size}. Use more ranks or tiles, or smaller images."
        ) from error


def _import_command(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _print_error(world: World, text: str) -> None:
    if world.rank == 0:
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def run_verify(world: World, arguments: Sequence[str]) -> Mapping[str, object]:
    """Compare a plan on the ranks with one process, in float64 unless the flags name a precision."""
    flags = options.make_parser("Compare a plan on the ranks with the plain model in one process, with cross-entropy.")
    has_precision = any(argument.split("=")[0] in ("--dtype", "--precision") for argument in arguments)
    chosen = flags.parse_args([*([] if has_precision else ["--dtype", "float64"]), *arguments])
    model, recipe = options.make_recipe(chosen, world.size, world)
    return verify(world, recipe, model, nn.CrossEntropyLoss(), chosen.seed)


# The commands `table` and `published`, which need no ranks, as `plans` does.


def run_table(arguments: Sequence[str]) -> int:
    """Make a table of images from other tools' files, and print its number of images.

    Raises ImageError or PlanError if the table cannot be made.
    """
    from mpi4dl_nb.engines.images.folder import write_boxes_table, write_masks_table

    flags = options.FlagParser("table", description="Write a table of images that `train --app medical` takes.")
    kinds = flags.add_subparsers(required=True, metavar="KIND", parser_class=options.FlagParser)
    masks = kinds.add_parser("masks", help="images, and masks with the same names in another folder")
    masks.add_argument("images", type=Path)
    masks.add_argument("masks", type=Path)
    masks.add_argument("table", type=Path, help="the .csv file to write")
    masks.set_defaults(make=lambda chosen: write_masks_table(chosen.images, chosen.masks, chosen.table))
    boxes = kinds.add_parser("boxes", help="crops around the boxes of a folder in Pascal VOC's format")
    boxes.add_argument("folder", type=Path, help="with Annotations, ImageSets and JPEGImages in it")
    boxes.add_argument("list", help="which images, such as train")
    boxes.add_argument("table", type=Path, help="the .csv file to write")
    boxes.add_argument("--crop-px", type=options.parse_positive, default=96, help="height and width of a crop")
    boxes.add_argument("--most", type=options.parse_positive, help="the most boxes of one class from one image")
    boxes.set_defaults(
        make=lambda chosen: write_boxes_table(chosen.folder, chosen.list, chosen.table, chosen.crop_px, chosen.most)
    )
    chosen = flags.parse_args(arguments)
    print(f"{chosen.table}: {chosen.make(chosen)} images")
    return 0


def run_published(arguments: Sequence[str]) -> int:
    """Compare published results to the simulator's: print one line of JSON per row, and a table.

    Raises PlanError or TraceError if a row cannot be simulated.
    """
    from mpi4dl_nb.engines.predict.published import PUBLISHED
    from mpi4dl_nb.engines.predict.published_replay import PublishedReplay

    flags = options.FlagParser(
        "published", description="Simulate published results and compare with their numbers; print all assumptions."
    )
    flags.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="rows whose names begin with NAME")
    chosen = tuple(flags.parse_args(arguments).only)
    rows = [row for row in PUBLISHED if row.name.startswith(chosen)]
    if not rows:
        raise PlanError(f"No row begins with {' or '.join(chosen)}. There are {', '.join(r.name for r in PUBLISHED)}.")
    outcomes, replay = [], PublishedReplay()
    for row in rows:
        outcomes.append(replay.simulate_result(row))
        print(json.dumps(outcomes[-1].line), flush=True)
    print(format_outcomes(outcomes))
    return 0


def format_outcomes(outcomes: Sequence[ReplayOutcome]) -> str:
    """Format simulated and published values, and the range over each row's variants that fit the machine."""
    lines = [f"{'row':24}{'published':>12}{'simulated':>12}{'ratio':>8}  {'range':20}{'peak':>10}  unit"]
    for outcome in outcomes:
        fitting = [value for _, value, fits in outcome.varied if fits]
        low, high = min([outcome.simulated, *fitting]), max([outcome.simulated, *fitting])
        span = f"{low:.4g} to {high:.4g}" if fitting else ""
        peak = f"{format_bytes(outcome.peak_bytes)}{'' if outcome.peak_bytes <= outcome.memory_bytes else '!'}"
        lines.append(
            f"{outcome.row.name:24}{outcome.row.published:12.5g}{outcome.simulated:12.5g}{outcome.ratio:8.2f}"
            f"  {span:20}{peak:>10}  {outcome.row.measure}"
        )
        if outcome.row.why or not outcome.agrees:
            lines.append(f"    {outcome.row.why or 'Why they disagree is not known.'}")
        if outcome.peak_bytes > outcome.memory_bytes:
            lines.append(f"    ! does not fit the {format_bytes(outcome.memory_bytes)} of a rank")
    return "\n".join(lines)
