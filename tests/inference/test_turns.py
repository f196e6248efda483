"""Tiles in turn give what the whole image gives: to the bit where nothing is rounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.inference.rank_predictor import prepare_prediction
from mpi4dl_nb.engines.inference.tile_passes import TilePasses
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from tests.compiler.drawn import Calls, Geometry, generate_geometries, generate_images_on_grids, seeds
from tests.compiler.test_tokens import GlobalContext, Segformer
from tests.exact import make_whole_numbers, with_whole_weights
from tests.inference.turning import ALONE, predict_alone, predict_in_turn
from tests.sampling import set_trials
from tests.zoo import Segmenter, ShiftedWindows, Skips


def fill_statistics(model: nn.Module) -> nn.Module:
    """Running statistics as after a training: what would be 0 and 1 hides mistakes."""
    random = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5, generator=random)
            module.running_var.uniform_(0.5, 2.0, generator=random)
    return model


def check(model: nn.Module, images: torch.Tensor, grid: Grid) -> int:
    made, walks = predict_in_turn(model, images, grid)
    assert torch.equal(made, predict_alone(model, images))
    return walks


@set_trials(12)
@given(shape=generate_geometries(), seed=seeds)
def test_convolutions(shape: Geometry, seed: int):
    model = nn.Conv2d(2, 4, shape.kernel, shape.stride, shape.padding, shape.dilation, groups=2)
    check(with_whole_weights(model, seed), make_whole_numbers(1, 2, *shape.image_px, seed=seed), shape.grid)


@set_trials(8)
@given(shape=generate_geometries(pool=True), seed=seeds)
def test_max_pools(shape: Geometry, seed: int):
    pool = nn.MaxPool2d(shape.kernel, shape.stride, shape.padding, shape.dilation)
    check(pool, make_whole_numbers(2, 2, *shape.image_px, seed=seed, low=-9, high=-1), shape.grid)


@set_trials(8)
@given(drawn=generate_images_on_grids(), kernel=st.integers(1, 4), stride=st.integers(1, 3), seed=seeds)
def test_transposed_convolutions(drawn: tuple[Grid, tuple[int, int]], kernel: int, stride: int, seed: int):
    grid, size_px = drawn
    model = with_whole_weights(nn.ConvTranspose2d(2, 3, kernel, stride), seed)
    check(model, make_whole_numbers(1, 2, *size_px, seed=seed), grid)


class Deep(nn.Module):
    """Strides, a skip between sizes, pads of both kinds, and everything up again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")
        self.down = nn.Conv2d(3, 4, 5, stride=3, padding=2)
        self.wide = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.up = nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1)
        self.last = nn.Conv2d(6, 2, 2)

    def forward(self, x):
        skip = torch.relu(self.first(x))
        x = self.up(torch.relu(self.wide(self.down(skip))) + 1)
        x = functional.interpolate(functional.max_pool2d(x, 3, 1, 1), size=skip.shape[2:], mode="nearest")
        return self.last(functional.pad(torch.cat([x, skip], 1), (2, 0, 1, 3)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size_px", [(41, 37), (33, 90)], ids=str)
@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 3), Grid(7, 6)], ids=str)
def test_many_layers_to_the_bit(size_px: tuple[int, int], grid: Grid):
    assert check(with_whole_weights(Deep()), make_whole_numbers(1, 2, *size_px), grid) == 1


MODELS = {
    "unet": (lambda: UNet(width=4), (1, 3, 64, 48), Grid(4, 2), 1),
    "resnet": (resnet20_v1, (1, 3, 41, 54), Grid(3, 2), 2),
    "skips": (Skips, (2, 3, 37, 29), Grid(3, 4), 2),
    "group norm": (Segmenter, (2, 3, 36, 44), Grid(3, 2), 2),
    "few averages": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 5)),
        (1, 3, 40, 50),
        Grid(5, 6),
        2,
    ),
    "tokens": (Segformer, (1, 3, 20, 28), Grid(3, 2), 1),
    "shifted windows": (ShiftedWindows, (1, 3, 40, 48), Grid(3, 2), 1),
    "global context": (GlobalContext, (1, 3, 20, 28), Grid(3, 2), 4),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_with_sums_over_the_image(name: str):
    make, shape, grid, expected = MODELS[name]
    torch.manual_seed(0)
    model, images = fill_statistics(make()), torch.randn(shape, dtype=torch.float64)
    made, walks = predict_in_turn(model, images, grid)
    assert walks == expected
    assert torch.allclose(made, predict_alone(model, images), rtol=1e-12, atol=1e-12)


EXTREMA = {
    "adaptive max pool": lambda x: functional.adaptive_max_pool2d(x, 1),
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "amin": lambda x: x.amin((2, 3), keepdim=True),
    "max of all": lambda x: x.max().expand(*x.shape[:2], 1, 1),
    "largest of each row": lambda x: x.amax(3, keepdim=True),
    "mean of each column": lambda x: x.mean(2, keepdim=True),
    "norm": lambda x: x.norm(dim=(2, 3), keepdim=True),
    "log-sum-exp": lambda x: x.logsumexp((2, 3), keepdim=True),
    "place of the largest": lambda x: functional.adaptive_max_pool2d(x, 1, return_indices=True)[1].to(x.dtype),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXTREMA)
@pytest.mark.parametrize("is_last", [False, True], ids=["scales pixels", "is the answer"])
def test_a_reduction_over_the_image_is_one_more_pass(name: str, is_last: bool):
    """All values are below zero, so that the zeros between the tiles would be seen in a maximum."""
    reduce, random = EXTREMA[name], torch.Generator().manual_seed(0)
    images = -1 - 5 * torch.rand(1, 2, 37, 43, dtype=torch.float64, generator=random)
    model = Calls(lambda x: reduce(x * 2) if is_last else x - reduce(x * 2))
    made, walks = predict_in_turn(model, images, Grid(3, 4))
    assert walks == 2
    expected = predict_alone(model, images)
    assert torch.allclose(made, expected, rtol=1e-13, atol=1e-13)
    if "norm" not in name and "mean" not in name and "exp" not in name:
        assert torch.equal(made, expected)


class Squeezed(nn.Module):
    """What a sum over the image scales is read again: it is computed again (squeeze and excite)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4)
        self.more, self.again = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = torch.relu(self.body(x))
        x = x * self.gate(x.mean((2, 3))).sigmoid()[..., None, None]
        x = torch.relu(self.more(x))
        return self.head(x * self.again(x.mean((2, 3))).sigmoid()[..., None, None])


def test_each_sum_that_reads_another_is_a_walk_of_its_own():
    torch.manual_seed(0)
    model, images = Squeezed(), torch.randn(1, 3, 30, 40, dtype=torch.float64)
    made, walks = predict_in_turn(model, images, Grid(3, 4))
    assert walks == 3
    assert torch.allclose(made, predict_alone(model, images), rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
def test_a_walk_computes_no_more_than_it_is_for():
    """The first walk of the squeezed model ends at its first sum; the head of a classifier needs no pixel."""
    graph = prepare_prediction(Squeezed(), ALONE, (1, 3, 30, 40)).graph
    first = TilePasses(graph, Grid(3, 4)).make_pass(5)
    kernels = [op.kernel for segment in first.program.forward for op in segment.ops]
    assert kernels.count("aten.conv2d.default") == 1
    turns = TilePasses(prepare_prediction(resnet20_v1(), ALONE, (1, 3, 61, 84)).graph, Grid(4, 5))
    (known,) = turns.make_pass(3).sums
    head = turns.make_pass(0, [known.target])
    assert head.is_last
    assert head.window is None
    assert [op.kernel for s in head.program.forward for op in s.ops][-1] == "aten.linear.default"


def test_a_window_is_the_field_of_view_cut_off_at_the_edge():
    model = nn.Sequential(nn.Conv2d(3, 3, 5, padding=2), nn.Conv2d(3, 3, 3, padding=1))
    turns = TilePasses(prepare_prediction(model, ALONE, (1, 3, 100, 100)).graph, Grid(4, 4))
    corner, inner = (turns.make_pass(tile).window.tile for tile in (0, 5))
    assert (corner.shape, inner.shape) == ((28, 28), (31, 31))
    assert (inner.rows.start, inner.cols.stop) == (22, 53)


def test_what_needs_all_pixels_is_refused_by_name():
    class Rows(nn.Module):
        def forward(self, x):
            return x.sort(dim=2).values

    graph = prepare_prediction(Rows(), ALONE, (1, 3, 64, 64)).graph
    with pytest.raises(TraceError, match=r"2x2 tiles one after another\. .*sort"):
        TilePasses(graph, Grid(2, 2))


def test_tiles_smaller_than_a_pixel_of_a_late_layer_are_refused():
    graph = prepare_prediction(UNet(width=4, depth=3), ALONE, (1, 3, 64, 64)).graph
    with pytest.raises(PlanError, match=r"16x16 tiles one after another\. .*8 rows of pixels cannot be cut into 16"):
        TilePasses(graph, Grid(16, 16))


def test_a_pointwise_function_is_computed_too():
    assert check(Calls(lambda x: (x * 2 + 1).abs()), make_whole_numbers(1, 2, 9, 11), Grid(3, 3)) == 1
