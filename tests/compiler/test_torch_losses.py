"""The losses of `torch.nn` over two micro-batches: nobody is warned where the loss is that of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.plan import Plan
from tests.compiler.losses import Loss

SHAPE, TWO = (4, 2, 8, 8), Plan(split_size=1, spatial_size=0, parts=2, precision="float64")


def make_pixel_scorer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(2, 3, 3, padding=1).double()


def make_image_scorer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        make_pixel_scorer(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3).double()
    )


LABELS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda drawn: drawn,
    "positive": Tensor.abs,
    "shares": Tensor.sigmoid,
    "probabilities": lambda drawn: drawn.softmax(1),
    "signs": Tensor.sign,
    "yes or no": lambda drawn: (drawn > 0).long(),
    "classes": lambda drawn: drawn.argmax(1),
    "several classes": lambda drawn: drawn.argsort(1) - (drawn < 0).long().cumsum(1).clamp(max=1),
}

Change = Callable[[Callable[..., Tensor], Tensor, Tensor], Tensor]


def apply_to_scores(judge: Loss, p: Tensor, y: Tensor) -> Tensor:
    return judge(p, y)


def apply_to_logarithms(judge: Loss, p: Tensor, y: Tensor) -> Tensor:
    return judge(p.log_softmax(1), y)


LOSSES: dict[str, tuple[Any, str, Change]] = {
    "MSELoss": (nn.MSELoss, "numbers", apply_to_scores),
    "L1Loss": (nn.L1Loss, "numbers", apply_to_scores),
    "SmoothL1Loss": (nn.SmoothL1Loss, "numbers", apply_to_scores),
    "HuberLoss": (nn.HuberLoss, "numbers", apply_to_scores),
    "BCELoss": (nn.BCELoss, "shares", lambda judge, p, y: judge(p.sigmoid(), y)),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss, "shares", apply_to_scores),
    "KLDivLoss": (nn.KLDivLoss, "probabilities", apply_to_logarithms),
    "PoissonNLLLoss": (nn.PoissonNLLLoss, "positive", apply_to_scores),
    "PoissonNLLLoss, full": (partial(nn.PoissonNLLLoss, full=True), "positive", apply_to_scores),
    "SoftMarginLoss": (nn.SoftMarginLoss, "signs", apply_to_scores),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss, "signs", apply_to_scores),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss, "yes or no", apply_to_scores),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, "several classes", apply_to_scores),
    "MultiMarginLoss": (nn.MultiMarginLoss, "classes", apply_to_scores),
    "CrossEntropyLoss": (nn.CrossEntropyLoss, "classes", apply_to_scores),
    "CrossEntropyLoss, probabilities": (nn.CrossEntropyLoss, "probabilities", apply_to_scores),
    "NLLLoss": (nn.NLLLoss, "classes", apply_to_logarithms),
    "TripletMarginLoss": (nn.TripletMarginLoss, "numbers", lambda judge, p, y: judge(p, y, 1 - y)),
    "TripletMarginWithDistanceLoss": (
        nn.TripletMarginWithDistanceLoss,
        "numbers",
        lambda judge, p, y: judge(p, y, 1 - y),
    ),
    "CosineEmbeddingLoss": (nn.CosineEmbeddingLoss, "numbers", lambda judge, p, y: judge(p, y, y[:, 0].sign())),
    "MarginRankingLoss": (nn.MarginRankingLoss, "numbers", lambda judge, p, y: judge(p, y, y.sign())),
    "several terms": (
        nn.MSELoss,
        "numbers",
        lambda judge, p, y: judge(p, y) + judge(p.double(), y[:, :1].expand_as(p)),
    ),
    "root of MSELoss": (nn.MSELoss, "numbers", lambda judge, p, y: judge(p, y).sqrt()),
}
OF_IMAGES = {"MultiLabelMarginLoss", "MultiMarginLoss", "CosineEmbeddingLoss"}
"""Losses that take (N, C) only."""


@pytest.fixture(scope="module")
def cluster():
    with Cluster(1, backend="loopback") as started:
        yield started


@pytest.mark.sampled(6)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make", [make_pixel_scorer, make_image_scorer])
@pytest.mark.parametrize("name", LOSSES)
def test_a_warning_comes_exactly_where_the_loss_is_another(cluster, name: str, make: Any, reduction: str):
    if name in OF_IMAGES and make is make_pixel_scorer:
        pytest.skip("PyTorch's loss takes no pixels")
    found, wanted, warned = compute_losses(cluster, name, make(), reduction)
    assert (found == pytest.approx(wanted, rel=1e-12, abs=1e-13)) == (not warned), warned
    assert bool(warned) == (name == "root of MSELoss")
    assert all("(see sqrt in loss" in text for text in warned)


def compute_losses(cluster: Cluster, name: str, model: nn.Module, reduction: str) -> tuple[float, float, list[str]]:
    """The loss of a step in two micro-batches, that of the whole batch, and the warnings on the way."""
    made, kind, change = LOSSES[name]
    loss: Loss = partial(change, made(reduction=reduction))
    random = torch.Generator().manual_seed(1)
    images = torch.randn(SHAPE, dtype=torch.float64, generator=random)
    labels = LABELS[kind](torch.randn(model(images).shape, dtype=torch.float64, generator=random))
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", "The loss of a step is the mean")
        warnings.filterwarnings("ignore", "reduction: 'mean' divides")  # PyTorch's own, on KLDivLoss
        wanted = loss(model(images), labels).item()
        training = Training(model, TWO, cluster, SHAPE, loss=loss, labels=labels)
        found = training.step(images, labels)
        training.close()
    return found, wanted, [str(each.message) for each in caught]


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.huber_loss])
def test_the_answer_of_a_loss_that_broadcasts_is_the_models_own(loss: Loss):
    graph = trace(make_pixel_scorer(), loss, TensorSpec(SHAPE, "float64"), TensorSpec((4, 3, 8, 8), "float64"))
    assert graph.answers == ("conv2d",)
    assert [node.operator for node in graph.nodes if node.module == "loss"] == [f"aten.{loss.__name__}.default"]
