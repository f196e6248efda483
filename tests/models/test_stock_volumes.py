"""Stock networks of volumes and signals that the command line does not make: MONAI's V-Net, SwinUNETR and 1-D ResNet.

Others are in `test_stock.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # MONAI's own

pytest.importorskip("monai")


def check_network(model: nn.Module, plan: Plan, shape: tuple[int, ...]) -> None:
    loss, plan = nn.CrossEntropyLoss(), replace(plan, precision="float64")
    recipe = prepare(model, plan, shape, loss)
    told, *_ = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))
    assert told["ok"], told


def make_vnet() -> nn.Module:
    """MONAI's V-Net, of its own blocks, with a quarter of the channels: eight copies of 45 million weights are many."""
    vnet: Any = importlib.import_module("monai.networks.nets.vnet")

    class NarrowVNet(vnet.VNet):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            act = "elu", {"inplace": True}
            self.in_tr = vnet.InputTransition(3, 1, 4, act)
            self.down_tr32 = vnet.DownTransition(3, 4, 1, act)
            self.down_tr64 = vnet.DownTransition(3, 8, 2, act)
            self.down_tr128 = vnet.DownTransition(3, 16, 3, act, dropout_prob=0.5)
            self.down_tr256 = vnet.DownTransition(3, 32, 2, act, dropout_prob=0.5)
            self.up_tr256 = vnet.UpTransition(3, 64, 64, 2, act, dropout_prob=(0.5, 0.5))
            self.up_tr128 = vnet.UpTransition(3, 64, 32, 2, act, dropout_prob=(0.5, 0.5))
            self.up_tr64 = vnet.UpTransition(3, 32, 16, 1, act)
            self.up_tr32 = vnet.UpTransition(3, 16, 8, 1, act)
            self.out_tr = vnet.OutputTransition(3, 8, 3, act)

    return NarrowVNet()


BLOCKS, UNEVEN = Plan(split_size=1, slice_method="2x2x2"), Plan(split_size=1, slice_method="1x2x3")
REPLICAS = Plan(split_size=2, slice_method="1x2x1", parts=2, schedule="1f1b", data_parallel=2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plan", "size"), [(BLOCKS, (32, 32, 32)), (UNEVEN, (16, 32, 80)), (REPLICAS, (16, 32, 32))], ids=str
)
def test_vnet(plan: Plan, size: tuple[int, int, int]):
    """Its dropout drops the same numbers on any grid; 80 columns are cut into 26, 27 and 27."""
    torch.manual_seed(0)
    check_network(make_vnet(), plan, (2, 1, *size))


@pytest.mark.nightly
@pytest.mark.parametrize(("plan", "images"), [(BLOCKS, 1), (UNEVEN, 1), (REPLICAS, 2)], ids=str)
def test_swin_unetr(plan: Plan, images: int):
    torch.manual_seed(0)
    nets: Any = importlib.import_module("monai.networks.nets")
    model = nets.SwinUNETR(in_channels=1, out_channels=3, feature_size=12, depths=(1, 1, 1, 1), spatial_dims=3)
    check_network(model, plan, (images, 1, 32, 32, 64))


@pytest.mark.parametrize("grid", ["2", "3"])
def test_resnet_on_signals(grid: str):
    torch.manual_seed(0)
    nets: Any = importlib.import_module("monai.networks.nets")
    model = nets.resnet18(spatial_dims=1, n_input_channels=2, num_classes=3, widen_factor=0.125)
    check_network(model, Plan(split_size=1, slice_method=grid), (2, 2, 101))
