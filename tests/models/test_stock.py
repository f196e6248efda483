"""Stock models of other packages, as they are: three optimiser steps on tiles are those of one process."""

from __future__ import annotations

import pytest
from torch import nn

from engines import options
from engines.bench.verify import verify
from engines.comm.loopback import run_ranks
from tests.stock import MORE, STOCK

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages' own

UNEVEN = "--split-size 1 --slice-method 1x3"
STAGES = "--split-size 2 --slice-method 2x2"


MODELS = STOCK | MORE
CASES = [*((name, UNEVEN) for name in MODELS), *((name, STAGES) for name in STOCK)]


def _plan(name: str, plan: str) -> list[str]:
    """Models that answer for each pixel stay tiled to the loss."""
    chosen = options.plan(options.parser("").parse_args(plan.split()))
    return [*plan.split(), *([f"--spatial-size={chosen.split_size}"] if MODELS[name].per_pixel else [])]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_three_steps_are_those_of_one_process(name: str, plan: str):
    """From the flags of the command line, over threads."""
    pytest.importorskip(MODELS[name].package)
    flags = [*MODELS[name].flags(narrow=True), *_plan(name, plan), "--dtype=float64", "--device=cpu"]
    chosen = options.parser("").parse_args(flags)
    ranks = options.plan(chosen).ranks
    model, recipe = options.recipe(chosen, ranks)
    line, *_ = run_ranks(ranks, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), chosen.seed))
    assert line["ok"], line
