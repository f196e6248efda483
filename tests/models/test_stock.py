"""Stock models of other packages, as they are: three optimiser steps on tiles are those of one process."""

from __future__ import annotations

import pytest
from torch import nn

from engines import options
from engines.bench.verify import verify
from engines.comm.loopback import run_ranks
from engines.errors import TraceError
from tests.stock import MORE, STOCK

pytestmark = pytest.mark.filterwarnings("ignore")  # those packages' own

MODELS = STOCK | MORE

# Operators that still lack an entry: whoever writes one strikes its models here.
AWAITED = {
    "MONAI UNet": "instance_norm",
    "MONAI AttentionUnet": "instance_norm",
    "MONAI BasicUNet": "instance_norm, pad by nothing",
    "MONAI BasicUNetPlusPlus": "instance_norm, pad by nothing",
    "MONAI SegResNet": "group_norm, upsample_bilinear2d",
    "MONAI DynUNet": "instance_norm",
    "MONAI FlexibleUNet": "cat with zeros of as many pixels, pad by nothing",
    "MONAI HighResNet": "to.device, pad of channels",
    "transformers BiT": "group_norm",
    "transformers ConvNeXt": "layer_norm",
    "transformers ConvNeXt V2": "layer_norm, linalg_vector_norm",
    "transformers MobileNetV2": "dropout",
    "transformers PoolFormer": "group_norm",
    "transformers UperNet": "layer_norm, upsample_bilinear2d",
}


def _case(name: str, split: int, grid: str) -> object:
    missing = AWAITED.get(name)
    marks = [pytest.mark.xfail(raises=TraceError, strict=True, reason=missing)] if missing else []
    return pytest.param(name, split, grid, id=f"{name}, {split} x {grid}", marks=marks)


CASES = [*(_case(name, 1, stock.grid) for name, stock in MODELS.items()), *(_case(name, 2, "2x1") for name in STOCK)]


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
