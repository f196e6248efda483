"""Upsampling, pads that copy pixels, and shuffles between channels and space, held against one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from mpi4dl_nb.engines.compiler.entries.interpolation import find_taps
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from tests.compiler.drawn import Pair, check, generate_images_on_grids, seeds
from tests.exact import close, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

SMOOTH = [
    {"mode": "bilinear"},
    {"mode": "bilinear", "align_corners": True},
    {"mode": "bicubic"},
    {"mode": "bicubic", "align_corners": True},
]


@set_trials(25)
@given(case=generate_images_on_grids(), scale=st.tuples(*[st.integers(1, 4)] * 2), seed=seeds)
def test_nearest_by_whole_numbers(case: tuple[Grid, Pair], scale: Pair, seed: int):
    grid, size_px = case
    check(nn.Upsample(scale_factor=scale), make_whole_numbers(2, 2, *size_px, seed=seed), grid)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@set_trials(20)
@given(case=generate_images_on_grids(), scale=st.tuples(*[st.floats(0.5, 3.5)] * 2), seed=seeds, sized=st.booleans())
def test_nearest_by_fractions(mode: str, case: tuple[Grid, Pair], scale: tuple[float, float], seed: int, sized: bool):
    grid, size_px = case
    out_px = tuple(math.floor(size * factor) for size, factor in zip(size_px, scale, strict=True))
    assume(out_px[0] >= grid.rows and out_px[1] >= grid.cols)
    how = {"size": out_px} if sized else {"scale_factor": scale}
    check(nn.Upsample(**how, mode=mode), make_whole_numbers(1, 2, *size_px, seed=seed), grid)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    ("kind", "rows"), [(torch.float16, 164), (torch.float32, 164), (torch.float32, 82), (torch.float64, 82)]
)
def test_nearest_rounds_as_pytorch_does(kind: torch.dtype, rows: int, mode: str):
    """The middle row reads row 31 of 64, not 32, by arithmetic in float32, which PyTorch uses for few pixels always."""
    enlarge = lambda x: F.interpolate(x.to(kind), size=(rows, 4), mode=mode).double()  # noqa: E731
    check(enlarge, make_whole_numbers(1, 1, 64, 4), Grid(2, 1))


def test_nearest_is_refused_where_the_gradient_is_that_of_other_pixels():
    """For many pixels in float64, PyTorch computes forward in float64, and backward in float32."""
    with pytest.raises(TraceError, match=r"upsample_nearest2d\.vec .* makes 164 pixels of 64: in float64, "):
        check(lambda x: F.interpolate(x, size=(164, 4)), make_whole_numbers(1, 1, 64, 4), Grid(2, 1))


@pytest.mark.nightly
@set_trials(20)
@given(case=generate_images_on_grids(), scale=st.tuples(*[st.sampled_from([1, 2, 4])] * 2), seed=seeds)
def test_bilinear_by_powers_of_two_is_bit_equal(case: tuple[Grid, Pair], scale: Pair, seed: int):
    """Its weights are eighths."""
    grid, size_px = case
    model, image = (
        nn.Upsample(scale_factor=scale, mode="bilinear"),
        make_whole_numbers(2, 2, *size_px, seed=seed, step=64),
    )
    check(model, image, grid, labels=make_whole_numbers(*model(image).shape, seed=seed, step=64))


@pytest.mark.nightly
@pytest.mark.parametrize("how", SMOOTH, ids=lambda how: " ".join(map(str, how.values())))
@set_trials(15)
@given(case=generate_images_on_grids(), scale=st.tuples(*[st.floats(0.3, 3.5)] * 2), seed=seeds, sized=st.booleans())
def test_smooth_upsampling(how: dict, case: tuple[Grid, Pair], scale: tuple[float, float], seed: int, sized: bool):
    grid, size_px = case
    out_px = tuple(math.floor(size * factor) for size, factor in zip(size_px, scale, strict=True))
    assume(out_px[0] >= grid.rows and out_px[1] >= grid.cols)
    # By a factor that leaves the size as it is, PyTorch's bicubic gradient is not that of its result.
    assume(sized or out_px != size_px or how["mode"] != "bicubic")
    size = {"size": out_px} if sized else {"scale_factor": scale}
    check(lambda x: F.interpolate(x, **size, **how), make_whole_numbers(1, 2, *size_px, seed=seed), grid, same=close)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@set_trials(8)
@given(case=generate_images_on_grids(), out_px=st.tuples(*[st.integers(1, 12)] * 2), seed=seeds)
def test_smooth_shrinking(mode: str, case: tuple[Grid, Pair], out_px: Pair, seed: int):
    """With antialiasing an output reads the further the more the image shrinks."""
    grid, size_px = case
    assume(out_px[0] >= grid.rows and out_px[1] >= grid.cols and out_px[1] > 1)
    how = {"size": out_px, "mode": mode, "antialias": True}
    check(lambda x: F.interpolate(x, **how), make_whole_numbers(1, 2, *size_px, seed=seed), grid, same=close)


def test_antialiasing_to_one_column_is_refused():
    """PyTorch's own gradient is not that of its result there: whoever sees this fail takes the refusal out."""
    shrink = lambda x: F.interpolate(x, size=(4, 1), mode="bilinear", antialias=True)  # noqa: E731
    assert not torch.autograd.gradcheck(shrink, make_whole_numbers(1, 1, 9, 1).requires_grad_(), raise_exception=False)
    with pytest.raises(TraceError, match=r"_upsample_bilinear2d_aa\.vec .* makes one column"):
        check(shrink, make_whole_numbers(1, 1, 9, 1), Grid(2, 1))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@set_trials(20)
@given(case=generate_images_on_grids(), pads=st.tuples(*[st.integers(0, 5)] * 4), seed=seeds)
@example(case=(Grid(3, 3), (4, 4)), pads=(3, 3, 3, 3), seed=0)
def test_pads_that_copy(mode: str, case: tuple[Grid, Pair], pads: tuple[int, int, int, int], seed: int):
    """The border may be wider than a tile, and read what lies at the other end of the image."""
    grid, (height, width) = case
    most = {"reflect": 1, "circular": 0, "replicate": -9}[mode]
    assume(max(pads[:2]) <= width - most and max(pads[2:]) <= height - most)
    check(lambda x: F.pad(x, pads, mode=mode), make_whole_numbers(1, 2, height, width, seed=seed), grid)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_convolution_with_a_padding_mode(mode: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    assume(min(size_px) > 2)
    conv = nn.Conv2d(2, 2, (3, 5), padding=(1, 2), padding_mode=mode)
    check(with_whole_weights(conv, seed), make_whole_numbers(1, 2, *size_px, seed=seed), grid)


@set_trials(15)
@given(case=generate_images_on_grids(), factor=st.integers(1, 4), seed=seeds)
def test_pixel_shuffle(case: tuple[Grid, Pair], factor: int, seed: int):
    """Tiles of outputs that are no multiple of the factor cut a pixel's square."""
    grid, size_px = case
    image = make_whole_numbers(2, 2 * factor**2, *size_px, seed=seed)
    check(lambda x: F.pixel_shuffle(x, factor) * 2, image, grid)


@set_trials(15)
@given(case=generate_images_on_grids(), factor=st.integers(1, 4), seed=seeds)
def test_pixel_unshuffle(case: tuple[Grid, Pair], factor: int, seed: int):
    """Tiles of the image that are no multiple of the factor."""
    grid, size_px = case
    image = make_whole_numbers(2, 2, *(size * factor for size in size_px), seed=seed)
    check(lambda x: F.pixel_unshuffle(x, factor) * 2, image, grid)


@set_trials(4)
@given(case=generate_images_on_grids(), seed=seeds)
def test_shuffle_there_and_back_behind_a_convolution(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.PixelShuffle(2), nn.MaxPool2d(3, 1, 1), nn.PixelUnshuffle(2)
    )
    check(with_whole_weights(model, seed), make_whole_numbers(1, 2, *size_px, seed=seed), grid)


def test_taps_are_found_for_any_size():
    """Each output of a long axis is the sum that its taps say."""
    values = torch.rand(1, 1000).double()
    for size in (7, 999, 1000, 2300):
        resample = lambda x, size=size: F.interpolate(x[None], size=size, mode="linear")[0]  # noqa: E731
        found = find_taps(1000, resample, 2 * math.ceil(max(1, 1000 / size)))
        sums = (values[0][torch.tensor(found.inputs)] * torch.tensor(found.weights, dtype=torch.float64)).sum(1)
        assert torch.allclose(sums, resample(values)[0], rtol=0, atol=1e-14)
        assert len(found.weights[0]) <= 2


def test_means_of_pixels_in_whole_numbers_are_refused():
    with pytest.raises(TraceError, match=r"upsample_bilinear2d.* rounds means of pixels to uint8"):
        check(
            lambda x: (
                x.repeat(1, 1, 2, 2) * F.interpolate(x.detach().clamp(0, 9).byte(), scale_factor=2.0, mode="bilinear")
            ),
            make_whole_numbers(2, 2, 6, 8),
            Grid(1, 2),
        )
