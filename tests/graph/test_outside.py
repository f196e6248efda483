"""Tensors that a loss or a forward reads without owning them: constants, or refused before a rank starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.plan import Plan

Loss = Callable[[Tensor, Tensor], Tensor]
SHAPE, FIXED = (4, 2, 8, 8), torch.ones(3, dtype=torch.float64)
ONE = Plan(split_size=1, spatial_size=0, precision="float64")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def add_penalty(model: nn.Module, p: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(p, y) + sum(w.square().sum() for w in model.parameters())


class Holds(nn.Module):
    """A loss that keeps something in a list, where no module finds it."""

    def __init__(self, *kept: object) -> None:
        super().__init__()
        self.kept = list(kept)

    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        extra = self.kept[0]
        extra = extra.weight if isinstance(extra, nn.Module) else extra
        return functional.cross_entropy(p, y) + extra.sum()


class Calls:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, p: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(p, y) * self.model[4].bias.exp().sum()


def add(value: Callable[[], Tensor]) -> Loss:
    return lambda p, y: functional.cross_entropy(p, y) + value().sum()


READS: dict[str, tuple[Callable[[nn.Sequential], Loss], str]] = {
    "all parameters": (lambda m: partial(add_penalty, m), r"0.weight, 0.bias, 1.weight and 3 more of the model \("),
    "a callable object": (Calls, "4.bias of the model"),
    "statistics": (lambda m: add(lambda: m[1].running_mean), "1.running_mean of the model"),
    "a view": (lambda m: add(lambda: m[4].weight.T[0]), "4.weight of the model"),
    "a view made before": (lambda m: add(partial(torch.mul, m[4].weight.detach().T, 2)), "4.weight of the model"),
    "data": (lambda m: add(lambda: m[4].weight.data), "4.weight of the model"),
    "an array": (lambda m: add(partial(torch.from_numpy, m[4].weight.detach().numpy())), "4.weight of the model"),
    "a layer that it calls": (lambda m: add(lambda: m[4](torch.ones(1, 4).double())), "4.weight, 4.bias of the model"),
    "a list of a module": (lambda m: Holds(m[4]), "4.weight of the model"),
    "a view in a list": (lambda m: Holds(m[4].weight.detach()[1:]), "4.weight of the model"),
    "a number of a weight": (lambda m: lambda p, y: p.sum() * float(m[4].bias[0]), r"asks for the numbers \(float\)"),
    "a number of a bias": (lambda m: lambda p, y: p.sum() * m[4].bias.detach()[0].item(), "4.bias|asks for the number"),
    "a number of statistics": (lambda m: lambda p, y: p.sum() * m[1].running_var[0].item(), "1.running_var"),
    "another layer": (lambda m: add(partial(nn.Linear(3, 3).double(), torch.ones(1, 3).double())), "requires a grad"),
    "a free weight": (lambda m: add(partial(torch.mul, torch.ones(3, requires_grad=True), 2)), "requires a gradient"),
    "a free weight in a list": (lambda m: Holds(torch.ones(3, requires_grad=True)), "requires a gradient"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", READS)
def test_a_loss_that_reads_what_training_changes_is_refused(name: str):
    """All of these were constants: their gradients were lost, and they never followed training."""
    model, (make, text) = make_model(), READS[name]
    with pytest.raises(TraceError, match=text):
        Training(model, ONE, Cluster(1, backend="loopback"), SHAPE, loss=make(model))


def test_the_error_names_the_line_and_the_remedy():
    model = make_model()
    with pytest.raises(TraceError) as caught:
        Training(model, ONE, Cluster(1, backend="loopback"), SHAPE, loss=partial(add_penalty, model))
    line = add_penalty.__code__.co_firstlineno + 1
    assert f'"{__file__}", line {line}: return functional' in str(caught.value)
    assert "return it beside the prediction" in str(caught.value)
    assert "weight_decay" in str(caught.value)


class Penalised(nn.Module):
    """The remedy: the penalty is computed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner[4].weight.square().sum() + self.inner[0].weight.square().sum()


def test_the_remedy_trains_as_plain_pytorch():
    def compute_loss(answer: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return functional.cross_entropy(answer[0], y) + 0.1 * answer[1]

    model, images, labels = Penalised(), torch.randn(SHAPE).double(), torch.tensor([0, 2, 1, 1])
    with Cluster(1, backend="loopback") as cluster:
        optimiser, spec = partial(torch.optim.SGD, lr=0.1, momentum=0.9), TensorSpec((4,), "int64")
        training = Training(
            copy.deepcopy(model), ONE, cluster, SHAPE, loss=compute_loss, optimiser=optimiser, labels=spec
        )
        found = [training.step(images, labels) for _ in range(3)]
    plain, expected = optimiser(model.parameters()), []
    for _ in range(3):
        plain.zero_grad()
        value = compute_loss(model(images), labels)
        value.backward()
        plain.step()
        expected.append(value.item())
    assert found == pytest.approx(expected, rel=1e-12, abs=0)


def trace_with(loss: Loss, model: nn.Module | None = None) -> object:
    return trace(model or make_model(), loss, TensorSpec(SHAPE, "float64"), TensorSpec((4,), "int64"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss",
    [
        add(partial(torch.mul, FIXED, 2)),
        add(partial(nn.Linear(3, 3).double().requires_grad_(False), torch.ones(1, 3).double())),
        Holds(torch.ones(3).double()),
        lambda p, y: functional.cross_entropy(p, y, weight=torch.tensor([1.0, 2, 3]).double()),
    ],
)
def test_fixed_tensors_remain_constants(loss: Loss):
    assert trace_with(loss).constants


def test_a_forward_that_reads_its_weight_past_the_module_is_refused():
    model = make_model()
    weight = model[4].weight

    class Past(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * weight.sum()

    with pytest.raises(TraceError, match=r"The model's forward reads 4.weight of the model.*as an attribute"):
        trace_with(functional.cross_entropy, model.append(Past()))


def test_a_buffer_that_is_a_view_of_a_weight_is_refused():
    model = make_model()
    model.register_buffer("alias", model[4].weight.detach()[1:])
    with pytest.raises(TraceError, match=r"shares memory with"):
        trace_with(functional.cross_entropy, model)


def test_parts_of_one_piece_of_memory_do_not_overlap():
    model, flat = make_model(), torch.randn(2, 3).double()
    model[4].bias = nn.Parameter(flat[0])
    model.register_buffer("other", flat[1])
    trace_with(functional.cross_entropy, model)


def with_a_tuple(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = functional.cross_entropy(p, y)
    return loss, loss


UNUSABLE: dict[str, tuple[object, str]] = {
    "detached": (lambda p, y: functional.cross_entropy(p.detach(), y), "No gradient of the loss reaches a weight"),
    "accuracy": (lambda p, y: (p.argmax(1) != y).double().mean(), "No gradient of the loss reaches a weight"),
    "constant": (lambda p, y: torch.tensor(1.0), "No gradient of the loss reaches a weight"),
    "without gradients": (torch.no_grad()(functional.cross_entropy), "No gradient of the loss reaches a weight"),
    "a number": (lambda p, y: functional.cross_entropy(p, y).item(), "returns a Python number.* Leave out its .item"),
    "a tuple": (with_a_tuple, "returns a tuple"),
    "nothing": (lambda p, y: None, "returns a NoneType"),
    "no scalar": (lambda p, y: functional.cross_entropy(p, y, reduction="none"), "must be one number, but its shape"),
    "a class": (nn.CrossEntropyLoss, r"CrossEntropyLoss is a class.* such as CrossEntropyLoss\(\)"),
    "a string": ("cross_entropy", "'cross_entropy' is a str, but must be a function"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_loss_that_trains_nothing_is_refused(name: str):
    loss, text = UNUSABLE[name]
    with pytest.raises(TraceError, match=text):
        Training(make_model(), ONE, Cluster(1, backend="loopback"), SHAPE, loss=loss)


def test_a_wholly_frozen_model_is_none_of_these():
    assert not trace_with(functional.cross_entropy, make_model().requires_grad_(False)).trainable
