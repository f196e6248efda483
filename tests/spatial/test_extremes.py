"""Reductions over space that are no sums: maxima, norms, logarithms of sums, held against one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from engines.errors import TraceError
from engines.spatial.tiles import Grid
from tests.exact import close, whole_numbers, with_whole_weights
from tests.spatial.drawn import Pair, check, images_on_grids, seeds, trials

EXTREMES = {
    "amax over space": lambda x: x.amax((2, 3)),
    "amin over space": lambda x: x.amin((2, 3)),
    "amax over space and channels": lambda x: x.amax((1, 2, 3)),
    "largest of all": lambda x: x.max() + x.sum(),
    "amax behind permute": lambda x: x.permute(0, 2, 3, 1).amax((1, 2)),
    "global max pool": lambda x: F.adaptive_max_pool2d(x, 1).flatten(1),
    "global max pool, goes back": lambda x: x * F.adaptive_max_pool2d(x, 1),
    "scaled to the largest": lambda x: x - x.amax((2, 3), keepdim=True).detach(),
}


@pytest.mark.parametrize("name", EXTREMES)
@trials(8)
@given(case=images_on_grids(), high=st.sampled_from([0, 3, 1000]), seed=seeds)
def test_extremes(name: str, case: tuple[Grid, Pair], high: int, seed: int):
    """Bit-equal. Where many pixels are largest their gradient is shared, or goes to the first, as in one process."""
    grid, size_px = case
    function, image = EXTREMES[name], whole_numbers(2, 2, *size_px, seed=seed, low=-3, high=high)
    assume(image.unique().numel() > 1)
    check(function, image, grid)


@trials(20)
@given(case=images_on_grids(), fraction=st.tuples(*[st.floats(0.25, 1.5)] * 2), seed=seeds)
def test_adaptive_max_pool(case: tuple[Grid, Pair], fraction: tuple[float, float], seed: int):
    grid, size_px = case
    out_px = tuple(max(parts, math.ceil(size * share)) for size, share, parts in
                   zip(size_px, fraction, (grid.rows, grid.cols), strict=True))  # fmt: skip
    check(nn.AdaptiveMaxPool2d(out_px), whole_numbers(1, 2, *size_px, seed=seed), grid)


@trials(6)
@given(case=images_on_grids(), seed=seeds)
def test_attention_by_average_and_maximum(case: tuple[Grid, Pair], seed: int):
    """CBAM's channel attention (Woo et al., 2018, arXiv:1807.06521): one perceptron judges both pools."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.judge = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.judge(F.adaptive_avg_pool2d(x, 1)) + self.judge(F.adaptive_max_pool2d(x, 1))).sigmoid()

    grid, size_px = case
    check(with_whole_weights(Attention(), seed), whole_numbers(2, 4, *size_px, seed=seed), grid, same=close)


NORMS = {
    "smallest of all": lambda x: x.min() * x,
    "amax over space, kept": lambda x: x * x.amax((-2, -1), keepdim=True),
    "norm of all": lambda x: x.norm(),
    "norm over space": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "sum of absolutes": lambda x: torch.linalg.vector_norm(x, 1, dim=(2, 3), keepdim=True) * x,
    "cubic norm": lambda x: torch.linalg.vector_norm(x, 3, dim=(1, 2, 3)),
    "normalised images": lambda x: F.normalize(x, dim=(1, 2, 3)),
    "norm of nothing": lambda x: (x * 0).norm() + x,
    "logarithm of a sum": lambda x: x.logsumexp((2, 3)),
    "global response norm": lambda x: x * (g := x.norm(p=2, dim=(2, 3), keepdim=True)) / (g.mean(1, True) + 1e-6),
    "softmax by hand": lambda x: (x - x.logsumexp((2, 3), keepdim=True)).exp(),
}


@pytest.mark.parametrize("name", NORMS)
@trials(5)
@given(case=images_on_grids(), seed=seeds)
def test_norms_of_images(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(NORMS[name], whole_numbers(2, 4, *size_px, seed=seed), grid, same=close)


REFUSED = {
    "places of maxima": lambda x: x + F.adaptive_max_pool2d(x, 1, return_indices=True)[1],
    "largest of each row": lambda x: x.amax(3),
    "norm of each row": lambda x: torch.linalg.vector_norm(x, dim=3),
    "largest absolute": lambda x: torch.linalg.vector_norm(x, math.inf, dim=(2, 3)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    with pytest.raises(TraceError, match=r"^aten\."):
        check(REFUSED[name], whole_numbers(1, 4, 8, 8), Grid(2, 2))
