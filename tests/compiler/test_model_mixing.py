"""A model that computes with several images at once is warned of where a step gives it micro-batches, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.plan import Plan

SEVERAL = Plan(split_size=1, spatial_size=0, accumulate=2, precision="float64")
ONE = Plan(split_size=1, num_spatial_parts=2, slice_method="vertical", precision="float64")
Change = Callable[[Tensor], Tensor]


class Changed(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.stem, self.change, self.head = nn.Conv2d(3, 4, 3, padding=1), change, nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.change(torch.relu(self.stem(images))).mean((2, 3)))


class Attention(nn.Module):
    """Attention and an LSTM over the columns; `first` is the axis of the images where they have batches."""

    def __init__(self, first: int, meant: int) -> None:
        super().__init__()
        self.first, batched = first, meant == 0
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=batched)
        self.recurrent = nn.LSTM(4, 4, batch_first=batched)

    def forward(self, x: Tensor) -> Tensor:
        y = x.mean(2).transpose(1, 2).transpose(0, self.first)
        y = self.recurrent(self.attention(y))[0].transpose(0, self.first)
        return x * y.mean(1)[:, :, None, None]


def normalise_by_hand(x: Tensor) -> Tensor:
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
    return (x - mean) / (variance + 1).sqrt()


def append_deviation(x: Tensor) -> Tensor:
    deviation = x.std(0, keepdim=True).mean().expand(len(x), 1, *x.shape[2:])
    return torch.cat([x, deviation], 1)[:, 1:]


def compute_attention_over_images(x: Tensor) -> Tensor:
    flat = x.flatten(1)
    return (torch.softmax(flat @ flat.T, 1) @ flat).view_as(x)


MIXING: dict[str, Change] = {
    "mixup by flip": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "mixup by roll": lambda x: x + x.roll(1, 0),
    "roll without an axis": lambda x: x + x.roll(1),
    "mixup by randperm": lambda x: x + x[torch.randperm(len(x))],
    "minibatch deviation": append_deviation,
    "softmax": lambda x: x.softmax(0),
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "norm by hand": normalise_by_hand,
    "division": lambda x: x / x.shape[0],
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "sort": lambda x: x.sort(0)[0],
    "largest of all": lambda x: x / (1 + x.amax()),
    "norm": lambda x: x / (1 + x.norm()),
    "a number of each image": lambda x: x * torch.linspace(0, 1, len(x), dtype=x.dtype).view(-1, 1, 1, 1),
    "attention": compute_attention_over_images,
    "einsum": lambda x: torch.einsum("nchw,mchw->nchw", x, x),
    "another axis": lambda x: x + x.permute(1, 0, 2, 3).flip(1).permute(1, 0, 2, 3),
    "flattened": lambda x: x + x.reshape(-1).flip(0).view_as(x),
    "the first image": lambda x: x * x[0],
    "sequences for batches": Attention(first=0, meant=1),
}

SEPARATE: dict[str, Change] = {
    "norms": lambda x: functional.layer_norm(functional.group_norm(functional.instance_norm(x), 2), x.shape[1:]),
    "stochastic depth": lambda x: x * torch.rand(len(x), 1, 1, 1, dtype=x.dtype).add(0.9).floor(),
    "a class token": lambda x: torch.cat([x.new_ones(1, 1, *x.shape[2:]).expand(len(x), -1, -1, -1), x], 1)[:, 1:],
    "channels last": lambda x: functional.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2).flip(-1),
    "squeezed": lambda x: x * x.mean((2, 3), keepdim=True).squeeze(-1).squeeze(-1)[:, :, None, None],
    "products": lambda x: x * (x.flatten(2) @ x.flatten(2).mT).mean((1, 2)).view(-1, 1, 1, 1),
    "grid": lambda x: functional.grid_sample(
        x, functional.affine_grid(x.mean((2, 3))[:, :2, None].expand(-1, 2, 3), x.shape, False), align_corners=False
    ),
    "another size": lambda x: x / x.shape[-1],
    "images first": Attention(first=0, meant=0),
    "images second": Attention(first=1, meant=1),
}


def find_mixing(change: Change, images: int = 2) -> str:
    found = TraceCache(Changed(change), (images, 3, 8, 8), nn.CrossEntropyLoss()).get_graph(SEVERAL).whole
    assert found
    return found.mixes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_images_is_found(name: str):
    assert "test_model_mixing.py" in find_mixing(MIXING[name])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SEPARATE)
def test_a_model_that_keeps_images_separate_is_not(name: str):
    assert not find_mixing(SEPARATE[name])


def test_a_single_image_is_a_special_case():
    """`squeeze` removes the images' axis, too, if there is one."""
    assert not find_mixing(lambda x: x * x.amax((2, 3)).squeeze().reshape(-1, 4, 1, 1), images=1)


@pytest.mark.parametrize("plan", [SEVERAL, Plan(split_size=1, spatial_size=0, data_parallel=2, precision="float64")])
def test_the_warning_and_what_verify_compares_with(plan: Plan):
    with Cluster(plan.ranks, backend="loopback") as cluster:
        with pytest.warns(UserWarning, match=r"computes with several images at once.*\(see flip in .*2 micro-batches"):
            training = Training(Changed(MIXING["mixup by flip"]), plan, cluster, (2, 3, 8, 8))
        assert "each computed by itself" in repr(training)
        proof = training.verify()
    assert proof["ok"], "one process does the same"
    assert "micro-batches one after another" in proof["why"]


def test_verify_takes_the_whole_batch_where_no_warning_was_given(monkeypatch: pytest.MonkeyPatch):
    """Were the analysis blind, verify would see it."""
    monkeypatch.setattr("mpi4dl_nb.engines.compiler.model_mixing.ModelAnalysis.find_mixing", lambda self: "")
    with Cluster(1, backend="loopback") as cluster:
        for change, right in (("mixup by flip", False), ("mean", False)):
            proof = Training(Changed(MIXING[change]), SEVERAL, cluster, (2, 3, 8, 8)).verify()
            assert proof["ok"] is right


class Normed(nn.Module):
    """Batch norms, dropout, and an instance norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(4, 4, 3),
            nn.InstanceNorm2d(4, track_running_stats=True), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@pytest.mark.nightly
def test_norms_and_draws_go_by_micro_batch_in_one_call_of_the_model():
    with warnings.catch_warnings(), Cluster(2, backend="loopback") as cluster:
        plan = Plan(split_size=2, spatial_size=0, parts=2, precision="float64")
        loss = nn.CrossEntropyLoss(ignore_index=1)
        training = Training(Normed(), plan, cluster, (4, 3, 12, 12), loss=loss)
        assert training.recipe.compares_whole
        proof = training.verify()
    assert proof["ok"], proof


WARNS = "The model computes with several images at once in evaluation mode"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "images", "warned"),
    [(SEVERAL, 2, False), (SEVERAL, 3, True), (SEVERAL, 4, True), (ONE, 2, False), (ONE, 3, True)],
    ids=["one of two micro-batches", "micro-batches and copies", "micro-batches", "one batch", "copies"],
)
def test_predictions_that_depend_on_the_images_beside_are_those_of_one_process_or_warned_of(
    plan: Plan, images: int, warned: bool
):
    model, batch = Changed(MIXING["mixup by flip"]), torch.randn(images, 3, 8, 8, dtype=torch.float64)
    with Cluster(plan.ranks, backend="loopback") as cluster, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(model, plan, cluster, (2, 3, 8, 8))
        caught.clear()
        found = training.predict(batch)
    assert [WARNS in str(each.message) and each.filename == __file__ for each in caught] == [True] * warned
    assert torch.allclose(found, model.double().eval()(batch), atol=1e-12) != warned


@pytest.mark.sampled(1)
@pytest.mark.parametrize("images", [4, 5])
def test_held_out_images_that_depend_on_those_beside_are_warned_of(images: int):
    held_out, pairs = SyntheticImages(images, (8, 8), 3), [(torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))]
    with Cluster(ONE.ranks, backend="loopback") as cluster, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for change in (MIXING["mixup by flip"], SEPARATE["norms"]):
            Training(Changed(change), ONE, cluster, (2, 3, 8, 8)).fit(pairs, held_out=held_out, progress=False)
    assert [WARNS in str(each.message) and each.filename == __file__ for each in caught] == [True] * (images % 2)


def test_a_model_that_takes_one_image_only_is_predicted_and_warned_of():
    model = Changed(lambda x: x * x.mean((2, 3)).view(1, 4, 1, 1))
    batch = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with Cluster(1, backend="loopback") as cluster:
        with pytest.warns(UserWarning, match="several images at once"):
            training = Training(model, SEVERAL, cluster, (1, 3, 8, 8))
        with pytest.warns(UserWarning, match=WARNS):
            found = training.predict(batch)
    whole = torch.cat([model.double().eval()(image) for image in batch.split(1)])
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
