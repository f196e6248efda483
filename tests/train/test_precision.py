"""Half precision: casts as data, float32 masters, and no further from float64 than one process under autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.stages import find_layers
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.instructions import AllReduce
from mpi4dl_nb.engines.program.update import SCALE
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, record_rank_run, verify

HALVES = ["bfloat16", "float16"]
MODELS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet20_v1, "unet": lambda: UNet(num_classes=3, width=8)}
PLANS = {
    "2x2 tiles and a stage": {"split_size": 2, "slice_method": "2x2"},
    "1x3 tiles to the loss": {"split_size": 1, "slice_method": "1x3"},
    "2x2 tiles, fused halos": {"split_size": 2, "slice_method": "2x2", "halo_d2": True, "fused_layers": 2},
}


def make_recipe(model: nn.Module, precision: str, shape=(4, 3, 40, 36), clip_norm=None, **choices) -> Recipe:
    plan = Plan(precision=precision, **choices)
    return prepare(model, plan, shape, device="cpu", clip_norm=clip_norm)


def trace_half(model: nn.Module, image: tuple[int, ...], labels: TensorSpec, loss=functional.mse_loss) -> ModelGraph:
    return trace(model, loss, TensorSpec(image, "float32"), labels, "bfloat16")


# ---- numbers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_are_no_further_off_than_four_times_one_process(name: str, plan: str, precision: str):
    """Three steps, against one process in float64: gradients, running statistics, weights, losses."""
    torch.manual_seed(0)
    model = MODELS[name]()
    recipe = make_recipe(model, precision, **PLANS[plan])
    ranks = recipe.plan.ranks
    line, *_ = run_ranks(ranks, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), seed=0))
    assert line["ok"], line
    assert line["one_process"]["grad_rel"] > 1e-3, "half precision is not float32"


ORDERS: dict[str, dict[str, object]] = {
    "micro-batches": {"parts": 2, "schedule": "1f1b"},
    "weights apart": {"parts": 2, "schedule": "zero_bubble"},
    "both directions": {"bidirectional": True},
    "replicas": {"data_parallel": 2, "slice_method": "1x2"},
    "shares": {"local_dp": 2, "checkpoint_activations": True},
}


@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_work(order: str):
    """In float16, whose scaled gradients add up over micro-batches, copies and shares."""
    torch.manual_seed(0)
    model = resnet20_v1()
    recipe = make_recipe(model, "float16", clip_norm=0.5, **({"split_size": 2, "slice_method": "2x2"} | ORDERS[order]))
    line, *_ = run_ranks(
        recipe.plan.ranks, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), seed=0)
    )  # fmt: skip
    assert line["ok"], line


class Sums(nn.Module):
    """Norms, resampling and reductions that are sums over tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(8)])
        self.wide, self.head = nn.LayerNorm([8, 20, 18]), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.gelu(self.norms[0](self.first(x))), 2)
        x = functional.interpolate(self.norms[1](self.wide(x)), scale_factor=1.5, mode="bilinear") + 0.5
        x = self.norms[2](self.second(x))
        x = functional.avg_pool2d(x * x.mean((2, 3), keepdim=True).sigmoid(), 3, 2, 1)
        return self.head(x.mean((2, 3)) + x.amax((2, 3)) + x.var((2, 3)))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", HALVES)
def test_what_is_summed_over_tiles_is_summed_in_float32(precision: str):
    torch.manual_seed(0)
    model = Sums()
    recipe = make_recipe(model, precision, split_size=1, slice_method="2x2")
    line, *_ = run_ranks(4, lambda world: verify(world, recipe, model, nn.CrossEntropyLoss(), seed=0))
    assert line["ok"], line


# ---- the graph


def test_casts_are_nodes_where_autocast_casts():
    """Convolutions and products in half precision, the loss in float32, batch norm as its input comes."""
    graph = trace(
        resnet20_v1(), nn.CrossEntropyLoss(), TensorSpec((2, 3, 32, 32), "float32"), TensorSpec((2,), "int64"),
        "bfloat16",
    )  # fmt: skip
    types = {(node.operator.split(".")[1], node.spec.dtype) for node in graph.nodes}
    assert {("conv2d", "bfloat16"), ("batch_norm", "bfloat16"), ("linear", "bfloat16")} <= types
    assert ("cross_entropy_loss", "float32") in types
    assert ("conv2d", "float32") not in types
    assert {spec.dtype for spec in graph.weights.values()} == {"float32"}
    assert graph.inputs["images"].dtype == "float32"
    assert not any(node.flops for node in graph.nodes if "_to_copy" in node.operator)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_stages_are_those_of_float32(name: str):
    model = MODELS[name]()
    labels = TensorSpec((2,) if name == "resnet" else (2, 32, 32), "int64")
    graphs = [
        trace(model, nn.CrossEntropyLoss(), TensorSpec((2, 3, 32, 32), "float32"), labels, precision)
        for precision in ("", "bfloat16")
    ]
    plain, half = (find_layers(graph) for graph in graphs)
    assert [layer.flops for layer in plain] == [layer.flops for layer in half]
    assert graphs[0].trainable == graphs[1].trainable


class Branches(nn.Module):
    """What autocast leaves alone, casts inside an operator, or brings together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv2d(3, 4, 1), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        half = self.conv(x)
        mixed = torch.einsum("nchw,ck->nkhw", half, self.mix)
        half += x.mean(1, keepdim=True)
        joined = torch.cat([mixed, x], 1)
        return joined.float().softmax(1)[:, :4] + half.to(torch.float64).to(torch.float32)


def test_a_graph_with_casts_computes_without_autocast_what_the_model_does_with_it():
    """Every node's type is the one that its operator has on arguments as they are cast."""
    torch.manual_seed(0)
    model, images = Branches(), torch.randn(2, 3, 6, 5)
    graph = trace_half(model, tuple(images.shape), TensorSpec((2, 4, 6, 5), "float32"))
    recipe = prepare(model, Plan(split_size=1, slice_method="1x1", precision="bfloat16"), images.shape,
                     functional.mse_loss, labels=TensorSpec((2, 4, 6, 5), "float32"), device="cpu")  # fmt: skip

    def run(world: LoopbackWorld) -> tuple[dict[str, Tensor], float]:
        training = RankTraining(world, recipe)
        batch = {"images": images, "labels": torch.zeros(2, 4, 6, 5)}
        training.step(training.cut(batch))
        return training.copy_tensors()["gradients"], training.worker.loss or 0.0

    (gradients, loss), = run_ranks(1, run)  # fmt: skip
    alone = ReferenceTraining(model, functional.mse_loss, torch.optim.SGD, torch.bfloat16)
    theirs = alone.step({"images": images, "labels": torch.zeros(2, 4, 6, 5)})
    assert loss == pytest.approx(theirs, rel=1e-2)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(gradients[f"model.{name}"], gradient, rtol=0.05, atol=2e-3)
    types = {node.operator: node.spec.dtype for node in graph.nodes if node.spec}
    assert types["aten.einsum.default"] == "bfloat16"
    assert types["aten.cat.default"] == types["aten.softmax.int"] == "float32"
    assert types["aten.add.Tensor"] in ("bfloat16", "float32")


# ---- what travels and what stays


@pytest.mark.nightly
def test_halos_travel_in_half_precision_and_moments_do_not():
    recipe = make_recipe(resnet20_v1(), "bfloat16", split_size=2, slice_method="2x2")
    programs = compile_plan(recipe.graph, recipe.plan)
    forward = [item for program in programs for item in program.forward]
    assert {item.dtype for item in forward if isinstance(item, Exchange)} == {"bfloat16"}
    assert {item.spec.dtype for item in forward if isinstance(item, AllReduce)} <= {"float64", "float32"}


@pytest.mark.nightly
def test_masters_stay_float32():
    torch.manual_seed(0)
    recipe = make_recipe(resnet20_v1(), "float16", split_size=2, slice_method="2x2")
    whole = make_batches(recipe, seed=0, steps=1)

    def train(world: LoopbackWorld) -> set[torch.dtype]:
        training = RankTraining(world, recipe)
        record_rank_run(training, map(training.cut, whole))
        held = training.copy_tensors()
        state = training.worker.optimiser_step.optimiser.state.values()
        kept = [t for entry in state for t in entry.values() if isinstance(t, Tensor)]
        every = [*held["weights"].values(), *held["gradients"].values(), *held["buffers"].values(), *kept]
        return {tensor.dtype for tensor in every if tensor.is_floating_point()}

    assert run_ranks(5, train) == [{torch.float32}] * 5


# ---- the scale of the loss


class Steep(nn.Module):
    """A linear map whose gradients are too large for float16 at the scale that the loss begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).float().mean((2, 3)) * 16


def test_no_rank_updates_where_one_gradient_is_not_finite():
    """The scale halves on every rank until the gradients are finite, and steps are those of GradScaler."""
    torch.manual_seed(0)
    model = Steep()
    recipe = make_recipe(model, "float16", (2, 3, 8, 8), split_size=2, slice_method="2x2", balance=(1, 1))
    batch = {"images": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}

    def train(world: LoopbackWorld) -> list[tuple[float, bool]]:
        training, told = RankTraining(world, recipe), []
        for _ in range(8):
            before = {name: weight.detach().clone() for name, weight in training.weights.items()}
            training.step(training.cut(batch))
            moved = any(not torch.equal(before[name], weight) for name, weight in training.weights.items())
            told.append((training.worker.optimiser_step.scale, moved))
        return told

    told = run_ranks(5, train)
    assert all(rank == told[0] for rank in told[1:]), "all ranks, or none"
    assert (told[0][0], told[0][-1][1]) == ((SCALE / 2, False), True), "the first step is skipped, the last one is not"
    alone = ReferenceTraining(model, nn.CrossEntropyLoss(), recipe.optimiser, torch.float16)
    scales = [(alone.step(batch), alone.scaler.get_scale())[1] for _ in range(8)]
    assert [scale for scale, _ in told[0]] == scales


def test_the_scale_grows_after_many_good_steps(monkeypatch):
    monkeypatch.setattr("mpi4dl_nb.engines.program.update.GOOD_STEPS", 2)
    recipe = make_recipe(nn.Conv2d(3, 2, 1), "float16", (2, 3, 4, 4), split_size=1, slice_method="1x2")
    whole = make_batches(recipe, seed=0, steps=1)[0]

    def train(world: LoopbackWorld) -> list[float]:
        training = RankTraining(world, recipe)
        return [(training.step(training.cut(whole)), training.worker.optimiser_step.scale)[1] for _ in range(4)]

    assert run_ranks(2, train) == [[SCALE, 2 * SCALE, 2 * SCALE, 4 * SCALE]] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_only_float16_is_scaled(precision: str):
    assert (
        make_recipe(nn.Conv2d(3, 2, 1), precision, (2, 3, 4, 4), split_size=1, slice_method="1x2").rules.loss_scale
        is None
    )
