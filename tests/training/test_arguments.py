"""Arguments and batches that are not what they should be: each is refused in one sentence, before a rank works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import ImageError, Mpi4dlError, PlanError, TraceError
from mpi4dl_nb.engines.train.recipe import prepare

PLAN = Plan(split_size=1, slice_method="1x2", precision="float64")
SHAPE = (4, 2, 16, 16)
X = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, 1])
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with Cluster(2, backend="loopback") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def training(two: Cluster) -> Iterator[Training]:
    made = Training(net(), PLAN, two, SHAPE, optimiser=SGD)
    yield made
    made.close()


def compute_plain_losses(model: nn.Module, loss: Callable[[Any, Tensor], Tensor], steps: int = 3) -> list[float]:
    optimiser, found = SGD(model.parameters()), []
    for _ in range(steps):
        optimiser.zero_grad()
        value = loss(model(X), Y)
        value.backward()
        optimiser.step()
        found.append(value.item())
    return found


STEPS = {
    "a list of tensors": ([X, X], Y, r"images are a list of 2 tensors, .*torch\.stack\(images\)"),
    "a dict": (X, {"y": Y}, r"labels are a dict of 'y' .*batch\['y'\]"),
    "nothing": (X, None, r"labels are None, .* A step takes images and their labels"),
    "a file": ("a.png", Y, r"images are a str, .* read by folder_images"),
    "an object": (object(), Y, r"images are a object, .* Give a tensor or an array"),
    "one image": (X[0], Y[0], r"which is one image, but a step takes 4: .*DataLoader\(dataset, batch_size=4\)"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_says_what_is_no_batch(training: Training, name: str):
    images, labels, told = STEPS[name]
    with pytest.raises(ImageError, match=told):
        training.step(images, labels)
    assert training.steps == 0


@pytest.mark.parametrize(("images", "remedy"), [(6, r"image_shape=\(3, 2, 16, 16\)"), (5, "another image_shape")])
def test_a_step_of_several_batches_names_the_shape_of_one(two: Cluster, images: int, remedy: str):
    plan = Plan(split_size=2, spatial_size=0, bidirectional=True, precision="float64")
    both = Training(net(), plan, two, SHAPE)
    with pytest.raises(ImageError, match=rf"\(8, 2, 16, 16\) \(2 batches make a step of this plan\).*{remedy}\.$"):
        both.step(torch.zeros(images, *SHAPE[1:], dtype=torch.float64), torch.zeros(images, dtype=torch.int64))
    with pytest.raises(ImageError, match="another image_shape"):
        both.step(torch.zeros(4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))
    both.close()


FITS: dict[str, tuple[Any, type[Mpi4dlError], str]] = {
    "dicts": ([{"image": X, "label": Y}], ImageError, r"its keys are 'image', 'label'\. Make pairs"),
    "a data set": (TensorDataset(X, Y), ImageError, r"one image, .*DataLoader\(dataset, batch_size=4\)"),
    "images": (X, PlanError, r"data is a Tensor, but must be batches: pairs .*fit\(\[\(images, labels\)\]\)"),
    "one pair": ((X, Y), ImageError, r"this is a Tensor: put images and their labels into a tuple"),
    "one dict": ({"image": X, "label": Y}, PlanError, "data is a dict, but must be batches"),
}


@pytest.mark.parametrize("name", FITS)
def test_fit_says_what_is_no_batches(training: Training, name: str):
    data, kind, told = FITS[name]
    with pytest.raises(kind, match=told):
        training.fit(data, progress=False)
    if name == "images":
        with pytest.raises(kind, match=told):
            training.fit(X, Y)
    assert training.steps == 0


def test_the_remedy_of_a_data_set_trains(two: Cluster):
    made = Training(net(), PLAN, two, SHAPE, optimiser=SGD)
    losses = made.fit(DataLoader(TensorDataset(X, Y), batch_size=4), epochs=3, progress=False).losses
    assert losses == pytest.approx(compute_plain_losses(net(), F.cross_entropy), rel=1e-12)
    made.close()


def step_rule() -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(SGD(net().parameters()), 1)


MADE: dict[str, tuple[Callable[[Cluster], Any], type[Mpi4dlError], str]] = {
    "swapped": (lambda c: Training(PLAN, net(), c, SHAPE), PlanError, "in this order, but plan is a Sequential"),
    "no cluster": (lambda c: Training(net(), PLAN, 2, SHAPE), PlanError, "but cluster is a int, not a started Cluster"),
    "a plan of text": (lambda c: Training(net(), "1x2", c, SHAPE), PlanError, "but plan is a str, not a Plan"),
    "a function": (lambda c: Training(net, PLAN, c, SHAPE), TraceError, r"is the function net, .*call it: net\(\)"),
    "a class": (lambda c: Training(nn.ReLU, PLAN, c, SHAPE), TraceError, r"is the class ReLU, .*ReLU\(\.\.\.\)"),
    "a state": (
        lambda c: Training(net().state_dict(), PLAN, c, SHAPE),
        TraceError,
        "OrderedDict of 4 entries, .*state",
    ),
    "a number": (lambda c: Training(net(), PLAN, c, 16), ImageError, r"image_shape=16 must be \(N, C, H, W\)"),
    "floats": (lambda c: Training(net(), PLAN, c, (4.0, 2, 16, 16)), ImageError, r"\(4\.0, .* four positive whole"),
    "a scheduler": (
        lambda c: Training(net(), PLAN, c, SHAPE, scheduler=step_rule()),
        PlanError,
        "is a StepLR, not a f",
    ),
    "a loss class": (
        lambda c: Training(net(), PLAN, c, SHAPE, nn.L1Loss),
        TraceError,
        r"loss=L1Loss is a class, .*L1Loss\(\)",
    ),
    "a loss of text": (
        lambda c: Training(net(), PLAN, c, SHAPE, "ce"),
        TraceError,
        "loss='ce' is a str, but must be a",
    ),
    "a norm of text": (lambda c: Training(net(), PLAN, c, SHAPE, clip_norm="1"), PlanError, "clip_norm='1' must be"),
    "a trace": (lambda c: TraceCache(net, SHAPE, F.cross_entropy), TraceError, "The model is the function net"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_training_says_which_argument_is_wrong(two: Cluster, name: str):
    make, kind, told = MADE[name]
    with pytest.raises(kind, match=told):
        make(two)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_callers_autocast_is_not_traced(two: Cluster, precision: str):
    plan = Plan(split_size=1, slice_method="1x2", precision=precision)
    losses = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            made = Training(net().float(), plan, two, SHAPE, optimiser=SGD)
        losses.append([made.step(X.float(), Y) for _ in range(2)])
        made.close()
    assert losses[0] == losses[1]


# ---- a loss that reads the user's model, of which ranks train a copy


class Kept(nn.Module):
    """Stores its features in an attribute, or in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.features, self.all = net(), None, []

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.net[:4](x)
        self.all.append(self.features)
        return self.net[4](self.features)


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.net[:4](x)
        return self.net[4](features), features, self.net[0].weight.square().sum()


@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_a_loss_that_reads_what_forward_stores_is_refused(two: Cluster):
    model = Kept()
    losses = (
        lambda p, y: F.cross_entropy(p, y) + model.features.square().mean(),
        lambda p, y: F.cross_entropy(p, y) + model.all[-1].square().mean(),
    )
    with pytest.raises(TraceError, match=r"stores a tensor in the model's attribute features, .*self\.features\)"):
        Training(model, PLAN, two, SHAPE, losses[0])
    with torch.no_grad():
        model(X)
    for loss in losses:  # it would take that of this run for a constant, without an error
        with pytest.raises(TraceError, match=r"the loss .*earlier run"):
            Training(model, PLAN, two, SHAPE, loss)
    Training(model, PLAN, two, SHAPE).close()  # stored, but not read
    model(X)
    with pytest.raises(TraceError, match=r"attribute features a result of an earlier run, .*model\.features = None"):
        Training(model, PLAN, two, SHAPE)


class Penalised(nn.Module):
    """Stores a penalty, in attributes with first values."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm2d(2, momentum=None)  # the trace takes a copy of the model for this
        self.kl, self.losses, self.aux = 0.0, [], None

    def forward(self, x: Tensor) -> Tensor:
        self.kl = self.aux = self.net[0].weight.square().sum()
        self.losses = [self.kl]
        return self.net(self.norm(x))


class Reading(nn.Module):
    def __init__(self, model: Penalised) -> None:
        super().__init__()
        self.model = model

    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(p, y) + self.model.kl


READS: dict[str, Callable[[Penalised], Callable[[Tensor, Tensor], Tensor]]] = {
    "a number": lambda m: lambda p, y: F.cross_entropy(p, y) + 0.1 * m.kl,
    "on the left": lambda m: lambda p, y: m.kl + F.cross_entropy(p, y),
    "a list": lambda m: lambda p, y: F.cross_entropy(p, y) + sum(m.losses),
    "stacked": lambda m: lambda p, y: torch.stack([F.cross_entropy(p, y), m.kl]).sum(),
    "none": lambda m: lambda p, y: F.cross_entropy(p, y) + (0 if m.aux is None else m.aux),
    "an instance": lambda m: lambda p, y: F.cross_entropy(p, y) + (m.kl if isinstance(m.kl, Tensor) else 0),
    "a module": Reading,
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The tensor attribute")
@pytest.mark.parametrize("name", READS)
def test_a_loss_that_reads_first_values_of_what_forward_stores_is_refused(name: str):
    model = Penalised()
    with pytest.raises(TraceError, match=r"stores a tensor in the model's attribute (kl|losses|aux), and the loss"):
        prepare(model, PLAN, SHAPE, READS[name](model))
    assert (model.kl, model.losses, model.aux) == (0.0, [], None)
    prepare(model, PLAN, SHAPE)


def test_the_remedy_trains_with_features_and_weights(two: Cluster):
    def compute_loss(answer: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(answer[0], labels) + answer[1].square().mean() + 0.1 * answer[2]

    made = Training(Returned(), PLAN, two, SHAPE, compute_loss, SGD)
    assert [made.step(X, Y) for _ in range(3)] == pytest.approx(
        compute_plain_losses(Returned(), compute_loss), rel=1e-12
    )
    made.close()


def test_a_monitor_that_lacks_what_is_called_is_refused(training: Training):
    monitor = SimpleNamespace(begin=print, heard=print, end=print)
    with pytest.raises(PlanError, match="monitor is a SimpleNamespace without handle_event, stops"):
        training.fit([(X, Y)], progress=False, monitor=monitor)
    assert training.steps == 0


@pytest.mark.parametrize(
    ("source", "asked", "said"),
    [
        (X.byte(), {}, r"images are torch\.uint8, but the training computes in float64"),
        (X.numpy() * 1j, {}, r"images are torch\.complex128, but .* the imaginary parts would be lost"),
        (X, {"to": "out.tif", "kind": "scores"}, "to=, kind= has no effect for a batch"),
        (X, {"level": 1, "class_names": ["dog"]}, "level=, class_names= has no effect for a batch"),
    ],
    ids=["bytes", "complex", "arguments of pictures", "what a file says of its classes"],
)
def test_a_prediction_of_a_batch_that_would_not_be_as_asked(training: Training, source: Any, asked: Any, said: str):
    with pytest.raises(Mpi4dlError, match=said):
        training.predict(source, **asked)


def test_a_file_needs_a_prediction_per_pixel(two: Cluster, tmp_path: Path):
    training = Training(nn.Sequential(nn.Conv2d(3, 2, 1), *net()), PLAN, two, (4, 3, 16, 16))
    with pytest.raises(PlanError, match=r"answers once for the whole image, with \(1, 3\)"):
        training.predict(np.zeros((16, 16, 3), np.uint8), to=tmp_path / "out.tif", memory_mb=10**6, progress=False)
    assert list(tmp_path.iterdir()) == []
    training.close()


@pytest.mark.parametrize("saving", [{"save_every": 2}, {"keep": 1}])
def test_options_of_checkpoints_need_a_folder(training: Training, saving: dict[str, int]):
    with pytest.raises(PlanError, match=r"no effect without checkpoints\. Say where they go: save=FOLDER"):
        training.fit([(X, Y)], progress=False, **saving)


@pytest.mark.parametrize(
    ("name", "value"), [("keep", 0), ("save_every", 0), ("save_every", "10"), ("steps", "3"), ("steps", 2.5)]
)
def test_counts_of_a_training_are_whole_numbers(training: Training, name: str, value: Any, tmp_path: Path):
    with pytest.raises(PlanError, match=f"{name}={value!r} must be"):
        training.fit([(X, Y)], progress=False, save=tmp_path, **{name: value})
    assert training.steps == 0


@pytest.mark.parametrize("batch", [X, (X,), {"images": X, "labels": Y}], ids=["images", "one", "dict"])
def test_verify_takes_pairs(training: Training, batch: Any):
    with pytest.raises(ImageError, match="A batch must be a pair"):
        training.verify([batch])


def test_verify_compares_in_the_modes_of_the_training(two: Cluster):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), *net()[1:])
    training = Training(model, PLAN, two, SHAPE)
    model.eval()
    assert training.verify()["ok"]
    assert not model[1].training
    training.close()


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flipped": lambda array: np.flip(np.flip(array).copy()),
    "another byte order": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "every second of another": lambda array: np.repeat(array, 2, 0)[::2],
    "read only": lambda array: np.broadcast_to(array, array.shape),
}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_may_lie_in_memory_in_any_way(two: Cluster, layout: str):
    images, labels = (LAYOUTS[layout](tensor.numpy()) for tensor in (X, Y))
    with closing(Training(net(), PLAN, two, SHAPE, optimiser=SGD)) as training:
        torch.testing.assert_close(training.predict(images), net()(X), rtol=1e-12, atol=1e-12)
        assert training.step(images, labels) == pytest.approx(F.cross_entropy(net()(X), Y).item(), rel=1e-12)
