"""`sync_batchnorm=False`: each tile is normalised by itself, exactly so, and not as one process does it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.instructions import AllReduce
from mpi4dl_nb.engines.train.oracle import Comparison, ReferenceTraining, TrainingRecord, compare, train_reference
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, record_rank_run

APART = {"sync_batchnorm": False, "precision": "float64"}


class TileNorm(nn.Module):
    """Batch norm in one process as tiles do it alone; what it counts is the mean over them."""

    def __init__(self, norm: nn.BatchNorm2d, grid: Grid) -> None:
        super().__init__()
        self.grid, self.momentum, self.eps = grid, norm.momentum, norm.eps
        self.weight, self.bias = norm.weight, norm.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))

    def forward(self, x: Tensor) -> Tensor:
        made, before = torch.empty_like(x), (self.running_mean.clone(), self.running_var.clone())
        counted = []
        for tile in self.grid.cut(*x.shape[-2:]):
            own = [buffer.clone() for buffer in before]
            part = x[..., tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]
            made[..., tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop] = functional.batch_norm(
                part, *own, self.weight, self.bias, True, self.momentum, self.eps
            )
            counted.append(own)
        self.running_mean.copy_(torch.stack([mean for mean, _ in counted]).mean(0))
        self.running_var.copy_(torch.stack([variance for _, variance in counted]).mean(0))
        self.num_batches_tracked.add_(1)
        return made


def replace_norms(model: nn.Module, grid: Grid) -> nn.Module:
    """The same model, every batch norm by tiles; names stay."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, TileNorm(child, grid))
    return twin


def train_on_ranks(recipe: Recipe, whole: list[dict[str, Tensor]]) -> list[TrainingRecord]:
    def train(world: LoopbackWorld) -> TrainingRecord:
        training = RankTraining(world, recipe)
        return record_rank_run(training, map(training.cut, whole))

    return run_ranks(recipe.plan.ranks, train)


def compare_with_one_process(plan: Plan, make=resnet20_v1, shape=(2, 3, 22, 18)) -> tuple[Comparison, Comparison]:
    """The ranks against one process that normalises by tiles, and against the plain one."""
    torch.manual_seed(0)
    model, loss = make(), nn.CrossEntropyLoss()
    recipe = prepare(model, plan, shape, device="cpu")
    whole = make_batches(recipe, seed=0)
    records = train_on_ranks(recipe, whole)
    oracles = (replace_norms(model, plan.grids[0]), model)
    count = plan.micro_batches
    alone = (
        ReferenceTraining(oracle, loss, recipe.optimiser, torch.float64, micro_batches=count) for oracle in oracles
    )
    tiled, plain = (compare(train_reference(each, whole), records) for each in alone)
    return tiled, plain


@pytest.mark.nightly
@pytest.mark.parametrize("grid", ["2x2", "1x3", "3x1"])
def test_each_tile_is_normalised_by_itself(grid: str):
    tiled, plain = compare_with_one_process(Plan(split_size=1, slice_method=grid, **APART))
    assert tiled.worst <= 1e-10, tiled
    assert plain.grad_rel > 0.1, "this is why it is not the default"


@pytest.mark.nightly
def test_each_micro_batch_is_counted():
    tiled, _ = compare_with_one_process(Plan(split_size=1, slice_method="2x2", parts=2, **APART), shape=(4, 3, 22, 18))
    assert tiled.worst <= 1e-10, tiled


class Two(nn.Module):
    """A norm in each of two stages: the second one sees the whole image again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.one(self.first(x)))
        return self.two(self.second(x)).relu().mean((2, 3))


def test_behind_the_joint_there_is_one_tile():
    plan = Plan(split_size=2, slice_method="2x2", balance=(1, 1), **APART)
    torch.manual_seed(0)
    model, loss = Two(), nn.CrossEntropyLoss()
    recipe = prepare(model, plan, (2, 3, 8, 6), device="cpu")
    whole = make_batches(recipe, seed=0)
    oracle = copy.deepcopy(model)
    oracle.one = TileNorm(oracle.one, plan.grids[0])
    record = train_reference(ReferenceTraining(oracle, loss, recipe.optimiser, torch.float64), whole)
    assert compare(record, train_on_ranks(recipe, whole)).worst <= 1e-10


def test_no_message_is_sent_for_it_going_forward():
    def count_sums(**choices) -> int:
        plan = Plan(split_size=1, slice_method="2x2", **choices)
        recipe = prepare(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)), plan, (2, 3, 8, 8))
        return sum(isinstance(item, AllReduce) for item in compile_plan(recipe.graph, plan)[0].forward)

    assert count_sums(sync_batchnorm=False) == count_sums() - 1


@pytest.mark.nightly
@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_the_running_statistics_stay_the_same(replicas: int):
    plan = Plan(split_size=1, slice_method="2x1", data_parallel=replicas, **APART)
    recipe = prepare(resnet20_v1(), plan, (2, 3, 16, 16), device="cpu")
    records = train_on_ranks(recipe, make_batches(recipe, seed=0))
    for record in records[1:]:
        assert all(torch.equal(record.buffers[name], buffer) for name, buffer in records[0].buffers.items())
