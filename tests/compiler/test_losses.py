"""Losses over tiled predictions and labels, held against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.geometry.tiles import Grid
from tests.compiler.drawn import Pair, check, generate_images_on_grids, seeds
from tests.exact import close, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

Loss = Callable[[Tensor, Tensor], Tensor]


def make_segmenter(seed: int) -> nn.Module:
    return with_whole_weights(nn.Conv2d(2, 4, 3, padding=1), seed)


def compute_dice(prediction: Tensor, labels: Tensor) -> Tensor:
    """Milletari et al., 2016 (arXiv:1606.04797), section 3, for each class."""
    share = prediction.softmax(1)
    overlap = (share * labels).sum((0, 2, 3))
    return 1 - ((2 * overlap + 1) / (share.sum((0, 2, 3)) + labels.sum((0, 2, 3)) + 1)).mean()


def compute_tversky(prediction: Tensor, labels: Tensor) -> Tensor:
    share = prediction.sigmoid()
    hit, miss, false = (share * labels).sum(), ((1 - share) * labels).sum(), (share * (1 - labels)).sum()
    return 1 - (hit + 1) / (hit + 0.3 * miss + 0.7 * false + 1)


def compute_focal(prediction: Tensor, labels: Tensor) -> Tensor:
    """Lin et al., 2017 (arXiv:1708.02002), equation 5."""
    each = F.binary_cross_entropy_with_logits(prediction, labels, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def compute_total_variation(prediction: Tensor, labels: Tensor) -> Tensor:
    """Neighbouring pixels should be alike: slices that reach into the next tile."""
    across, down = prediction[..., 1:] - prediction[..., :-1], prediction[..., 1:, :] - prediction[..., :-1, :]
    return F.mse_loss(prediction, labels) + across.abs().mean() + down.abs().mean()


LOSSES: dict[str, Loss] = {
    "smooth l1": lambda p, y: F.smooth_l1_loss(p, y, beta=2.0),
    "huber": lambda p, y: F.huber_loss(p, y, reduction="sum", delta=3.0),
    "huber of pixels": lambda p, y: F.huber_loss(p, y, reduction="none").sum((1, 2, 3)).mean(),
    "soft margin": lambda p, y: F.soft_margin_loss(p, 2 * y - 1),
    "poisson": lambda p, y: F.poisson_nll_loss(p / 16, y),
    "kl": lambda p, y: F.kl_div(p.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "kl of logarithms": lambda p, y: F.kl_div(p.log_softmax(1), y.log_softmax(1), log_target=True, reduction="sum"),
    "bce": lambda p, y: F.binary_cross_entropy((p / 16).sigmoid(), y),
    "bce with weights": lambda p, y: F.binary_cross_entropy((p / 16).sigmoid(), y, weight=y + 1, reduction="sum"),
    "bce with a weight of classes": lambda p, y: F.binary_cross_entropy_with_logits(
        p, y, pos_weight=torch.arange(1.0, 5.0, dtype=p.dtype, device=p.device)[:, None, None]
    ),
    "bce with a weight of columns": lambda p, y: F.binary_cross_entropy_with_logits(
        p, y, weight=torch.arange(1.0, p.shape[-1] + 1, dtype=p.dtype, device=p.device)
    ),
    "dice": compute_dice,
    "tversky": compute_tversky,
    "focal": compute_focal,
    "of several": lambda p, y: compute_dice(p, y) + 0.5 * compute_focal(p, y) + 1e-3 * p.square().mean(),
    "cosine": lambda p, y: 1 - F.cosine_similarity(p + 0.5, y + 0.5).mean(),
    "charbonnier": lambda p, y: ((p - y).square() + 1e-6).sqrt().mean(),
    "signal to noise": lambda p, y: 10 * torch.log10(F.mse_loss(p, y) + 1),
    "hinge": lambda p, y: (1 - p * (2 * y - 1)).relu().mean(),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOSSES)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_losses_of_two_images(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    labels, image = (
        make_whole_numbers(2, 4, *size_px, seed=seed + 1, low=0, high=1),
        make_whole_numbers(2, 2, *size_px, seed=seed),
    )
    check(make_segmenter(seed), image, grid, labels=labels, loss=LOSSES[name], same=close)


BROADCAST: dict[str, Loss] = {
    "poisson of one channel": lambda p, y: F.poisson_nll_loss(p[:, :1] / 16, y),
    "kl of one channel": lambda p, y: torch.kl_div(p[:, :1], y, reduction=1),
    "kl of one target channel": lambda p, y: torch.kl_div(p, y[:, :1], reduction=1),
    "kl of one row": lambda p, y: torch.kl_div(p[:, :, :1], y, reduction=1),
    "kl of what all tiles hold": lambda p, y: torch.kl_div(p.mean((2, 3), keepdim=True), y, reduction=1),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
def test_means_of_losses_that_are_broadcast(name: str, grid: Grid):
    """They divide by the number of losses, whichever argument is the larger one."""
    labels, image = make_whole_numbers(2, 4, 6, 8, seed=1, low=0, high=1), make_whole_numbers(2, 2, 6, 8)
    check(make_segmenter(0), image, grid, labels=labels, loss=BROADCAST[name], same=close)


@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_total_variation(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    assume(size_px[0] > grid.rows and size_px[1] > grid.cols)
    labels, image = make_whole_numbers(2, 4, *size_px, seed=seed + 1), make_whole_numbers(2, 2, *size_px, seed=seed)
    check(make_segmenter(seed), image, grid, labels=labels, loss=compute_total_variation, same=close)


@set_trials(10)
@given(
    case=generate_images_on_grids(),
    weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    seed=seeds,
    ignored=st.sampled_from([-100, 2]),
)
def test_negative_log_likelihood(case: tuple[Grid, Pair], weighted: bool, reduction: str, seed: int, ignored: int):
    grid, size_px = case
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double() if weighted else None
    judge = nn.NLLLoss(weight, ignore_index=ignored, reduction=reduction)
    labels = make_whole_numbers(2, *size_px, seed=seed, low=0, high=3).long()
    assume((labels != ignored).any())
    model, image = nn.Sequential(make_segmenter(seed), nn.LogSoftmax(1)), make_whole_numbers(2, 2, *size_px, seed=seed)
    check(model, image, grid, labels=labels, loss=judge, same=close)


@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_dice_of_class_numbers(case: tuple[Grid, Pair], seed: int):
    """Labels (N, H, W), made one-hot on the tiles."""
    grid, size_px = case
    labels = make_whole_numbers(2, *size_px, seed=seed, low=0, high=3).long()
    loss = lambda p, y: compute_dice(p, F.one_hot(y, 4).permute(0, 3, 1, 2))  # noqa: E731
    check(
        make_segmenter(seed), make_whole_numbers(2, 2, *size_px, seed=seed), grid, labels=labels, loss=loss, same=close
    )
