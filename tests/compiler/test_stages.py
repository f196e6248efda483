"""A model as layers, and layers as stages: counts of known models, and the balance against all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.compiler.stages import Layer, cut_stages, find_layers
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.models import amoebanetd, resnet20_v1, resnet110_v2
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare


class UNet(nn.Module):
    """Everything in one forward, with a value that skips over the middle: (N, 3, H, W) -> (N, 5, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.join = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = F.relu(self.middle(F.max_pool2d(skip, 2)))
        return self.head(F.relu(self.join(torch.cat([self.up(x), skip], dim=1))))


class Wrapped(nn.Module):
    """What people put around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x / 255)


class Level(nn.Module):
    """A U-Net as some packages write it: each level holds the ones below, and hands its input past them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
        self.below = Level(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.cat([x, self.below(self.down(x))], dim=1))


def make_nested_unet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Level(5))


@cache
def trace_model(make: Callable[[], nn.Module]) -> ModelGraph:
    return trace(
        make(),
        lambda prediction, labels: prediction.sum(),
        TensorSpec((1, 3, 64, 64), "float32"),
        TensorSpec((1,), "int64"),
    )


def make_amoebanet() -> nn.Module:
    return amoebanetd(6, 64)


def make_wrapped_unet() -> nn.Module:
    return Wrapped(UNet())


MODELS = pytest.mark.parametrize(
    ("make", "count"),
    [(resnet20_v1, 11), (resnet110_v2, 38), (make_amoebanet, 12), (UNet, 5)],
    ids=["resnet20_v1", "resnet110_v2", "amoebanetd(6, 64)", "U-Net"],
)


@pytest.mark.sampled(1)
@MODELS
def test_layers_of_known_models(make: Callable[[], nn.Module], count: int):
    """A stem, the blocks or cells, and a head; a U-Net has a layer for each convolution."""
    assert len(find_layers(trace_model(make))) == count


@pytest.mark.sampled(1)
@MODELS
def test_layers_hold_every_node_once_and_in_order(make: Callable[[], nn.Module], count: int):
    graph, found = trace_model(make), find_layers(trace_model(make))
    assert found[0].nodes.start == 0
    assert found[-1].nodes.stop == len(graph.nodes)
    assert all(one.nodes.stop == other.nodes.start for one, other in pairwise(found))
    assert all(found)
    for layer in found:
        inside = graph.nodes[layer.nodes.start : layer.nodes.stop]
        assert layer.flops == sum(node.flops for node in inside)
        assert any(
            len(graph.weights[name].shape) > 1 for node in inside for name in node.reads if name in graph.weights
        )


def test_layers_are_named_as_the_user_named_their_modules():
    assert [layer.name for layer in find_layers(trace_model(UNet))] == ["down", "middle", "up", "join", "head"]
    names = [layer.name for layer in find_layers(trace_model(resnet20_v1))]
    assert names == ["stem.0", *(f"blocks.{block}" for block in range(9)), "head.2"]


def test_a_residual_block_is_not_cut():
    """Inside it a cut would carry two tensors."""
    graph = trace_model(resnet20_v1)
    homes = {}
    for layer in find_layers(graph):
        for node in graph.nodes[layer.nodes.start : layer.nodes.stop]:
            if node.module.startswith("blocks."):
                homes.setdefault(".".join(node.module.split(".")[:2]), set()).add(layer.name)
    assert len(homes) == 9
    assert all(names == {block} for block, names in homes.items())


def test_a_wrapper_around_a_model_does_not_change_its_layers():
    assert [layer.flops for layer in find_layers(trace_model(make_wrapped_unet))[1:]] == [
        layer.flops for layer in find_layers(trace_model(UNet))[1:]
    ]


def test_levels_that_lie_in_each_other_are_layers_of_their_own():
    """The outer ones do most of the work, so they are opened; what is small enough is a block."""
    found = find_layers(trace_model(make_nested_unet))
    assert max(layer.flops for layer in found) < sum(layer.flops for layer in found) / 2
    assert [layer.name for layer in found] == [
        "0",
        "1.down",
        "1.below.down",
        "1.below.below.down",
        "1.below.below.below",
        "1.below.below.up",
        "1.below.up",
        "1.up",
    ]


# ---- stages


def trace_chain(widths: Sequence[int]) -> ModelGraph:
    """One convolution after another: the FLOPs of layer i are in proportion to widths[i] * widths[i + 1]."""
    convolutions = [nn.Conv2d(a, b, 1) for a, b in pairwise(widths)]
    return trace(
        nn.Sequential(*convolutions),
        lambda prediction, labels: prediction.sum(),
        TensorSpec((1, widths[0], 4, 4), "float32"),
        TensorSpec((1,), "int64"),
    )


def compute_largest_cost(found: Sequence[Layer], balance: Sequence[int], plan: Plan) -> float:
    """FLOPs per tile of the stage that has most."""
    ends = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return max(
        sum(layer.cost for layer in found[end - count : end]) / grid.tiles
        for end, count, grid in zip(ends, balance, plan.grids, strict=True)
    )


def count_layers(found: Sequence[Layer], plan: Plan, graph: ModelGraph) -> list[int]:
    """How many layers each stage got."""
    return [sum(1 for layer in found if layer.nodes and span & layer.nodes) for span in cut_stages(found, plan)]


@pytest.mark.nightly
@settings(max_examples=60)
@given(
    widths=st.lists(st.integers(1, 9), min_size=3, max_size=9),
    stages=st.integers(1, 4),
    spatial=st.integers(0, 4),
    grids=st.tuples(*[st.sampled_from(["1x2", "2x2", "3x3", "2x3"])] * 4),
)
def test_auto_balance_is_as_good_as_any(widths: list[int], stages: int, spatial: int, grids: tuple[str, ...]):
    graph = trace_chain(widths)
    found = find_layers(graph)
    assert len(found) == len(widths) - 1
    assume(stages <= len(found) and spatial <= stages)
    plan = Plan(split_size=stages, spatial_size=spatial, slice_method=grids[:spatial])
    chosen = count_layers(found, plan, graph)
    assert sum(chosen) == len(found)
    every = [
        [stop - start for start, stop in pairwise((0, *ends, len(found)))]
        for ends in combinations(range(1, len(found)), stages - 1)
    ]
    assert chosen in every
    assert compute_largest_cost(found, chosen, plan) == min(
        compute_largest_cost(found, balance, plan) for balance in every
    )


def test_a_given_balance_is_kept():
    graph = trace_model(resnet20_v1)
    for balance in ((1, 10), (10, 1), (4, 7)):
        plan = Plan(split_size=2, spatial_size=1, balance=balance)
        assert tuple(count_layers(find_layers(graph), plan, graph)) == balance
        first, second = cut_stages(find_layers(graph), plan)
        assert (first.start, first.stop, second.stop) == (0, second.start, len(graph.nodes))


def test_a_balance_that_does_not_add_up():
    with pytest.raises(PlanError, match=r"balance=\(5, 5\) adds up to 10 layers but the model has 11\. Make it add up"):
        cut_stages(find_layers(trace_model(resnet20_v1)), Plan(split_size=2, spatial_size=1, balance=(5, 5)))


def test_more_stages_than_layers():
    with pytest.raises(PlanError, match=r"split_size=6 but the model has only 5 layers\. Use split_size <= 5"):
        cut_stages(find_layers(trace_model(UNet)), Plan(split_size=6, spatial_size=1))


@pytest.mark.nightly
def test_stages_are_the_same_in_every_precision():
    """`verify` runs a plan in float64 on the ranks that hold its float32 weights."""
    for model in (resnet20_v1(), resnet110_v2()):
        cuts = {
            cut_stages(find_layers(prepare(model, replace(plan, precision=precision), (1, 3, 32, 32)).graph), plan)
            for plan in [Plan(split_size=3, spatial_size=0)]
            for precision in ("float32", "float64")
        }
        assert len(cuts) == 1
