"""Reductions over space that are no sums: maxima, norms, logarithms of sums, held against one process."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.geometry.tiles import Grid
from tests.compiler.drawn import Geometry, Pair, check, generate_geometries, generate_images_on_grids, seeds
from tests.exact import close, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

EXTREMES = {
    "amax over space": lambda x: x.amax((2, 3)),
    "amin over space": lambda x: x.amin((2, 3)),
    "amax over space and channels": lambda x: x.amax((1, 2, 3)),
    "largest of all": lambda x: x.max() + x.sum(),
    "amax behind permute": lambda x: x.permute(0, 2, 3, 1).amax((1, 2)),
    "global max pool": lambda x: F.adaptive_max_pool2d(x, 1).flatten(1),
    "global max pool, goes back": lambda x: x * F.adaptive_max_pool2d(x, 1),
    "place of the global maximum": lambda x: x + F.adaptive_max_pool2d(x, 1, return_indices=True)[1],
    "largest absolute": lambda x: torch.linalg.vector_norm(x, math.inf, dim=(2, 3)),
    "largest of each row": lambda x: x.amax(3).flatten(1),
    "largest of rows behind permute": lambda x: x.permute(0, 2, 3, 1).amax(1).flatten(1),
    "scaled to the largest": lambda x: x - x.amax((2, 3), keepdim=True).detach(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXTREMES)
@set_trials(8)
@given(case=generate_images_on_grids(), high=st.sampled_from([0, 3, 1000]), seed=seeds)
def test_extremes(name: str, case: tuple[Grid, Pair], high: int, seed: int):
    """Bit-equal. Where many pixels are largest their gradient is shared, or goes to the first, as in one process."""
    grid, size_px = case
    function, image = EXTREMES[name], make_whole_numbers(2, 2, *size_px, seed=seed, low=-3, high=high)
    assume(image.unique().numel() > 1)
    check(function, image, grid)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int8, torch.int64])
def test_extremes_of_whole_numbers(dtype: torch.dtype, grid: Grid):
    """An unsigned number has no negative, and float64 not all of int64."""
    image = make_whole_numbers(2, 2, 6, 8, low=0)
    low, more = (2**62, 1) if dtype is torch.int64 else (-128 * (dtype is torch.int8), 0)

    def combine_extremes(x: Tensor) -> Tensor:
        whole = x.detach().long().add(low + more).to(dtype)
        least, most = whole.amin((2, 3)), whole.amax((2, 3))
        return x.sum((2, 3)) * (least.long() - low) + 5 * (most.long() - low)

    check(combine_extremes, image, grid)


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
def test_nan_is_the_largest(grid: Grid):
    """Of several the last one counts, in whatever tile it lies."""
    image = make_whole_numbers(2, 2, 6, 8)
    image[0, 0, 4, 7] = image[0, 1, 1, 6] = image[0, 1, 5, 2] = image[0, 1, 4, 7] = image[1, 1, 0, 0] = math.nan
    alike = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
    check(lambda x: torch.cat(F.adaptive_max_pool2d(x, 1, return_indices=True)).flatten(1), image, grid, same=alike)


def _with_places(values: Tensor, places: Tensor) -> Tensor:
    return values * places - places


@set_trials(40)
@given(g=generate_geometries(pool=True), ceil=st.booleans(), seed=seeds)
def test_max_pool_with_places(g: Geometry, ceil: bool, seed: int):
    """The first of equal pixels, by its number in the whole image."""
    settings = g.kernel, g.stride, g.padding, g.dilation, ceil
    image = make_whole_numbers(2, 2, *g.image_px, seed=seed, high=9)
    assume(F.max_pool2d(image, *settings).isfinite().all())
    check(lambda x: _with_places(*F.max_pool2d(x, *settings, return_indices=True)), image, g.grid)


@set_trials(30)
@given(
    case=generate_images_on_grids(), kernel=st.tuples(*[st.integers(1, 3)] * 2), apart=st.integers(-1, 1), seed=seeds
)
def test_unpooling(case: tuple[Grid, Pair], kernel: Pair, apart: int, seed: int):
    """SegNet (arXiv:1511.00561); where windows overlap two outputs may have one place."""
    grid, size_px = case
    stride = tuple(max(1, size + apart) for size in kernel)
    assume(all(size >= reach for size, reach in zip(size_px, kernel, strict=True)))

    def apply_unpooling(x: Tensor) -> Tensor:
        values, places = F.max_pool2d(x, kernel, stride, return_indices=True)
        return F.max_unpool2d(values, places, kernel, stride, output_size=x.shape[-2:]) * x

    image = make_whole_numbers(2, 2, *size_px, seed=seed)
    check(apply_unpooling, image, grid)


@set_trials(20)
@given(case=generate_images_on_grids(), fraction=st.tuples(*[st.floats(0.25, 1.5)] * 2), seed=seeds)
def test_adaptive_max_pool(case: tuple[Grid, Pair], fraction: tuple[float, float], seed: int):
    grid, size_px = case
    out_px = tuple(
        max(parts, math.ceil(size * share))
        for size, share, parts in zip(size_px, fraction, (grid.rows, grid.cols), strict=True)
    )
    image = make_whole_numbers(1, 2, *size_px, seed=seed)
    check(nn.AdaptiveMaxPool2d(out_px), image, grid)
    check(lambda x: _with_places(*F.adaptive_max_pool2d(x, out_px, return_indices=True)), image, grid)


@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_attention_by_average_and_maximum(case: tuple[Grid, Pair], seed: int):
    """CBAM's channel attention (Woo et al., 2018, arXiv:1807.06521): one perceptron judges both pools."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.judge = nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.judge(F.adaptive_avg_pool2d(x, 1)) + self.judge(F.adaptive_max_pool2d(x, 1))).sigmoid()

    grid, size_px = case
    check(with_whole_weights(Attention(), seed), make_whole_numbers(2, 4, *size_px, seed=seed), grid, same=close)


NORMS = {
    "smallest of all": lambda x: x.min() * x,
    "amax over space, kept": lambda x: x * x.amax((-2, -1), keepdim=True),
    "norm of all": lambda x: x.norm(),
    "norm over space": lambda x: torch.linalg.vector_norm(x, dim=(2, 3)),
    "sum of absolutes": lambda x: torch.linalg.vector_norm(x, 1, dim=(2, 3), keepdim=True) * x,
    "cubic norm": lambda x: torch.linalg.vector_norm(x, 3, dim=(1, 2, 3)),
    "normalised images": lambda x: F.normalize(x, dim=(1, 2, 3)),
    "norm of nothing": lambda x: (x * 0).norm() + x,
    "smallest absolute of each row": lambda x: x * torch.linalg.vector_norm(x, -math.inf, dim=3, keepdim=True),
    "smallest of each column and channel": lambda x: x * x.amin((1, 2), keepdim=True),
    "norm of each row": lambda x: x * torch.linalg.vector_norm(x, dim=3, keepdim=True),
    "logarithm of a sum of each column": lambda x: x.logsumexp((1, 2)).flatten(1),
    "number of what is not zero": lambda x: x * torch.linalg.vector_norm(x, 0, dim=3, keepdim=True),
    "logarithm of a sum": lambda x: x.logsumexp((2, 3)),
    "global response norm": lambda x: x * (g := x.norm(p=2, dim=(2, 3), keepdim=True)) / (g.mean(1, True) + 1e-6),
    "softmax by hand": lambda x: (x - x.logsumexp((2, 3), keepdim=True)).exp(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NORMS)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_norms_of_images(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(NORMS[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid, same=close)


def test_the_logarithm_of_a_sum_over_a_tile_of_minus_infinity():
    """As a mask of attention makes it: one process has a gradient of 0 there."""
    check(
        lambda x: (x + torch.where(torch.arange(8) < 4, -math.inf, 0.0)).logsumexp((2, 3)),
        make_whole_numbers(2, 2, 6, 8),
        Grid(1, 2),
        same=close,
    )


def test_a_norm_casts_before_it_reduces():
    """In float32 the norms of the tiles would be rounded."""
    function = lambda x: torch.linalg.vector_norm(x.float(), dim=(2, 3), dtype=torch.float64)  # noqa: E731
    check(function, make_whole_numbers(2, 2, 6, 8), Grid(2, 2), same=close)


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_max_pools_of_whole_numbers(dtype: torch.dtype, grid: Grid):
    """Whole numbers have no infinity; a mask is dilated by a max pool."""

    def combine_pools(x: Tensor) -> Tensor:
        mask = x.detach().clamp(0, 200).to(dtype)
        return x * F.max_pool2d(mask, 3, 1, 1) + F.max_pool2d(mask, 2, 2, ceil_mode=True).repeat_interleave(2, 2).amax()

    check(combine_pools, make_whole_numbers(2, 2, 7, 9), grid)
