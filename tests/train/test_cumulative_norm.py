"""Batch norm with momentum=None: its running statistics are the mean over all batches, on ranks as in a plain loop."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining

SHAPE, STEPS = (4, 3, 8, 12), 3
FLOAT64 = partial(Plan, precision="float64")
PLANS = {
    "tiles": FLOAT64(split_size=1, slice_method="2x2"),
    "uneven tiles": FLOAT64(split_size=1, slice_method="1x5"),
    "tiles and a stage": FLOAT64(split_size=2, slice_method="1x2", parts=2),
    "stages": FLOAT64(split_size=2, balance=(2, 1), spatial_size=0, parts=4, schedule="1f1b"),
    "replicas": FLOAT64(split_size=1, slice_method="1x2", data_parallel=2),
    "both ways": FLOAT64(split_size=2, balance=(2, 1), spatial_size=0, bidirectional=True),
    "shares": FLOAT64(split_size=2, balance=(2, 1), slice_method="1x2", local_dp=2),
    "fused": FLOAT64(split_size=1, slice_method="2x2", halo_d2=True, fused_layers=2),
}
SGD = partial(torch.optim.SGD, lr=0.05)


class Net(nn.Module):
    """One norm is used twice in a forward pass, one counts as usual; the first has seen seven batches already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.second, self.twice = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.usual = nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        self.norm.num_batches_tracked.fill_(7)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        return self.head(self.usual(self.twice(self.second(self.twice(x)).relu())))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def make_batches(plan: Plan) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    shape = (SHAPE[0] * plan.batches, *SHAPE[1:])
    return [
        (torch.randn(shape, generator=random, dtype=torch.float64), torch.randint(3, shape[:1], generator=random))
        for _ in range(STEPS)
    ]


def train_on_ranks(model: nn.Module, plan: Plan, data: list[tuple[Tensor, Tensor]]) -> list[dict[str, Tensor]]:
    """What each rank holds after the steps, by the plain model's names."""
    recipe = prepare(model, plan, SHAPE, optimiser=SGD, device="cpu")

    def train(world: LoopbackWorld) -> dict[str, Tensor]:
        training = RankTraining(world, recipe)
        for images, labels in data:
            training.step(training.cut({"images": images, "labels": labels}))
        return {name.removeprefix("model."): tensor.detach().clone() for name, tensor in training.held.items()}

    return run_ranks(plan.ranks, train)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_it_is_the_mean_of_a_plain_loop(plan: Plan):
    model, data = make_net(), make_batches(plan)
    found = train_on_ranks(copy.deepcopy(model), plan, data)
    optimiser = SGD(model.parameters())
    for images, labels in data:
        optimiser.zero_grad()
        for part, wanted in zip(images.chunk(plan.micro_batches), labels.chunk(plan.micro_batches), strict=True):
            (nn.functional.cross_entropy(model(part), wanted) / plan.micro_batches).backward()
        optimiser.step()
    assert model.twice.num_batches_tracked == 2 * STEPS * plan.micro_batches
    expected = model.state_dict()
    assert set().union(*found) == set(expected)
    for rank in found:
        for name, tensor in rank.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_each_tile_counts_for_itself_it_is_the_mean_of_all(replicas: int):
    """The norm comes first, so what it counts does not depend on weights: a closed form."""
    plan = FLOAT64(split_size=1, slice_method="1x2", parts=2, data_parallel=replicas, sync_batchnorm=False)
    model = nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = make_batches(plan)
    tiles = [tile for images, _ in data for part in images.chunk(plan.micro_batches) for tile in part.chunk(2, dim=3)]
    mean = torch.stack([tile.mean((0, 2, 3)) for tile in tiles]).mean(0)
    variance = torch.stack([tile.var((0, 2, 3)) for tile in tiles]).mean(0)
    for rank in train_on_ranks(model.double(), plan, [(images, labels % 2) for images, labels in data]):
        torch.testing.assert_close(rank["0.running_mean"], mean, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(rank["0.running_var"], variance, rtol=1e-10, atol=1e-13)


def test_a_norm_of_each_tile_beside_one_of_each_image():
    """A rank has the moments of its own micro-batches of the one, and of all micro-batches of the other."""
    plan = FLOAT64(split_size=1, slice_method="1x2", parts=2, data_parallel=2, sync_batchnorm=False)
    single = nn.InstanceNorm2d(3, track_running_stats=True).double()
    head = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(copy.deepcopy(single), nn.BatchNorm2d(3, momentum=None), *head)
    data = make_batches(plan)
    parts = [single(part) for images, _ in data for part in images.chunk(plan.micro_batches)]
    tiles = [tile for part in parts for tile in part.chunk(2, dim=3)]
    expected = {
        "0.running_mean": single.running_mean,
        "0.running_var": single.running_var,
        "1.running_mean": torch.stack([tile.mean((0, 2, 3)) for tile in tiles]).mean(0),
        "1.running_var": torch.stack([tile.var((0, 2, 3)) for tile in tiles]).mean(0),
    }
    for rank in train_on_ranks(model.double(), plan, [(images, labels % 2) for images, labels in data]):
        for name, tensor in expected.items():
            torch.testing.assert_close(rank[name], tensor, rtol=1e-10, atol=1e-13, msg=name)


def test_the_users_model_is_left_as_it_is():
    model = make_net()
    prepare(model, PLANS["tiles"], SHAPE)
    assert model.norm.momentum is None
    assert model.norm.num_batches_tracked == 7
