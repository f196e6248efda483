"""Stock models of other packages, as they are: three optimiser steps on tiles are those of one process."""

from __future__ import annotations

import pytest
from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.train.verify import verify
from tests.judged import prepare_with_monai_loss
from tests.stock import AS_WRITTEN, LOSSES, MORE, STOCK, VOLUMES, Stock

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages' own

MODELS = STOCK | MORE | AS_WRITTEN

CASES = [*((name, 1, stock.grid) for name, stock in MODELS.items()), *((name, 2, "2x1") for name in STOCK | AS_WRITTEN)]


def check_stock(stock: Stock, split: int, grid: str) -> None:
    pytest.importorskip(stock.package)
    flags = [*stock.make_flags(split, grid, narrow=True), "--dtype=float64", "--device=cpu"]
    chosen = options.make_parser("").parse_args(flags)
    ranks = options.make_plan(chosen).ranks
    model, recipe = options.make_recipe(chosen, ranks)
    line, *_ = run_ranks(ranks, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), chosen.seed))
    assert line["ok"], line


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "split", "grid"), CASES)
def test_three_steps_are_those_of_one_process(name: str, split: int, grid: str):
    """From the flags of the command line, over threads."""
    check_stock(MODELS[name], split, grid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("split", "grid"), [(1, "2x2x2"), (1, "1x2x3"), (2, "2x1x1")])
@pytest.mark.parametrize("name", VOLUMES)
def test_networks_of_volumes(name: str, split: int, grid: str):
    """As they are, in three dimensions, on sizes that no grid here cuts evenly."""
    check_stock(VOLUMES[name], split, grid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_monai_on_tiles(name: str):
    pytest.importorskip("monai")
    segmenter = Stock("tests.zoo:Segmenter", {}, {}, small="36x44", per_pixel=True)
    model, loss, recipe = prepare_with_monai_loss(
        name, [*segmenter.make_flags(2, "2x1", narrow=True), "--dtype=float64", "--device=cpu"]
    )
    line, *_ = run_ranks(recipe.plan.ranks, lambda world: verify(world, recipe, model, loss, 0))
    assert line["ok"], line
