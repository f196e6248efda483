"""`python -m tests.verified [own] [combined] [fused] [stock] [volumes]`: runs `verify`, and writes VERIFIED.md."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from mpi4dl_nb.engines.bench.gpu_check import launch
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.program.program import count_traffic
from tests.stock import AS_WRITTEN, LOSSES, STOCK, VOLUMES, Stock

PAGE = Path(__file__).parents[1] / "VERIFIED.md"
SIZES = ("128", "100x132")
RESNETS = ("--model mpi4dl_nb:resnet110_v2", "--model mpi4dl_nb:resnet20_v1")
UNET = "--model mpi4dl_nb:UNet --num-classes 3"
AMOEBA = """--model mpi4dl_nb:amoebanetd --model-args '{"num_layers":6,"num_filters":64}' --batch-size 2"""

# Every model meets every grid, every number of stages and both numbers of spatial stages.
PLANS = {
    "2x2": "--split-size 2 --slice-method 2x2",
    "strips": "--split-size 1 --slice-method vertical --num-spatial-parts 3",
    "2x3": "--split-size 3 --slice-method 2x3",
    "2 stages of strips": "--split-size 2 --spatial-size 2 --slice-method horizontal --num-spatial-parts 2",
    "2 stages of 2x2": "--split-size 3 --spatial-size 2 --slice-method 2x2",
}
VOLUME_PLANS = {
    "2x2x2": "--split-size 1 --slice-method 2x2x2",
    "1x2x3": "--split-size 1 --slice-method 1x2x3",
    "layers": "--split-size 2 --slice-method 2x1x2",
    "pipeline": "--split-size 2 --slice-method 2x1x2 --parts 2 --schedule 1f1b",
    "replicas": "--split-size 1 --slice-method 1x2x2 --data-parallel 2",
}
TILES = "--split-size 3 --slice-method 2x2"
GEMS = "--bidirectional --times 2 --schedule gems"
COMBINED = {
    "layers (LP)": "--split-size 3 --spatial-size 0",
    "layers, pipelined (PP)": "--split-size 4 --spatial-size 0 --parts 4 --schedule 1f1b",
    "interleaved": "--split-size 6 --spatial-size 0 --parts 4 --schedule interleaved --stages-per-rank 2",
    "zero bubble": "--split-size 4 --spatial-size 0 --parts 4 --schedule zero_bubble",
    "bidirectional (GEMS)": f"--split-size 4 --spatial-size 0 {GEMS}",
    "data (DP)": "--split-size 1 --spatial-size 0 --data-parallel 4",
    "tiles + layers (SP+LP)": TILES,
    "tiles + pipeline (SP+PP)": f"{TILES} --parts 4 --schedule 1f1b",
    "tiles + replicas (SP+DP)": "--split-size 2 --slice-method 2x2 --data-parallel 2",
    "tiles + GEMS + layers (SP+GEMS+LP)": f"{TILES} {GEMS}",
    "tiles + GEMS + pipeline (SP+GEMS+PP)": f"{TILES} --parts 2 {GEMS}",
    "tiles + shared batch behind (local DP)": "--split-size 2 --slice-method 2x2 --local-dp 4",
    "layers + GEMS + replicas (GEMS-Hybrid)": f"--split-size 3 --spatial-size 0 {GEMS} --data-parallel 2",
    "all five": "--split-size 3 --slice-method 1x2 --parts 2 --schedule 1f1b --bidirectional --data-parallel 2",
    "all five, fused halos, shared batch, computed again": (
        "--split-size 3 --slice-method 1x2 --parts 2 --local-dp 2 --bidirectional --data-parallel 2 "
        "--halo-d2 --fused-layers 2 --checkpoint-activations"
    ),
    "tiles + pipeline, activations in a file": f"{TILES} --parts 4 --schedule 1f1b --offload-activations",
}
WRONG = "wrong"
STOCK_PLANS = ((2, "2x2"), (1, "1x3"), (1, "3x1"), (2, "2x3"), (1, "1x5"))  # stages, tiles
FUSED = {"before each layer": "", **{f"k = {k}": f"--halo-d2 --fused-layers {k}" for k in (1, 2, 3, 4)}}


def make_own_rows() -> Iterator[str]:
    """One model and size in each row, one plan in each column."""
    yield _make_head(PLANS)
    for model, size in (*product((*RESNETS, UNET), SIZES), (AMOEBA, "128")):
        flags = shlex.split(f"{model} --image-size {size}")
        cells = [measure_gradient_error([*flags, *shlex.split(plan)]) for plan in PLANS.values()]
        yield f"| `{model}` | {size} | {' | '.join(cells)} |\n"
    yield from _list_plans(PLANS)


def make_volume_rows() -> Iterator[str]:
    """One network of volumes in each row, one plan in each column."""
    yield _make_head(VOLUME_PLANS)
    for name, stock in VOLUMES.items():
        # A later `--split-size` and `--slice-method` replace those of the network's own flags.
        flags = [flag for flag in stock.make_flags(1, "2x2x2", narrow=True) if "spatial-size" not in flag]
        cells = [measure_gradient_error([*flags, *shlex.split(plan)]) for plan in VOLUME_PLANS.values()]
        yield f"| MONAI {name} | {stock.small} | {' | '.join(cells)} |\n"
    yield from _list_plans(VOLUME_PLANS)


def _make_head(plans: Iterable[str]) -> str:
    heads = ["largest gradient error seen", "image", *plans]
    return f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"


def _list_plans(plans: Mapping[str, str]) -> Iterator[str]:
    """What the heads of the columns mean."""
    yield "\n"
    for name, plan in plans.items():
        yield f"- {name}: `{plan}`\n"


def make_stock_rows() -> Iterator[str]:
    """One model in each row, one plan in each column."""
    yield _make_head(f"{grid}, {split} stage{'s' if split > 1 else ''}" for split, grid in STOCK_PLANS)
    for name, stock in (STOCK | AS_WRITTEN).items():
        cells = [measure_gradient_error(stock.make_flags(*plan)) for plan in STOCK_PLANS]
        yield f"| {name} | {stock.size} | {' | '.join(cells)} |\n"
    for loss in LOSSES:
        segmenter = Stock("tests.zoo:Segmenter", {}, {}, per_pixel=True)
        cells = [
            measure_gradient_error([*segmenter.make_flags(*plan), "--dtype=float64"], loss) for plan in STOCK_PLANS
        ]
        yield f"| U-Net with MONAI {loss} | {segmenter.size} | {' | '.join(cells)} |\n"


def make_combined_rows() -> Iterator[str]:
    """One combination of parallelisms in each row."""
    head = "| combination | flags of `verify`, on as many ranks as it needs | largest gradient error seen |"
    yield f"{head}\n|---|---|---|\n"
    for name, plan in COMBINED.items():
        flags = shlex.split(f"--model mpi4dl_nb:resnet20_v1 --image-size 100x132 --batch-size 4 {plan}")
        yield f"| {name} | `-n {_count_ranks(flags)} ... {plan}` | {measure_gradient_error(flags)} |\n"


def make_fused_rows() -> Iterator[str]:
    """One model in each row, a number of fused layers in each column."""
    head = "| largest gradient error seen; halo messages of all ranks in a step | image |"
    yield f"{head} {' | '.join(FUSED)} |\n|{'---|' * (2 + len(FUSED))}\n"
    for model, size in ((RESNETS[0], "64"), (AMOEBA, "128")):
        rows = [
            shlex.split(f"{model} --image-size {size} --split-size 2 --slice-method 2x2 {k}") for k in FUSED.values()
        ]
        cells = [f"{measure_gradient_error(flags)}; {count_halo_messages(flags)}" for flags in rows]
        yield f"| `{model}` | {size} | {' | '.join(cells)} |\n"


def count_halo_messages(flags: Sequence[str]) -> int:
    """That all ranks send in a training step, forward and back."""
    _, recipe = options.make_recipe(options.make_parser("").parse_args(flags), _count_ranks(flags))
    programs = compile_plan(recipe.graph, recipe.plan)
    return sum(found["halo"].messages for found in map(count_traffic, programs) if "halo" in found)


def measure_gradient_error(flags: Sequence[str], loss: str = "") -> str:
    """Of one run of `verify`, with a loss of MONAI's if one is named; where that finds anything wrong, it says so."""
    ranks = _count_ranks(flags)
    done = launch(
        ranks, ["-m", "tests.judged", loss, *flags] if loss else ["-m", "mpi4dl_nb.engines", "verify", *flags]
    )
    line = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"ok": False}
    print(ranks, shlex.join(flags), json.dumps(line), "" if line["ok"] else done.stderr[-300:], flush=True)
    return f"{line['grad_rel']:.0e}" if line["ok"] else WRONG


def _count_ranks(flags: Sequence[str]) -> int:
    return options.make_plan(options.make_parser("").parse_args(flags)).ranks


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "own": make_own_rows, "combined": make_combined_rows, "fused": make_fused_rows, "stock": make_stock_rows,
    "volumes": make_volume_rows,
}  # fmt: skip


def main(names: Sequence[str]) -> int:
    """Write the tables of those names, or all; 0 if nothing in them is wrong."""
    made = {name: "".join(TABLES[name]()) for name in names or TABLES}
    for name, table in made.items():
        place = re.compile(rf"(<!-- verified {name}[^>]*-->\n).*?(<!-- /verified -->)", re.DOTALL)
        PAGE.write_text(place.sub(lambda match, table=table: match[1] + table + match[2], PAGE.read_text()))
    return int(any(WRONG in table for table in made.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
