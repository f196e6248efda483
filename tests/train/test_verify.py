"""`verify` tells rounding from a fault, says which weights and why, and is not content where nothing moves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import VerifyError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.update import GradientBucket
from mpi4dl_nb.engines.train.oracle import TrainingRecord
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.rounding import DOUBLE, RoundingCheck
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import compare_records, make_batches, record_rank_run, verify, with_small_loss_scale

TILES = Plan(split_size=1, slice_method="2x2", precision="float64")
STAGES = Plan(split_size=2, spatial_size=1, slice_method="1x2", precision="float64")
SHAPE, LOSS = (4, 3, 24, 20), nn.CrossEntropyLoss()
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=1e-3)

ZERO_IN_THEORY = {"0.bias", "3.bias"}
"""A batch norm takes the mean away, whatever the convolution before it adds."""


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3),
    )  # fmt: skip


def make_recipe(model: nn.Module, plan: Plan, optimiser: Any) -> Recipe:
    return with_small_loss_scale(prepare(model, plan, SHAPE, optimiser=optimiser, device="cpu"))


def record_ranks(recipe: Recipe, whole: Sequence[Mapping[str, Tensor]]) -> list[TrainingRecord]:
    def train(world: Any) -> TrainingRecord:
        training = RankTraining(world, recipe)
        return record_rank_run(training, map(training.cut, whole))

    return run_ranks(recipe.plan.ranks, train)


def verify_model(model: nn.Module, plan: Plan, optimiser: Any) -> dict[str, Any]:
    recipe = make_recipe(model, plan, optimiser)
    return run_ranks(plan.ranks, lambda world: verify(world, recipe, model, LOSS, seed=0))[0]


def with_gradient(record: TrainingRecord, name: str, change: Callable[[Tensor], Tensor]) -> TrainingRecord:
    steps = [{**step, name: change(step[name])} if name in step else step for step in record.gradients]
    return replace(record, gradients=tuple(steps))


def with_weight(record: TrainingRecord, name: str, change: Callable[[Tensor], Tensor]) -> TrainingRecord:
    return replace(record, weights={n: change(w) if n == name else w for n, w in record.weights.items()})


def add_error(tensor: Tensor) -> Tensor:
    return tensor * (1 + 1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("optimiser", [SGD, ADAM], ids=["sgd", "adam"])
def test_a_fault_of_1e_9_in_any_weight_whose_gradient_is_not_zero_in_theory(optimiser: Any):
    model = make_net()
    recipe = make_recipe(model, STAGES, optimiser)
    whole = make_batches(recipe, seed=0)
    records = record_ranks(recipe, whole)
    judged = partial(compare_records, recipe, model, LOSS, whole)
    assert judged(records)["ok"]
    names = {name for name, _ in model.named_parameters()} - ZERO_IN_THEORY
    assert len(names) == 8
    for name in sorted(names):
        wrong = judged([with_gradient(record, name, add_error) for record in records])
        assert not wrong["ok"], f"gradient of {name}"
        assert wrong["why"].startswith(f"This is a fault, not rounding: the gradient {name} in step ")
        assert "is off by 1.0e-09 of its size" in wrong["why"]
        moved = judged([with_weight(record, name, add_error) for record in records])
        assert not moved["ok"], name
        assert moved["why"].startswith(f"This is a fault, not rounding: the change of the weight {name} after all ")


def test_a_fault_in_one_rank_alone_and_in_a_buffer_and_a_loss():
    model = make_net()
    recipe = make_recipe(model, TILES, ADAM)
    whole = make_batches(recipe, seed=0)
    first, *others = record_ranks(recipe, whole)
    wrong = [
        with_gradient(first, "4.weight", add_error),
        replace(first, buffers={n: add_error(b) if n == "1.running_var" else b for n, b in first.buffers.items()}),
        replace(first, losses=tuple({n: loss * (1 + 1e-9) for n, loss in step.items()} for step in first.losses)),
        with_gradient(first, "0.bias", lambda gradient: gradient + 1e-9),  # zero in theory, but not by so much
        with_gradient(first, "4.weight", lambda gradient: gradient * torch.nan),
    ]
    for record in wrong:
        assert not compare_records(recipe, model, LOSS, whole, [*others, record])["ok"]
    assert compare_records(recipe, model, LOSS, whole, [*others, first])["ok"]


def test_a_program_that_adds_up_wrongly_by_1e_9(monkeypatch: pytest.MonkeyPatch):
    """The fault is in the ranks' sums, not in what they tell."""
    finish = GradientBucket.finish

    def finish_wrong(self: GradientBucket) -> None:
        finish(self)
        self.weights[-1].grad.mul_(1 + 1e-9)

    assert verify_model(make_net(), TILES, ADAM)["ok"]
    monkeypatch.setattr(GradientBucket, "finish", finish_wrong)
    proof = verify_model(make_net(), TILES, ADAM)
    assert not proof["ok"]
    assert "fault, not rounding" in proof["why"]


SCALING = {
    "adam": ADAM,
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rprop": partial(torch.optim.Rprop, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("plan", [TILES, STAGES], ids=["tiles", "stages"])
def test_rounding_that_an_optimiser_scales_up_is_said_to_be_that(name: str, plan: Plan):
    proof = verify_model(make_net(), plan, SCALING[name])
    assert proof["ok"], proof
    assert "The gradients of 0.bias, 3.bias are zero in theory and rounding in fact" in proof["why"]
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    assert "why" not in verify_model(plain, plan, SCALING[name])


class Island(nn.Module):
    """A norm in float32 inside, as many write it for half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).relu()
        size = (x.float() ** 2).mean((2, 3), keepdim=True).rsqrt()
        return self.head(self.body(x * size.to(x.dtype)).mean((2, 3)))


@pytest.mark.parametrize("optimiser", [SGD, ADAM], ids=["sgd", "adam"])
def test_an_island_of_float32_is_said_to_be_that(optimiser: Any):
    torch.manual_seed(0)
    proof = verify_model(Island(), TILES, optimiser)
    assert proof["ok"], proof
    assert proof["grad_rel"] > 1e-10
    assert proof["why"].startswith("The model computes in float32 (")
    assert "test_verify.py" in proof["why"]
    assert "where rounding is 1e-07" in proof["why"]


def test_a_fault_beyond_the_rounding_of_an_island():
    torch.manual_seed(0)
    model = Island()
    recipe = make_recipe(model, TILES, SGD)
    whole = make_batches(recipe, seed=0)
    records = record_ranks(recipe, whole)
    for name, _ in model.named_parameters():
        wrong = [with_gradient(record, name, lambda gradient: gradient * 1.002) for record in records]
        assert not compare_records(recipe, model, LOSS, whole, wrong)["ok"], name


class Still(torch.optim.SGD):
    """Moves vectors only: it forgets the gradients of all others."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim > 1:
                    weight.grad = None
        return super().step(closure)


class Silent(torch.optim.SGD):
    """Moves nothing."""

    def step(self, closure: Any = None) -> Any:
        return None


def test_weights_that_do_not_move_are_not_content():
    proof = verify_model(make_net(), STAGES, partial(Silent, lr=0.1))
    assert not proof["ok"]
    assert proof["params_rel"] == 0, "ranks and one process agree"
    said = proof["why"][proof["why"].index("The optimiser does not move") :].split("Look at the function")[0]
    assert said.startswith("The optimiser does not move 0.weight, 1.weight, 1.bias and 5 more, on ranks and in one pro")
    for name in ZERO_IN_THEORY:
        assert name not in said


def test_a_few_weights_that_do_not_move_are_named():
    proof = verify_model(make_net(), TILES, partial(Still, lr=0.1))
    assert not proof["ok"]
    assert "The optimiser does not move 0.weight, 3.weight, 8.weight, on ranks and in one process" in proof["why"]


def make_optimiser_with_zero_rate(named_parameters: Any) -> torch.optim.Optimizer:
    head = ("8.weight", "8.bias")
    named = list(named_parameters)
    return torch.optim.SGD(
        [{"params": [p for n, p in named if n in head]}, {"params": [p for n, p in named if n not in head], "lr": 0.0}],
        lr=0.1,
    )


def make_optimiser_of_head(named_parameters: Any) -> torch.optim.Optimizer:
    named = list(named_parameters)
    for name, weight in named:
        weight.requires_grad_(name.startswith("8."))
    return torch.optim.SGD([weight for _, weight in named], lr=0.1)


@pytest.mark.parametrize(
    "optimiser", [make_optimiser_with_zero_rate, make_optimiser_of_head], ids=["a rate of 0", "frozen"]
)
def test_weights_that_the_user_holds_still_are_right(optimiser: Any):
    proof = verify_model(make_net(), STAGES, optimiser)
    assert proof["ok"], proof
    assert "does not move" not in proof.get("why", "")


# ---- a gradient that is exactly 0 in one process


class Shifted(nn.Module):
    """Some channels of a shift are taken away again, so that their gradient is exactly 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.rand(1, 8, 1, 1))
        self.register_buffer("taken", (torch.arange(8) < channels).view(1, 8, 1, 1).float())

    def forward(self, images: Tensor) -> Tensor:
        return self.head((self.stem(images) + self.shift - self.shift * self.taken).mean((2, 3)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("channels", "name"), [(8, "sgd"), (3, "adam"), (8, "rprop")])
def test_rounding_where_one_process_has_exactly_0_is_no_fault(
    channels: int, name: str, monkeypatch: pytest.MonkeyPatch
):
    finish = GradientBucket.finish

    def finish_rounded(self: GradientBucket) -> None:
        finish(self)
        for weight in self.weights:
            if weight.shape == (1, 8, 1, 1):
                weight.grad[:, :channels] += torch.tensor([[1e-17], [-2e-17], [3e-17]]).repeat(3, 1)[:channels, None]

    monkeypatch.setattr(GradientBucket, "finish", finish_rounded)
    model = Shifted(channels)
    recipe = make_recipe(model, TILES, {"sgd": SGD, **SCALING}[name])
    whole = make_batches(recipe, seed=0)
    records = record_ranks(recipe, whole)
    plain = copy.deepcopy(model).double()
    LOSS(plain(whole[0]["images"]), whole[0]["labels"]).backward()
    assert not plain.shift.grad[:, :channels].any(), "the matter of this test"
    assert all(record.gradients[0]["shift"][:, :channels].any() for record in records), "the matter of this test"
    judged = partial(compare_records, recipe, model, LOSS, whole)
    proof = judged(records)
    assert proof["ok"], proof
    assert not judged([with_gradient(record, "head.bias", add_error) for record in records])["ok"]
    wrong = judged([with_gradient(record, "shift", lambda gradient: gradient + 1e-9) for record in records])
    assert not wrong["ok"]
    if channels == 8:
        assert re.search(r"of the size of every (gradient of the step|change of the weight) together", wrong["why"])
    assert not re.search(r"e\+\d{2,}", wrong["why"].replace("e+00", "")), "nothing is divided by zero"
    moved = judged([with_weight(record, "shift", lambda weight: weight + 1e-6) for record in records])
    assert moved["ok"] == (name == "rprop"), "which moves a weight as far, whatever the size of its gradient"


@pytest.mark.parametrize("fault", [1e-7, 1e-3])
def test_a_chaotic_reference_excuses_no_fault(fault: float):
    """One process comes elsewhere by itself where its noise goes the other way; ranks may not follow it there."""
    start = {"noisy": torch.zeros(1), "real": torch.zeros(1)}

    def make_record(loss: float, noise: float, real: float) -> TrainingRecord:
        gradients = {"noisy": torch.tensor([noise], dtype=torch.float64)}
        gradients["real"] = torch.tensor([real], dtype=torch.float64)
        weights = {"noisy": torch.tensor([1e3]).double(), "real": torch.tensor([-0.1]).double()}
        return TrainingRecord(({0: loss},), (gradients,), weights, {})

    def repeat_training(begin: Any, *_: object) -> TrainingRecord:
        is_near = isinstance(begin, partial)
        return make_record(1 + 1e-12, 3e-17, 1 + 1e-12) if is_near else make_record(2.0, -1e-17, 2.0)

    def make_rounding_check(loss: float, real: float) -> RoundingCheck:
        return RoundingCheck(
            make_record(1.0, 1e-17, 1.0), repeat_training, DOUBLE, start, [make_record(loss, 2e-17, real)]
        )

    for loss, real, what in ((1 + fault, 1.0, "loss"), (1.0, 1 + fault, "gradient")):
        found = [each.key[0] for each in make_rounding_check(loss, real).find_differences()]
        assert found == ([what] if fault > 1e-6 else [])


@pytest.mark.parametrize(("mean", "off_by", "found"), [(3e-16, 4e-16, []), (1e-3, 1e-8, ["buffer"]), (1e-3, 1e-10, [])])
def test_a_running_mean_that_is_zero_in_theory_has_no_size_of_its_own(mean: float, off_by: float, found: list[str]):
    """One process differs from itself by as much in each case: that excuses only what is rounding itself."""

    def make_record(value: float) -> TrainingRecord:
        buffers = {"mean": torch.tensor([value], dtype=torch.float64), "variance": torch.ones(1, dtype=torch.float64)}
        return TrainingRecord(({0: 1.0},), ({},), {}, buffers)

    def repeat_training(*_: object) -> TrainingRecord:
        return make_record(mean + off_by)

    rounding = RoundingCheck(make_record(mean), repeat_training, DOUBLE, {}, [make_record(mean - off_by)])
    assert [each.key[0] for each in rounding.find_differences()] == found


# ---- an update that rounding decides


class Orthogonal(torch.optim.Optimizer):
    """Moves each matrix by the nearest orthogonal one, which its gradient determines only if it has full rank."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                moved = weight.grad
                if weight.ndim > 1:
                    u, _, v = torch.linalg.svd(weight.grad.flatten(1), full_matrices=False)
                    moved = (u @ v).view_as(weight)
                weight.sub_(moved, alpha=group["lr"])


def make_wide_net() -> nn.Sequential:
    """Four images determine no more than four of five directions of the gradient of the first linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3),
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [TILES, STAGES], ids=["tiles", "stages"])
def test_an_update_that_rounding_decides_is_judged_by_the_ranks_own_gradients(plan: Plan):
    model, recipe = make_wide_net(), make_recipe(make_wide_net(), plan, Orthogonal)
    whole = make_batches(recipe, seed=0)
    records = record_ranks(recipe, whole)
    judged = partial(compare_records, recipe, model, LOSS, whole)
    proof = judged(records)
    assert proof["params_rel"] > 1e-3, "the matter of this test"
    assert proof["loss_rel"] > 1e-9, "the matter of this test"
    assert proof["ok"], proof
    assert re.match(r"The optimiser's update of .*4\.weight.* is not determined by the gradient", proof["why"])
    assert re.search(r"gradients agree to \de-1[4-7] in every step", proof["why"])
    for name, _ in model.named_parameters():
        last = [
            replace(r, gradients=(*r.gradients[:2], with_gradient(r, name, add_error).gradients[2])) for r in records
        ]
        for wrong in (
            [with_gradient(record, name, add_error) for record in records],
            last,
            [with_weight(record, name, lambda weight: weight * (1 + 1e-8)) for record in records],
        ):
            found = judged(wrong)
            assert not found["ok"], name
            assert found["why"].startswith("This is a fault, not rounding: the ")
            assert "compared with one process that updates its weights with the ranks' gradients" in found["why"]


def test_ranks_that_add_up_wrongly_by_1e_9_before_such_an_update(monkeypatch: pytest.MonkeyPatch):
    finish = GradientBucket.finish

    def finish_wrong(self: GradientBucket) -> None:
        finish(self)
        self.weights[0].grad.mul_(1 + 1e-9)

    assert verify_model(make_wide_net(), TILES, Orthogonal)["ok"]
    monkeypatch.setattr(GradientBucket, "finish", finish_wrong)
    proof = verify_model(make_wide_net(), TILES, Orthogonal)
    assert not proof["ok"]
    assert "gradient" in proof["why"]
    assert "off by 1.0e-09 of its size" in proof["why"]


# ---- what verify gives the model


class Centred(nn.Module):
    """Writes to its images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.stem(images.sub_(0.25)).mean((2, 3))


def test_a_forward_that_writes_to_its_images_leaves_those_of_the_batch():
    images, labels = torch.rand(SHAPE, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    before = images.clone()
    with Cluster(1, backend="loopback") as cluster:
        training = Training(Centred().double(), Plan(split_size=1, spatial_size=0, precision="float64"), cluster, SHAPE)
        assert training.verify([(images, labels)])["ok"]
    assert torch.equal(images, before)


def test_labels_that_are_flags_are_drawn():
    def compute_loss(prediction: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(prediction, labels.double())

    plan, labels = Plan(split_size=1, spatial_size=0, precision="float64"), TensorSpec((4, 4), "bool")
    recipe = prepare(Centred().double(), plan, SHAPE, compute_loss, labels=labels)
    (batch,) = make_batches(recipe, seed=0, steps=1)
    assert batch["labels"].dtype is torch.bool
    assert batch["labels"].any()
    assert not batch["labels"].all()


# ---- a model that one process cannot train


class Overwritten(nn.Module):
    """PyTorch refuses the backward pass: the result of the first operation in place is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x.relu_()
        x.clamp_(max=5)
        return self.body(x).mean((2, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_model_that_one_process_cannot_train_is_refused(precision: str):
    images, labels = torch.randn(SHAPE), torch.tensor([0, 1, 2, 0])
    said = r"modified by an inplace operation \(.*line \d+: x\.relu_\(\)\).*y = y\.relu\(\)"
    with Cluster(1, backend="loopback") as cluster:
        training = Training(Overwritten(), Plan(split_size=1, spatial_size=0, precision=precision), cluster, SHAPE)
        assert training.step(images, labels) > 0, "the ranks train it"
        with pytest.raises(VerifyError, match=said) as caught:
            training.verify()
    assert str(caught.value).startswith("The ranks cannot be compared with one process, because the plain model itself")
    assert "\n" not in str(caught.value)
    assert "test_verify.py" in str(caught.value)


def test_every_rank_reports_that_the_plain_model_cannot_be_trained():
    """The comparison is made on rank 0; the others wait for its result."""
    model, loss = Overwritten(), nn.CrossEntropyLoss()
    recipe = prepare(model, Plan(split_size=1, spatial_size=0, data_parallel=2), SHAPE, loss)

    def work(world: LoopbackWorld) -> str:
        with pytest.raises(VerifyError, match="modified by an inplace operation"):
            verify(world, recipe, model, loss, 0)
        return "refused"

    assert run_ranks(2, work) == ["refused"] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss",
    [
        nn.HuberLoss(),
        lambda scores, labels: functional.binary_cross_entropy(scores.sigmoid(), labels),
        lambda scores, labels: functional.kl_div(scores.log_softmax(1), labels, reduction="batchmean"),
        lambda scores, labels: functional.mse_loss(scores, labels.sqrt()),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_losses_of_real_numbers(loss: Loss, precision: str):
    """Some refuse labels of another type than the model's; others take no negative ones."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with Cluster(2, backend="loopback") as cluster:
        plan = Plan(split_size=2, spatial_size=0, precision=precision)
        training = Training(model, plan, cluster, SHAPE, loss=loss, labels=torch.rand(SHAPE[0], 2))
        assert training.verify()["ok"]
        assert training.step(torch.randn(SHAPE), torch.rand(SHAPE[0], 2)) is not None
