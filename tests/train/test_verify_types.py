"""`verify` where float64 does not reach: constants of a loss, casts, and weights whose gradient is only rounding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.default_type import use_default_type
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.update import GradientBucket
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.verify import verify
from tests.train.test_synced_norms import train_plain
from tests.train.test_verify import LOSS, SGD, SHAPE, make_net


class FixedType(nn.Module):
    """An island of float32 whose result a layer reads, which autocast converts, but nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        with torch.autocast("cpu", enabled=False):
            x = x.float().square()
        return self.body(x).mean((2, 3))


@contextmanager
def open_training(model: nn.Module, loss: Loss = LOSS, **options: Any) -> Iterator[Training]:
    plan = Plan(split_size=2, spatial_size=1, slice_method="1x2", **options)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        yield Training(model, plan, cluster, SHAPE, loss=loss)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_constants_of_a_loss_follow_to_float64(precision: str):
    """Class weights, numbers and quotients of whole numbers, without a type of their own."""

    def compute_loss(prediction: Tensor, labels: Tensor) -> Tensor:
        share = (labels == 1).sum() / len(labels)
        prediction = prediction * torch.ones(3) + torch.arange(3) / 3 + share
        return functional.cross_entropy(prediction, labels, weight=torch.tensor([1.0, 3.0, 0.1]))

    with open_training(make_net(), compute_loss, precision=precision) as training:
        proof = training.verify()
    assert proof["ok"], proof
    assert proof["dtype"] == "float64"
    assert proof["worst_parameter_rel"] < 1e-10


def test_one_process_computes_in_float64_whatever_the_type_of_the_ranks():
    """As for the command, whose ranks are in the precision of the plan: constants follow on one side alone."""
    recipe = prepare(
        model := make_net(), Plan(split_size=2, spatial_size=1, slice_method="1x2"), SHAPE, compute_loss_of_default_type
    )
    proof = run_ranks(recipe.plan.ranks, lambda world: verify(world, recipe, model, compute_loss_of_default_type, 0))[0]
    assert proof["ok"], proof
    assert "cannot compute the model in float64" not in proof.get("why", "")


def compute_loss_of_default_type(prediction: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(prediction, labels, weight=torch.tensor([1.0, 3.0, 0.1]))


@pytest.mark.nightly
def test_a_loss_that_casts_to_float32_itself_meets_constants_of_float32():
    def compute_loss(prediction: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(prediction.float(), labels, weight=torch.tensor([1.0, 3.0, 0.1]))

    for precision in ("float32", "float64"):
        with open_training(make_net(), compute_loss, precision=precision) as training:
            proof = training.verify()
        assert proof["ok"], proof
        assert proof["dtype"] == "float64"


def compute_loss_of_float32(prediction: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(prediction, labels, weight=torch.tensor([1.0, 3.0, 0.1], dtype=torch.float32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "loss", "precision"),
    [(make_net, compute_loss_of_float32, "float32"), (FixedType, LOSS, "float32"), (FixedType, LOSS, "bfloat16")],
)
def test_what_cannot_follow_is_compared_in_float32_and_said(model: Callable[[], nn.Module], loss: Loss, precision: str):
    data = iter([(torch.randn(SHAPE), torch.tensor([0, 1, 2, 0]))])  # which can be read once
    with open_training(model(), loss, precision=precision) as training:
        proof = training.verify(data)
        assert proof["ok"], proof
        assert proof["dtype"] == "float32"
        assert "compared in float32, as near as its rounding allows. In float64: " in proof["why"]
        assert proof.sentence.startswith("Same as one process, as far as float32 is precise")
        assert training.verify(precision="float32")["ok"]


@pytest.mark.nightly
def test_a_fault_that_the_rounding_of_float32_does_not_explain(monkeypatch: pytest.MonkeyPatch):
    right = GradientBucket.finish

    def finish_wrong(self: GradientBucket) -> None:
        right(self)
        for weight in self.weights:
            if weight.ndim > 1 and weight.grad is not None:
                weight.grad *= 1 + 1e-3

    monkeypatch.setattr(GradientBucket, "finish", finish_wrong)
    with open_training(make_net(), compute_loss_of_float32) as training:
        proof = training.verify()
    assert not proof["ok"]
    assert "This is a fault, not rounding" in proof["why"]


def test_threads_share_the_default_type_and_the_last_one_puts_it_back():
    def use(steps: threading.Barrier, last: bool) -> None:
        with use_default_type(torch.float64):
            steps.wait()
            if last:
                steps.wait()
            assert torch.tensor(0.5).dtype is torch.float64
        if not last:
            steps.wait()

    steps = threading.Barrier(2, timeout=10)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(use, steps, last) for last in (False, True)]:
            done.result()
    with suppress(ValueError), use_default_type(torch.float64), use_default_type(torch.float32):
        assert torch.tensor(0.5).dtype is torch.float32
        raise ValueError
    assert torch.get_default_dtype() is torch.float32


def test_a_weight_whose_gradient_is_rounding_or_0_in_every_element_is_not_missed():
    """A bias before a batch norm, not 0 itself: SGD adds to it what is less than its last digit."""
    model = nn.Sequential(nn.Conv1d(3, 16, 7), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 3), nn.BatchNorm1d(32))
    whole = nn.Sequential(nn.Flatten(2), model, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 3))
    torch.manual_seed(0)
    for weight in whole.parameters():
        nn.init.uniform_(weight, 0.5, 1.0)
    plan, data = Plan(split_size=2, spatial_size=0), [(torch.randn(2, 3, 1, 64), torch.tensor([0, 2]))]
    with Cluster(2, backend="loopback") as cluster:
        proof = Training(whole, plan, cluster, (2, 3, 1, 64), optimiser=SGD).verify(data)
    assert proof["ok"], proof
    assert proof["params_rel"] < 1e-10


def compute_weighted_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(prediction, labels, weight=torch.tensor([1.0, 3.0, 0.1]))


class Blurred(nn.Module):
    """A filter that is made in forward, without a type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, images: Tensor) -> Tensor:
        return self.net(functional.conv2d(images, torch.full((3, 1, 3, 3), 0.1), padding=1, groups=3))


class Scaled(Blurred):
    """A factor that is made in forward: it may have another type than the images, unlike the weights of the loss."""

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images * torch.full((3, 1, 1), 0.1))


@pytest.mark.parametrize(
    ("make", "loss"), [(make_net, compute_weighted_loss), (Blurred, LOSS), (Scaled, compute_weighted_loss)]
)
def test_constants_follow_a_plan_of_float64(make: Callable[[], nn.Module], loss: Loss):
    """The training, the comparison and the predictions are those of one process under this default type."""
    plan, model = Plan(split_size=2, spatial_size=1, slice_method="1x2", precision="float64"), make()
    batches = [(torch.randn(SHAPE).double(), torch.tensor([0, 1, 2, 0])) for _ in range(3)]
    with use_default_type(torch.float64):
        losses, state = train_plain(model, batches, loss)
        trained = make().double().eval()
        trained.load_state_dict(state)
        wanted = trained(batches[0][0])
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(model, plan, cluster, SHAPE, loss=loss, optimiser=SGD)
        assert [training.step(*batch) for batch in batches] == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(training.predict(batches[0][0]), wanted, rtol=1e-10, atol=1e-12)
        proof = training.verify()
    assert proof["ok"], proof
    assert proof["worst_parameter_rel"] < 1e-10
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.nightly
def test_held_out_images_are_judged_with_the_constants_of_the_training():
    images = SyntheticImages(4, SHAPE[2:], classes=3)
    with open_training(make_net(), compute_weighted_loss, precision="float64") as training:
        history = training.fit(images, progress=False, held_out=images)
        model = make_net().double().eval()
        model.load_state_dict(training.state_dict())
        pixels = torch.stack([images.part(number, Tile.whole(*SHAPE[2:])) for number in range(4)])
        with use_default_type(torch.float64):
            wanted = compute_weighted_loss(
                model(pixels.double()), torch.tensor([images.label(number) for number in range(4)])
            )
    assert history.epochs[0].held_out.loss == pytest.approx(wanted.item(), rel=1e-10)


def test_a_type_that_an_operator_refuses_is_refused_before_a_rank_works():
    def loss(prediction: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(prediction, labels, weight=torch.tensor([1.0, 3.0, 0.1]).double())

    with (
        pytest.raises(TraceError, match=r"cross_entropy_loss in loss, .* gets tensors of float32 and float64"),
        open_training(make_net(), loss),
    ):
        pass


class Faint(nn.Module):
    """A layer whose gradient is real, but vanishes beside that of the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.side = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean((2, 3))
        return self.head(x) + 1e-16 * self.side(x)


@pytest.mark.parametrize(("rate", "ok"), [(0.01, True), (1e-20, False)])
def test_a_weight_whose_step_is_less_than_its_last_digit_is_not_missed(rate: float, ok: bool):
    """But a learning rate that moves nothing at all is."""
    plan = Plan(split_size=1, slice_method="1x2")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        proof = Training(Faint(), plan, cluster, SHAPE, optimiser=partial(torch.optim.SGD, lr=rate)).verify()
    assert proof["ok"] is ok, proof
    assert ("The optimiser does not move head.weight" in proof.get("why", "")) is not ok
    assert "side" not in proof.get("why", "")
