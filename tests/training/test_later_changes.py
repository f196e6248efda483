"""What a user changes after a `Training` was made: refused with its name, as ranks run what was traced then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan

ONE = Plan(split_size=1, spatial_size=0, precision="float64")
IMAGES, LABELS = torch.ones(2, 2, 6, 6, dtype=torch.float64), torch.tensor([0, 1])
SCALE: dict[str, Any] = {"number": 1.0, "items": [1.0, 2.0]}
NUMBER, mean = 1.0, 1.0


class Scaled(nn.Module):
    """A classifier with a number, a number that forward sets, and a list that it fills."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.alpha, self.size, self.log = nn.Linear(2, 3).double(), 1.0, None, []
        self.pool = nn.AvgPool2d(2)
        self.powers, self.counts, self.shift = [1, 2], {"runs": 0}, torch.zeros(3, dtype=torch.float64)
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.size = x.shape[-1]
        self.counts["runs"] += 1
        made = self.layer(self.pool(x).mean((2, 3))) * self.alpha / self.temperature
        return made ** self.powers[0] + self.shift


def read_a_global(p: Tensor, y: Tensor) -> Tensor:
    return NUMBER * functional.cross_entropy(p, y).mean()


def read_through_a_function(p: Tensor, y: Tensor) -> Tensor:
    return read_a_global(p, y) * 2


class Weighted:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, p: Tensor, y: Tensor) -> Tensor:
        return self.factor * functional.cross_entropy(p, y)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0, 1.0]

    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        return self.weights[1] * functional.cross_entropy(p, y)


class Annealed:
    """A number of a closure."""

    def __init__(self) -> None:
        factor = 1.0

        def compute_loss(p: Tensor, y: Tensor) -> Tensor:
            return factor * functional.cross_entropy(p, y)

        def set_factor() -> None:
            nonlocal factor
            factor = 0.1

        self.loss, self.change = compute_loss, set_factor


@pytest.fixture(scope="module")
def cluster():
    with Cluster(1, backend="loopback") as made:
        yield made


def train(cluster: Cluster, model: nn.Module, loss: Any = None) -> Training:
    training = Training(model, ONE, cluster, IMAGES.shape, loss=loss)
    training.step(IMAGES, LABELS)
    return training


def assert_refused(training: Training, text: str) -> None:
    for go_on in (training.step, training.stepping, lambda x, y: training.fit([(x, y)], progress=False)):
        with pytest.raises(PlanError, match=f"{text}.*Make a new Training"):
            go_on(IMAGES, LABELS)
    with pytest.raises(PlanError, match=text):
        training.verify()


MODEL_CHANGES: dict[str, Callable[[Scaled], object]] = {
    "alpha of the model has changed from 1.0 to 5.0": lambda m: setattr(m, "alpha", 5.0),
    "pool.kernel_size of the model has changed from 2 to 3": lambda m: setattr(m.pool, "kernel_size", 3),
    r"powers\[0\] in the code of the model has changed from 1 to 3": lambda m: m.powers.__setitem__(0, 3),
    r"powers\[1\] in the code of the model has changed from 2 to 3": lambda m: setattr(m, "powers", [1, 3]),
    r"powers\[0\] in the code of the model has changed since": lambda m: setattr(m, "powers", None),
    "shift in the code of the model has changed since": lambda m: m.shift.add_(1),
    "shift in the code of the model": lambda m: setattr(m, "shift", torch.ones(3, dtype=torch.float64)),
    "temperature of the model has changed since": lambda m: m.temperature.fill_(2.0),
    "temperature of the model": lambda m: setattr(m, "temperature", 2 * m.temperature),
    "requires_grad of layer.weight of the model": lambda m: m.layer.weight.requires_grad_(False),
}


@pytest.mark.parametrize("text", MODEL_CHANGES)
def test_changes_of_the_model(text: str, cluster: Cluster):
    model = Scaled()
    training = train(cluster, model)
    MODEL_CHANGES[text](model)
    assert_refused(training, text)


def test_what_is_set_back_goes_on(cluster: Cluster):
    model = Scaled()
    training = train(cluster, model)
    model.alpha = 5.0
    with pytest.raises(PlanError):
        training.step(IMAGES, LABELS)
    model.alpha = 1.0
    training.step(IMAGES, LABELS)


def test_changes_of_a_loss(cluster: Cluster):
    entropy, weighted, annealed = nn.CrossEntropyLoss(), Weighted(), Annealed()
    table, ones = {"lam": 1.0}, torch.ones(3, dtype=torch.float64)
    replaced, written = nn.CrossEntropyLoss(weight=ones.clone()), nn.CrossEntropyLoss(weight=ones.clone())
    added, listed = nn.CrossEntropyLoss(), Listed()
    losses: list[tuple[Any, Callable[[], object], str]] = [
        (entropy, lambda: setattr(entropy, "label_smoothing", 0.5), "label_smoothing of the loss"),
        (replaced, lambda: setattr(replaced, "weight", 2 * ones), "weight of the loss has changed"),
        (written, lambda: written.weight.mul_(2), "weight of the loss has changed"),
        (added, lambda: setattr(added, "weight", 2 * ones), "weight of the loss has changed"),
        (listed, lambda: listed.weights.__setitem__(1, 0.1), r"weights\[1\] in the code of the loss"),
        (weighted, lambda: setattr(weighted, "factor", 0.5), "factor in the code of the loss"),
        (annealed.loss, annealed.change, "factor in the code of the loss has changed from 1.0 to 0.1"),
        (lambda p, y: table["lam"] * functional.cross_entropy(p, y), lambda: table.update(lam=0.1), r"table\['lam'\]"),
        (partial(functional.cross_entropy, weight=ones), lambda: ones.mul_(2), "argument weight"),
    ]
    for loss, change, text in losses:
        training = train(cluster, Scaled(), loss)
        change()
        assert_refused(training, text)


@pytest.mark.parametrize("loss", [read_a_global, read_through_a_function])
def test_changes_of_a_global(loss: Callable[..., Tensor], cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    training = train(cluster, Scaled(), loss)
    monkeypatch.setitem(globals(), "mean", 2.0)  # the code has an attribute of this name, not the global
    training.step(IMAGES, LABELS)
    monkeypatch.setitem(globals(), "NUMBER", 0.1)
    assert_refused(training, "NUMBER in the code of the loss has changed from 1.0 to 0.1")


def test_running_the_plain_model_is_no_change(cluster: Cluster):
    model = Scaled()
    training = train(cluster, model)
    model.eval()(torch.ones(1, 2, 8, 8, dtype=torch.float64))
    model.log.append(3.0)
    model.train()
    training.step(IMAGES, LABELS)


def test_equal_values_in_their_place_are_no_change(cluster: Cluster):
    model = Scaled()
    training = train(cluster, model)
    model.powers, model.shift, model.temperature = [1, 2, 3], model.shift.clone(), model.temperature.clone()
    training.step(IMAGES, LABELS)
    model.powers[1] = 5  # the new list is read, not the first one
    assert_refused(training, r"powers\[1\] in the code of the model has changed from 2 to 5")


@pytest.mark.parametrize("name", ["shift", "temperature"])
def test_tensors_of_inference_mode_that_count_no_writes(name: str, cluster: Cluster):
    model = Scaled()
    with torch.inference_mode():
        setattr(model, name, getattr(model, name).clone())
    training = train(cluster, model)
    training.step(IMAGES, LABELS)
    with torch.inference_mode():
        getattr(model, name).add_(1)
    assert_refused(training, f"{name} (in the code )?of the model has changed")


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # of the exporter
def test_a_weight_that_a_hook_before_forward_sets_is_no_change(cluster: Cluster):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(2, 2, 1)), Scaled()).double().eval()
    training = train(cluster, model)
    with torch.no_grad():
        model(IMAGES)
    training.step(IMAGES, LABELS)


def test_statistics_of_the_plain_model_are_no_change(cluster: Cluster):
    norms = nn.BatchNorm2d(2), nn.BatchNorm2d(2, momentum=None), nn.InstanceNorm2d(2, track_running_stats=True)
    model = nn.Sequential(*norms, Scaled()).double()
    training = train(cluster, model)
    model(torch.rand(2, 2, 6, 6, dtype=torch.float64))
    training.step(IMAGES, LABELS)
    model.load_state_dict(training.state_dict())
    training.step(IMAGES, LABELS)


def test_other_weights_are_warned_of_once(cluster: Cluster):
    model = Scaled()
    training = train(cluster, model)
    model.layer.load_state_dict({name: 0 * tensor for name, tensor in model.layer.state_dict().items()})
    with pytest.warns(UserWarning, match=r"layer.weight of the model has changed since.*new Training"):
        training.step(IMAGES, LABELS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step(IMAGES, LABELS)


def test_trained_weights_may_be_loaded_into_the_model(cluster: Cluster):
    model = Scaled()
    training = train(cluster, model)
    model.load_state_dict(training.state_dict())
    training.step(IMAGES, LABELS)


def test_a_loss_may_load_its_own_state(cluster: Cluster):
    loss = nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float64))
    training = train(cluster, Scaled(), loss)
    loss.load_state_dict(loss.state_dict())
    training.step(IMAGES, LABELS)
    loss.load_state_dict(training.loss_state_dict())
    training.step(IMAGES, LABELS)
