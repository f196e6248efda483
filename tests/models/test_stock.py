"""Stock models of other packages, as they are: three optimiser steps on tiles are those of one process."""

from __future__ import annotations

import pytest
from torch import nn

from engines import options
from engines.bench.verify import verify
from engines.comm.loopback import run_ranks
from tests.stock import MORE, STOCK

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages' own

MODELS = STOCK | MORE

CASES = [*((name, 1, stock.grid) for name, stock in MODELS.items()), *((name, 2, "2x1") for name in STOCK)]


@pytest.mark.parametrize(("name", "split", "grid"), CASES)
def test_three_steps_are_those_of_one_process(name: str, split: int, grid: str):
    """From the flags of the command line, over threads."""
    pytest.importorskip(MODELS[name].package)
    flags = [*MODELS[name].flags(split, grid, narrow=True), "--dtype=float64", "--device=cpu"]
    chosen = options.parser("").parse_args(flags)
    ranks = options.plan(chosen).ranks
    model, recipe = options.recipe(chosen, ranks)
    line, *_ = run_ranks(ranks, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), chosen.seed))
    assert line["ok"], line
