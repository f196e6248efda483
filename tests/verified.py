"""`python tests/verified.py`: run `verify` over models, grids and stages, and write the README's table of them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

from engines import options
from engines.bench.gpu_check import launch

README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"(<!-- verified[^>]*-->\n).*?(<!-- /verified -->)", re.DOTALL)
SIZES = ("128", "100x132")
RESNETS = ("--model engines.models:resnet110_v2", "--model engines.models:resnet20_v1")
UNET = "--model engines.models.unet:UNet --num-classes 3"
AMOEBA = """--model engines.models:amoebanetd --model-args '{"num_layers":6,"num_filters":64}'"""

# Every model meets every grid, every number of stages and both numbers of spatial stages.
PLANS = (
    "--split-size 2 --slice-method 2x2",
    "--split-size 1 --slice-method vertical --num-spatial-parts 3",
    "--split-size 3 --slice-method 2x3",
    "--split-size 2 --spatial-size 2 --slice-method horizontal --num-spatial-parts 2",
    "--split-size 3 --spatial-size 2 --slice-method 2x2",
)


def cases() -> list[str]:
    """The arguments of each run."""
    models = [f"{model} --image-size {size}" for model in (*RESNETS, UNET) for size in SIZES]
    models.append(f"{AMOEBA} --image-size 128 --batch-size 2")
    return [f"{model} {plan}" for model in models for plan in PLANS]


def main() -> int:
    rows, good = [], True
    for case in cases():
        arguments = ["-m", "engines", "verify", *shlex.split(case)]
        ranks = _ranks(arguments)
        done = launch(ranks, arguments)
        line = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"ok": False, "grad_rel": 1.0}
        print(ranks, case, json.dumps(line), done.stderr[-300:] if not line["ok"] else "", flush=True)
        good &= bool(line["ok"])
        rows.append(f"| `-n {ranks} ... verify {case}` | {line['grad_rel']:.0e} |\n")
    README.write_text(TABLE.sub(lambda match: match[1] + "".join(rows) + match[2], README.read_text()))
    return 0 if good else 1


def _ranks(arguments: list[str]) -> int:
    return options.plan(options.parser("").parse_args(arguments[3:])).ranks


if __name__ == "__main__":
    sys.exit(main())
