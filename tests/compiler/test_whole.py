"""Operators that take rows and columns apart: every rank gathers what they read, and their gradient goes home."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.compiler.local_rules import WHOLE_PX
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.train.recipe import prepare
from tests.compiler.drawn import Geometry, Pair, check, generate_geometries, generate_images_on_grids, seeds
from tests.exact import close, make_tiled_plan, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials


def apply_attention(x: Tensor) -> Tensor:
    """Wang et al., 2018 (arXiv:1711.07971), without softmax."""
    pixels = x.flatten(2)
    return x + (pixels @ (pixels.transpose(1, 2) @ pixels)).view(x.shape)


def split_windows(x: Tensor) -> Tensor:
    """Of two by two pixels, each a sequence, as Swin has them (Liu et al., 2021, arXiv:2103.14030)."""
    even = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
    return even.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(1)


BIT_EQUAL = {
    "rows and columns as one axis": lambda x: x.flatten(2).flatten(1),
    "rows merged with channels": lambda x: x.flatten(1, 2).flatten(1) * 2,
    "upside down and in other channels": lambda x: x.flip(1, 2) - x,
    "all rolled": lambda x: x.roll(1) - x,
    "one row": lambda x: x[:, :, 0].flatten(1),
    "one row for all": lambda x: x * x[:, :, -1:] - x[:, :, :, 0, None],
    "max over rows": lambda x: x.max(2)[0].flatten(1),
    "places of maxima": lambda x: x * x.argmax(3, keepdim=True),
    "place of the largest of all": lambda x: x * x.argmax(),
    "product along columns": lambda x: (x @ x.new_ones((x.shape[-1], 3))).flatten(1),
    "linear along columns": lambda x: F.linear(x, x.new_ones((3, x.shape[-1]))).flatten(1),
    "einsum along columns": lambda x: torch.einsum("nchw,wk->nck", x, x.new_ones((x.shape[-1], 3))).flatten(1),
    "einsum of rows": lambda x: torch.einsum("nchw->nch", x).flatten(1),
    "einsum across": lambda x: torch.einsum("nchw,ncvw->nhv", x, x).flatten(1),
    "pixels by a list": lambda x: x[:, :, x.new_zeros(1).long()].flatten(1),
    "picked rows": lambda x: x.index_select(2, x.new_zeros(2).long()).flatten(1),
    "running sum": lambda x: x.cumsum(2) * x,
    "running sums of both": lambda x: x.cumsum(2).cumsum(3),
    "sorted columns": lambda x: x.sort(2)[0].flatten(1),
    "below itself": lambda x: torch.cat([x, x], 2).flatten(1),
    "turned": lambda x: x.rot90(1, (2, 3)).flatten(1),
    "median": lambda x: x * x.median().detach(),
    "order of columns": lambda x: x * x.argsort(dim=2, stable=True),
    "order of rows": lambda x: x * x.detach().argsort(3),
    "sorted batch": lambda x: torch.msort(x).flatten(1),
    "sorted rows, stably": lambda x: x.sort(stable=True, dim=3)[0],
    "whether any": lambda x: x * (x > 3).any(),
    "whether all": lambda x: x * (x > -9).all(),
    "how many": lambda x: x * (x > 0).count_nonzero(),
    "largest so far": lambda x: x.cummax(2)[0],
    "smallest so far": lambda x: x.cummin(3)[0],
    "smallest but one": lambda x: x * x.kthvalue(1, 3, keepdim=True)[0].detach(),
    "product of all": lambda x: x.sign() * x.abs().clamp(1, 1).prod() + x,
    "products of matrices": lambda x: torch.bmm(x.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)).flatten(1),
    "below the diagonal": lambda x: x.tril(1) - x.triu(-1),
    "attention": apply_attention,
    "windows": split_windows,
    "again and again, with another axis": lambda x: x.repeat(1, 1, 1, 2, 3)[0].flatten(1),
    "sums of rows": lambda x: x.sum(2).flatten(1),
    "sums of columns and channels": lambda x: x * x.sum((1, 3), keepdim=True),
    "sums of rows behind permute": lambda x: x.permute(0, 2, 3, 1).sum(1).flatten(1),
}
MOVED = {
    "upside down": lambda x: x.flip(2),
    "turned by half": lambda x: x.flip(2, 3) - x,
    "rolled": lambda x: x.roll((1, -2), (2, 3)),
    "rolled far": lambda x: x.roll((17, 5), (2, 2)),
    "rolled behind permute": lambda x: x.permute(0, 2, 3, 1).roll((-1, 2), (1, 2)).permute(0, 3, 1, 2),
    "again and again": lambda x: x.repeat(1, 1, 2, 3),
    "tiled": lambda x: x.tile((3, 1)),
    "each row twice": lambda x: x.repeat_interleave(2, 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", BIT_EQUAL)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_whole_values(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(BIT_EQUAL[name], make_whole_numbers(2, 2, *size_px, seed=seed), grid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MOVED)
@set_trials(8)
@given(case=generate_images_on_grids(), seed=seeds)
def test_pixels_in_another_order(name: str, case: tuple[Grid, Pair], seed: int):
    """Of these each tile borrows what it needs, whatever the size of the image."""
    grid, size_px = case
    check(MOVED[name], make_whole_numbers(2, 2, *size_px, seed=seed), grid)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MOVED)
def test_whole_numbers_in_another_order_are_not_rounded(name: str):
    """Such as the places of a max pool, of which a large image has more than float32 can tell apart."""
    move = MOVED[name]
    check(lambda x: move(x.detach().long() + 2**24) * move(x), make_whole_numbers(2, 2, 6, 8), Grid(2, 2))


ROUNDED = {
    "share of the row": lambda x: x.softmax(-1),
    "attention by softmax": lambda x: F.scaled_dot_product_attention(*[x.flatten(2).transpose(1, 2)] * 3).flatten(1),
    "means of rows": lambda x: x * x.mean(2, keepdim=True),
    "variances of columns": lambda x: x * x.var(3, keepdim=True, correction=0),
    "coordinate attention": lambda x: x * F.adaptive_avg_pool2d(x, (None, 1)) * F.adaptive_avg_pool2d(x, (1, None)),
    "places that the image says": lambda x: F.grid_sample(x, x.permute(0, 2, 3, 1) / 4, align_corners=False),
    "places in a border": lambda x: F.grid_sample(
        x, x.permute(0, 2, 3, 1) / 2, "bilinear", "reflection", align_corners=True
    ),
    "nearest places": lambda x: F.grid_sample(x, x.permute(0, 2, 3, 1) / 3.1, "nearest", "border", align_corners=True),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROUNDED)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_whole_values_that_round(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(ROUNDED[name], make_whole_numbers(2, 2, *size_px, seed=seed), grid, same=close)


class Turned(nn.Module):
    """A spatial transformer (arXiv:1506.02025)."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.look(x.mean((2, 3))).view(-1, 2, 3) / 8
        return F.grid_sample(x, F.affine_grid(turn, x.shape, align_corners=False), align_corners=False)


@pytest.mark.nightly
@set_trials(8)
@given(case=generate_images_on_grids(), seed=seeds)
def test_a_spatial_transformer(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    assume(min(size_px) > 1)  # PyTorch cannot trace affine_grid to one row or column
    check(with_whole_weights(Turned(), seed), make_whole_numbers(2, 2, *size_px, seed=seed), grid, same=close)


class Between(nn.Module):
    """A layer before and a layer behind, so that weights and a batch norm have their part."""

    def __init__(self, middle: object) -> None:
        super().__init__()
        self.before, self.middle, self.behind = nn.Conv2d(2, 2, 3, padding=1), middle, nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.behind(self.middle(self.before(x))))


@pytest.mark.nightly
@pytest.mark.parametrize("fused", [0, 2, 3])
@pytest.mark.parametrize(
    "middle", [apply_attention, MOVED["rolled"], BIT_EQUAL["running sum"], MOVED["turned by half"]]
)
@set_trials(3)
@given(case=generate_images_on_grids(), seed=seeds)
def test_between_layers(fused: int, middle: object, case: tuple[Grid, Pair], seed: int):
    """Also where layers share an exchange, and hold more than their tiles."""
    grid, size_px = case
    check(
        with_whole_weights(Between(middle), seed),
        make_whole_numbers(2, 2, *size_px, seed=seed) / 8,
        grid,
        fused,
        same=close,
    )


# ---- outputs that are too few to be tiled


@pytest.mark.nightly
@set_trials(40)
@given(g=generate_geometries(few=True), seed=seeds)
def test_convolution_that_leaves_few_pixels(g: Geometry, seed: int):
    """Two more layers and a batch norm then run on all ranks alike."""
    conv = nn.Conv2d(2, 3, g.kernel, g.stride, g.padding, g.dilation)
    model = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1), nn.Flatten())
    check(with_whole_weights(model, seed), make_whole_numbers(2, 2, *g.image_px, seed=seed), g.grid)


@set_trials(30)
@given(g=generate_geometries(pool=True, few=True), ceil=st.booleans(), seed=seeds)
def test_max_pool_that_leaves_few_pixels(g: Geometry, ceil: bool, seed: int):
    pool = nn.MaxPool2d(g.kernel, g.stride, g.padding, g.dilation, ceil_mode=ceil)
    image = make_whole_numbers(2, 2, *g.image_px, seed=seed)
    assume(pool(image).isfinite().all())
    check(nn.Sequential(pool, nn.Flatten()), image, g.grid)


@set_trials(40)
@given(
    g=generate_geometries(pool=True, dilated=False, few=True),
    ceil=st.booleans(),
    counted=st.booleans(),
    divisor=st.sampled_from([None, 1, 4]),
    seed=seeds,
)
def test_average_pool_that_leaves_few_pixels(g: Geometry, ceil: bool, counted: bool, divisor: int | None, seed: int):
    """Bit-equal: pixels and gradients are multiples of 144, which every count divides."""
    model = nn.Sequential(nn.AvgPool2d(g.kernel, g.stride, g.padding, ceil, counted, divisor), nn.Flatten())
    image = make_whole_numbers(2, 2, *g.image_px, seed=seed, step=144)
    check(model, image, g.grid, labels=make_whole_numbers(*model(image).shape, seed=seed, step=144))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
@set_trials(30)
@given(case=generate_images_on_grids(), rows=st.integers(1, 3), cols=st.integers(1, 3), seed=seeds)
def test_adaptive_pool_of_few_cells(kind: type[nn.Module], case: tuple[Grid, Pair], rows: int, cols: int, seed: int):
    grid, size_px = case
    assume((rows < grid.rows or cols < grid.cols) and (rows, cols) != (1, 1))
    check(
        nn.Sequential(kind((rows, cols)), nn.Flatten()), make_whole_numbers(2, 2, *size_px, seed=seed), grid, same=close
    )


class Pyramid(nn.Module):
    """Zhao et al., 2017 (arXiv:1612.01105): pools of several sizes, each brought back to that of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = [level(F.adaptive_avg_pool2d(x, size)) for size, level in zip((2, 3, 4), self.levels, strict=True)]
        return torch.cat([x, *(F.interpolate(level, x.shape[-2:], mode="bilinear") for level in found)], 1)


@pytest.mark.nightly
@set_trials(10)
@given(case=generate_images_on_grids(), seed=seeds)
def test_a_pyramid_of_pools(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(Pyramid(), seed), make_whole_numbers(2, 2, *size_px, seed=seed), grid, same=close)


# ---- what it takes, and where it ends


def make_compiler(function: object, shape: tuple[int, ...], grid: str = "2x2") -> Compiler:
    return Compiler(
        prepare(function, make_tiled_plan(grid), shape, lambda made, labels: made.sum()).graph, make_tiled_plan(grid)
    )


def test_a_value_is_gathered_once_however_many_read_it():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), Reader())
    program = make_compiler(model, (1, 2, 8, 6)).compile_rank(3)
    (exchange,) = [item for item in program.forward if isinstance(item, Exchange)]
    assert exchange.window.shape == (8, 6)
    assert len(exchange.receives) == len(exchange.sends) == 3


class Reader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2) @ x.flatten(2).transpose(1, 2) + x.median()


class Cells(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, (x.shape[2], 1))


def test_large_images_are_refused():
    """Where every rank would hold what it was to be spared."""
    height = WHOLE_PX // 128
    make_compiler(nn.Sequential(Reader()), (1, 2, height, 128))
    with pytest.raises(TraceError, match=rf"^aten.median.*beyond {WHOLE_PX} pixels, which every rank .*write a"):
        make_compiler(nn.Sequential(Reader()), (1, 2, height + 1, 128))
    with pytest.raises(PlanError, match=r"aten.max_pool2d.*1 rows of pixels cannot be cut into 2 tiles"):
        make_compiler(nn.Sequential(Cells()), (1, 2, height + 1, 128))


def test_average_pools_and_sums_of_large_images_are_not():
    class Averages(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(x, (1, 2)).sum() + x.amax(2).sum() + x.mean(3).sum() + x.flip(2).sum()

    assert make_compiler(nn.Sequential(Averages()), (1, 2, 2 * WHOLE_PX // 128, 128)).compile_rank(0).steps


class Looks(nn.Module):
    """Samples at places that the model itself holds, and writes a part whose rows are the channels of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", make_whole_numbers(1, 5, 4, 2, low=-1, high=1).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x, self.grid, align_corners=True)


def write_row(x: Tensor) -> Tensor:
    made = 2 * x
    made[:, :, 0] = x.mean(1)
    return made


def test_places_that_the_model_holds_and_rows_that_are_channels_of_the_whole():
    check(Looks(), make_whole_numbers(1, 2, 6, 8), Grid(2, 2), same=close)
    check(write_row, make_whole_numbers(1, 6, 6, 8), Grid(2, 2), same=close)
