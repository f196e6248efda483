"""What is claimed to be the loss of the whole batch is that; whatever else it is, is said to be unknown."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from tests.compiler.losses import (
    SIZE,
    WHOLE,
    Loss,
    compute_dice_loss,
    compute_dice_of_images,
    compute_focal_loss,
    make_segmenter,
    make_unbalanced_batch,
)

EXACT: dict[str, Loss] = {
    **WHOLE,
    "focal": compute_focal_loss,
    "dice of images": compute_dice_of_images,
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum over a square": lambda p, y: p.square().sum() / 7,
    "one and a mean": lambda p, y: 1 - p.sigmoid().mean(),
    "stacked": lambda p, y: torch.stack([p.mean(), p.square().mean()]).sum(),
    "share of the valid": lambda p, y: p.square().mean() * (y != -100).to(p.dtype).mean(),
    "classes of the batch": lambda p, y: (
        p.square().sum((0, 2, 3)) / (F.one_hot(y.clamp(min=0), 3).sum((0, 1, 2)) + 1)
    ).sum(),
    "own mean": lambda p, y: F.cross_entropy(p, y, reduction="none").sum() / (y >= 0).sum(),
    "split": lambda p, y: sum(part.square().mean() for part in p.split(1, dim=1)),
    "constant": lambda p, y: p.mean() * 0 + 3.0,
    "count as a number": lambda p, y: p.sum() / p.numel() + p.sum() * (1 / len(y)),
    "read before and after": lambda p, y: p.square().mean() + p.contiguous().double().mean(),
    "broadcast": lambda p, y: torch.broadcast_tensors(p, p[:, :1], p.new_ones(8))[1].square().mean(),
    "the larger of one and the count": lambda p, y: (
        p.square().sum() / torch.max(torch.ones((), dtype=p.dtype), (y >= 0).sum()).to(p.dtype)
    ),
    "the smaller of a limit and the count": lambda p, y: (
        p.square().sum() * torch.min(torch.full((), 1e6, dtype=p.dtype), (y >= 0).sum())
    ),
    "classes that the batch has": lambda p, y: (
        p.square().mean((0, 2, 3)) * F.one_hot(y.clamp(min=0), 3).sum((0, 1, 2)).bool().to(p.dtype)
    ).sum(),
    "a count in few bits": lambda p, y: p.square().mean() * (y >= 0).sum().to(torch.int8).to(p.dtype),
    "bits of a count": lambda p, y: p.square().mean() * (y >= 0).sum().double().view(torch.int64).log().to(p.dtype),
    "looked up": lambda p, y: (torch.ones(3, dtype=p.dtype)[y.clamp(min=0)] * p[:, 0]).sum() / (y >= 0).sum(),
}
UNKNOWN: dict[str, Loss] = {
    "dice": compute_dice_loss,
    "root of a mean": lambda p, y: p.square().mean().sqrt(),
    "square of a sum": lambda p, y: p.sum() ** 2,
    "product of means": lambda p, y: p.mean() * p.square().mean(),
    "away from the mean": lambda p, y: (p - p.mean()).square().mean(),
    "softmax over images": lambda p, y: p.softmax(0).square().mean(),
    "the first image": lambda p, y: p[:1].mean(),
    "the largest": lambda p, y: p.max(),
    "the largest of images": lambda p, y: p.amax(0).mean(),
    "sorted images": lambda p, y: p.sort(0).values[0].mean(),
    "neighbours in the batch": lambda p, y: (p.flip(0) * p).mean(),
    "other order": lambda p, y: (p.transpose(0, 1).reshape(3, -1)[:, :5]).mean(),
    "divided by answers": lambda p, y: p.square().sum() / (1 + p.abs().sum()),
    "images against images": lambda p, y: (p.flatten(1) @ p.flatten(1).T).mean(),
    "running sum": lambda p, y: p.cumsum(0).mean(),
    "square of the count": lambda p, y: p.sum() / len(y) ** 2,
    "size in a tensor": lambda p, y: p.mean() * torch.tensor(float(len(y))),
    "variance": lambda p, y: p.var(),
    "labels from answers": lambda p, y: F.cross_entropy(
        p, (p - p.mean((2, 3), keepdim=True)).detach().argmax(1), torch.arange(1, 4, dtype=p.dtype)
    ),
    "rounded": lambda p, y: p.sum().long() * p.mean(),
    "the first half of the images": lambda p, y: p[: len(p) // 2].square().mean(),
    "a weight for each place": lambda p, y: (p.mean((1, 2, 3)) * torch.arange(1, 9, dtype=p.dtype)[: len(p)]).mean(),
    "a mean for each pair": lambda p, y: p.mean().expand(len(y), len(y)).sum(),
    "logarithm of the count": lambda p, y: p.mean() * math.log(len(y) / 2),
    "drawn at random": lambda p, y: p.mean() * torch.rand((), dtype=p.dtype),
    "drawn by a generator": lambda p, y: p.mean() * torch.poisson(torch.full((64,), 9.0, dtype=p.dtype)).mean(),
    "images as the classes of one": lambda p, y: F.multilabel_margin_loss(p.mean((1, 2, 3)), y[:, 0, 0].clamp(min=0)),
    "images as the classes of shares": lambda p, y: F.cross_entropy(p.mean((1, 2, 3)), y[:, 0, 0].abs().to(p.dtype)),
    "a count taken as a bool": lambda p, y: (
        p.square().mean((0, 2, 3)) * F.one_hot(y.clamp(min=0), 3).sum((0, 1, 2), dtype=torch.bool).to(p.dtype)
    ).sum(),
    "distance over images": lambda p, y: F.pairwise_distance(p.mean((1, 2, 3)), p.amax((1, 2, 3))),
    "broadcast to pairs": lambda p, y: (
        torch.sub(*torch.broadcast_tensors(p.mean((2, 3))[:, :1], p.mean((1, 2, 3)))).square().mean()
    ),
    "another loss for eight": lambda p, y: p.square().mean() if len(p) == 4 else p.mean(),
}
PLAN = Plan(split_size=1, spatial_size=0, parts=2, precision="float64")


def compute_losses(loss: Loss) -> tuple[str, float, float]:
    """What is said to be unknown, the loss of a step in two micro-batches, and that of the whole batch."""
    (images, labels), model = make_unbalanced_batch(8, 0), make_segmenter()
    recipe = prepare(model, PLAN, (8, 3, *SIZE), loss, device="cpu")

    def work(world):
        training = RankTraining(world, recipe)
        return training.step(training.cut({"images": images, "labels": labels})).losses

    (found,) = run_ranks(1, work)
    judge = loss.double() if isinstance(loss, nn.Module) else loss
    return recipe.graph.whole.unknown, sum(found.values()) / 2, judge(model(images), labels).item()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", EXACT)
def test_what_is_known_is_exact(name: str):
    unknown, found, wanted = compute_losses(EXACT[name])
    assert unknown == ""
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-14)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_is_said(name: str):
    unknown, found, wanted = compute_losses(UNKNOWN[name])
    assert unknown
    assert found != pytest.approx(wanted, rel=1e-11), "it would have been worth knowing"


class Weighted(nn.Module):
    """A weight of its own for each place in the batch."""

    def __init__(self, shape: tuple[int, ...], squares: bool) -> None:
        super().__init__()
        self.squares = squares
        self.register_buffer("weight", torch.linspace(1, 2, math.prod(shape), dtype=torch.float64).view(shape))

    def forward(self, p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(p, self.weight) if self.squares else (p * self.weight).mean()


@pytest.mark.parametrize(("shape", "squares"), [((4, 1, 1, 1), False), ((4, 3, *SIZE), False), ((4, 3, *SIZE), True)])
def test_a_weight_for_each_image_of_a_micro_batch_is_none_for_those_of_a_batch(shape: tuple[int, ...], squares: bool):
    assert prepare(make_segmenter(), PLAN, (8, 3, *SIZE), Weighted(shape, squares), device="cpu").graph.whole.unknown
