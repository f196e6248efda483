"""What ranks do not take is refused with code that makes it what they take: the code of each message is run here."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, ImageError, Plan, TraceError, Training, forecast
from mpi4dl_nb.engines.graph.model_inputs import format_packing

LAYERS = Plan(split_size=2, spatial_size=0, precision="float64")
SGD = partial(torch.optim.SGD, lr=0.1)


def run_wrap(message: str, model: nn.Module) -> nn.Module:
    """Execute the class in a message, and return it around a model."""
    names: dict[str, object] = {"torch": torch}
    exec(message[message.index("class Around") :], names)
    return names["Around"](model)


def check_training(
    model: nn.Module, wrapped: nn.Module, inputs, images, labels, loss=nn.functional.cross_entropy, prefix="model."
) -> None:
    """Train a wrapped model on ranks, and the model itself plainly on its own inputs: weights are the same."""
    plain = copy.deepcopy(model)
    optimiser = SGD(plain.parameters())
    loss(plain(*inputs), labels).backward()
    optimiser.step()
    with Cluster(2, backend="loopback") as cluster:
        training = Training(wrapped, LAYERS, cluster, images.shape, loss=loss, optimiser=SGD)
        training.step(images, labels)
        trained = training.state_dict()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(trained[f"{prefix}{name}"], weight, rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_head(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3)).double()


@pytest.mark.parametrize("channels", [1, 2])
def test_volumes_are_batches_as_they_are(channels):
    volumes, labels = torch.randn(2, channels, 4, 8, 6).double(), torch.tensor([0, 2])
    model = nn.Sequential(
        nn.Conv3d(channels, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(), nn.Conv3d(3, 3, 3, stride=2), nn.Flatten()
    ).double()
    model.append(nn.Linear(18, 3).double())
    check_training(model, model, [volumes], volumes, labels, prefix="")


def test_signals_are_batches_as_they_are():
    signals, labels = torch.randn(2, 3, 20).double(), torch.tensor([0, 2])
    model = nn.Sequential(nn.Conv1d(3, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    check_training(model, model, [signals], signals, labels, prefix="")


class Registers(nn.Module):
    """Compares two images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1).double(), make_head(4)

    def forward(self, fixed, moving):
        return self.head(self.first(fixed) - self.first(moving).tanh())


def test_two_images_are_channels_of_one():
    fixed, moving, labels = torch.randn(2, 3, 8, 8).double(), torch.randn(2, 3, 8, 8).double(), torch.tensor([0, 2])
    model = Registers()
    with pytest.raises(TraceError, match="takes fixed, moving") as caught:
        forecast(model, LAYERS, (2, 3, 8, 8), "Summit")
    message = str(caught.value)
    assert "torch.cat([fixed, moving], 1)" in message
    check_training(model, run_wrap(message, model), [fixed, moving], torch.cat([fixed, moving], 1), labels)


class ComputesItsLoss(nn.Module):
    """Returns its prediction if it is given no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1).double(), make_head(4)

    def forward(self, x, labels):
        prediction = self.head(self.first(x).relu())
        return prediction if labels is None else nn.functional.cross_entropy(prediction, labels)


class NamesItsLabels(ComputesItsLoss):
    """Takes labels by their name only."""

    def forward(self, x, *, labels):
        return super().forward(x, labels)


@pytest.mark.parametrize("kind", [ComputesItsLoss, NamesItsLabels])
def test_labels_belong_to_the_loss(kind):
    images, labels = torch.randn(2, 3, 8, 8).double(), torch.tensor([0, 2])
    model = kind()
    with pytest.raises(TraceError, match="Give labels to the loss alone") as caught:
        forecast(model, LAYERS, images.shape, "Summit")
    wrapped = run_wrap(str(caught.value), model)
    check_training(wrapped, wrapped, [images], images, labels, prefix="")


class Fewest(nn.Module):
    def forward(self):
        return torch.zeros(1)


@pytest.mark.parametrize("model", [nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(3, 4, 3))])
def test_models_of_one_argument_pass(model):
    assert forecast(model, Plan(split_size=1), (1, 3, 8, 8), "Summit").ranks == 4


def test_a_model_without_an_argument_is_refused():
    with pytest.raises(TraceError, match="takes no argument"):
        forecast(Fewest(), Plan(split_size=1), (1, 3, 8, 8), "Summit")


# Labels that are a dict.


def compute_box_loss(prediction, labels):
    return (
        nn.functional.cross_entropy(prediction, labels["kind"])
        + (prediction.sum(1) - labels["box"].sum(1)).pow(2).mean()
    )


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, backend="loopback") as ready:
        yield ready


def find_unpacking(message: str) -> tuple[str, str]:
    """Return the two expressions of a message: of the tensor with all labels, and of the loss that takes it."""
    packing = message[message.index("torch.cat([part") :].partition(", which the loss")[0]
    return packing, message[message.index("lambda prediction, y") :].rstrip(".").removesuffix(")") + ")"


@pytest.mark.parametrize("asked", ["Training", "step", "fit"])
def test_a_dict_of_labels_is_packed_into_one_tensor(cluster, asked):
    images = torch.randn(2, 3, 8, 8).double()
    labels = {"box": torch.randn(2, 4).double(), "kind": torch.tensor([0, 2])}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *make_head(4)).double()
    ask = {
        "Training": lambda: Training(model, LAYERS, cluster, images.shape, labels=labels),
        "step": lambda: Training(model, LAYERS, cluster, images.shape).step(images, labels),
        "fit": lambda: Training(model, LAYERS, cluster, images.shape).fit([(images, labels)], progress=False),
    }[asked]
    with pytest.raises(ImageError) as caught:
        ask()
    message = str(caught.value)
    assert "a dict of 'box' (2, 4) float64, 'kind' (2,) int64" in message
    assert len(message) < 600, "numbers of tensors are no help"
    packing, loss = find_unpacking(message)
    packed = eval(packing, {"torch": torch, "labels": labels})
    split_loss = eval(loss, {"torch": torch, "your_loss": compute_box_loss})
    training = Training(model, LAYERS, cluster, images.shape, loss=split_loss, labels=packed)
    assert training.step(images, packed) == pytest.approx(compute_box_loss(model(images), labels).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("numbers", "floats"), [([2**24 + 1, -(2**40) - 1], torch.float32), ([2051, 0], torch.float16)]
)
def test_packed_labels_keep_all_their_digits(numbers, floats):
    labels = {"kind": torch.tensor(numbers), "known": torch.tensor([True, False]), "box": torch.rand(2, 3).to(floats)}
    packing, loss = find_unpacking(format_packing(labels))
    packed = eval(packing, {"torch": torch, "labels": labels})
    unpacked = eval(loss, {"torch": torch, "your_loss": lambda prediction, parts: parts})(None, packed)
    for name, part in labels.items():
        torch.testing.assert_close(unpacked[name], part, rtol=0, atol=0)


def test_whole_numbers_that_no_float_has_are_not_packed_with_floats():
    labels = {"kind": torch.tensor([2**53 + 1, 0]), "box": torch.rand(2, 3)}
    assert format_packing(labels) == ""
    assert format_packing({**labels, "box": torch.tensor([1, 2])})


def test_a_dict_of_one_tensor_is_that_tensor_and_needs_no_packing():
    assert format_packing({"kind": torch.tensor([1, 2])}) == ""


@pytest.mark.parametrize(
    ("images", "labels", "remedy"),
    [
        ((torch.zeros(2, 3, 8, 8),) * 2, torch.tensor([0, 1]), r"a tuple of 2 tensors.*torch.cat\(images, 1\)"),
        (torch.zeros(2, 3, 8, 8), [{"a": torch.zeros(900)}] * 2, "labels are a list of 2 values"),
        (torch.zeros(2, 3, 8, 8), {"a": torch.zeros(2), "b": "text"}, r"a dict of 'a' \(2,\) float32, 'b' a str"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint16), torch.tensor([0, 1]), r"images.float\(\) / 65535"),
    ],
    ids=["two images", "dicts in a list", "a text among labels", "16 bits"],
)
def test_what_is_no_tensor_is_described_without_its_numbers(cluster, images, labels, remedy):
    training = Training(
        nn.Sequential(nn.Conv2d(3, 4, 3), *make_head(4)).float(),
        Plan(split_size=2, spatial_size=0),
        cluster,
        (2, 3, 8, 8),
    )
    with pytest.raises(ImageError, match=remedy) as caught:
        training.step(images, labels)
    assert len(str(caught.value)) < 400


def test_the_error_for_a_batch_of_three_values_says_what_to_do_with_two_images(cluster):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *make_head(4)).float()
    training = Training(model, Plan(split_size=2, spatial_size=0), cluster, (2, 3, 8, 8))
    image = torch.zeros(2, 3, 8, 8)
    with pytest.raises(ImageError, match=r"of 3 values.*torch.cat\(\[a, b\], 1\)"):
        training.fit([(image, image, torch.tensor([0, 1]))], progress=False)
