"""Every entry of the operator table: tiles against the whole image, bit for bit where numbers stay whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import assume, example, find, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from tests.compiler.drawn import Calls, Geometry, Pair, check, generate_geometries, generate_images_on_grids, seeds
from tests.exact import assert_exact, close, make_tiled_plan, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

# ---- the space that is searched


def test_the_search_space_holds_tiles_thinner_than_their_halo():
    thin = find(generate_geometries(), lambda g: g.has_tile_thinner_than_its_halo and g.grid.rows > 1 < g.grid.cols)
    check(
        nn.Conv2d(1, 1, thin.kernel, thin.stride, thin.padding, thin.dilation).double(),
        make_whole_numbers(1, 1, *thin.image_px),
        thin.grid,
        same=close,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "wish",
    [
        lambda g: g.grid.rows == 1 and g.grid.cols == 4,
        lambda g: g.grid.rows == 4 and g.grid.cols == 1,
        lambda g: g.grid == Grid(2, 3) and g.image_px[1] % 3 == 2,
        lambda g: g.kernel[0] % 2 == 0 and g.grid.rows > 1,
        lambda g: g.padding[0] > g.image_px[0] // g.grid.rows > 0 and g.grid.rows > 1,
        lambda g: min(g.spare_px) > 0,
    ],
    ids=["1xN", "Nx1", "2x3 uneven", "even kernel", "padding wider than a tile", "pixels nobody reads"],
)
def test_the_search_space_holds(wish: Callable[[Geometry], bool]):
    assert wish(find(generate_geometries(), wish, settings=settings(max_examples=20_000)))


# ---- convolutions


# The last tile's outputs read nothing but padding, and lie wholly behind the pixels that the tile owns.
PADDING_ALONE = Geometry(Grid(1, 2), (1, 2), (1, 3), (1, 1), (1, 2), (0, 2), (1, 1), (0, 1))
# Kernels of one pixel leave gaps between what they write: nothing is written to the last tile's outputs.
ROWS_NOBODY_WRITES = Geometry(Grid(2, 1), (3, 1), (3, 1), (1, 1), (3, 1), (2, 0), (1, 1), (0, 0))


@pytest.mark.nightly
@set_trials(70)
@given(g=generate_geometries(), groups=st.integers(1, 3), wide=st.integers(1, 2), bias=st.booleans(), seed=seeds)
@example(g=PADDING_ALONE, groups=1, wide=1, bias=False, seed=0)
def test_convolution(g: Geometry, groups: int, wide: int, bias: bool, seed: int):
    conv = nn.Conv2d(groups * wide, groups, g.kernel, g.stride, g.padding, g.dilation, groups, bias)
    check(with_whole_weights(conv, seed), make_whole_numbers(2, groups * wide, *g.image_px, seed=seed), g.grid)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@set_trials(30)
@given(g=generate_geometries(strided=False), padding=st.sampled_from(["same", "valid"]), seed=seeds)
def test_convolution_whose_padding_is_a_word(g: Geometry, padding: str, seed: int):
    assume(padding == "same" or g.padding == (0, 0))
    conv = nn.Conv2d(2, 2, g.kernel, padding=padding, dilation=g.dilation)
    check(with_whole_weights(conv, seed), make_whole_numbers(1, 2, *g.image_px, seed=seed), g.grid)


@pytest.mark.nightly
@set_trials(70)
@given(
    g=generate_geometries(),
    groups=st.integers(1, 2),
    bias=st.booleans(),
    wish=st.tuples(*[st.integers(0, 2)] * 2),
    seed=seeds,
)
@example(g=ROWS_NOBODY_WRITES, groups=1, bias=True, wish=(0, 0), seed=0)
def test_transposed_convolution(g: Geometry, groups: int, bias: bool, wish: Pair, seed: int):
    """The geometry read backwards: what were outputs is the image. `wish` pads the outputs where that may be."""
    limits = zip(g.spare_px, wish, g.stride, g.dilation, strict=True)
    extra = tuple(max(spare, min(more, max(stride, dilation) - 1)) for spare, more, stride, dilation in limits)
    conv = nn.ConvTranspose2d(2 * groups, groups, g.kernel, g.stride, g.padding, extra, groups, bias, g.dilation)
    check(with_whole_weights(conv, seed), make_whole_numbers(2, 2 * groups, *g.out_px, seed=seed), g.grid)


def test_transposed_convolution_of_one_image_without_a_batch():
    """With as many rows as channels, so that a bias along the wrong axis would be seen by its values alone."""
    conv = with_whole_weights(nn.ConvTranspose2d(2, 4, 2))

    class OfOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x[0])

    check(OfOne(), make_whole_numbers(1, 2, 3, 6), Grid(1, 2))


class Standardised(nn.Module):
    """A convolution whose weight is computed from the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.sum((1, 2, 3), keepdim=True), padding=1)


@set_trials(12)
@given(case=generate_images_on_grids(), seed=seeds)
def test_convolution_by_a_computed_weight(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(Standardised(), seed), make_whole_numbers(1, 2, *size_px, seed=seed), grid)


# ---- pools


@set_trials(60)
@given(g=generate_geometries(pool=True), ceil=st.booleans(), high=st.sampled_from([-1, 9]), seed=seeds)
def test_max_pool(g: Geometry, ceil: bool, high: int, seed: int):
    """Also over images that are negative everywhere, where a border of zeros would win."""
    pool = nn.MaxPool2d(g.kernel, g.stride, g.padding, g.dilation, ceil_mode=ceil)
    image = make_whole_numbers(2, 2, *g.image_px, seed=seed, low=-9, high=high)
    assume(pool(image).isfinite().all())  # a dilated window may hold no pixel at all
    check(pool, image, g.grid)


@set_trials(60)
@given(
    g=generate_geometries(pool=True, dilated=False),
    ceil=st.booleans(),
    counted=st.booleans(),
    divisor=st.sampled_from([None, 1, 4]),
    seed=seeds,
)
def test_average_pool(g: Geometry, ceil: bool, counted: bool, divisor: int | None, seed: int):
    """Bit-equal: pixels and gradients are multiples of 144, which every count (1 to 4 squared) divides."""
    pool = nn.AvgPool2d(g.kernel, g.stride, g.padding, ceil, counted, divisor)
    image = make_whole_numbers(2, 2, *g.image_px, seed=seed, step=144)
    check(pool, image, g.grid, labels=make_whole_numbers(*pool(image).shape, seed=seed, step=144))


def test_average_pool_of_half_precision_rounds_once():
    """Sums of 4, 6 or 9 pixels, before the division, are larger than the whole numbers that bfloat16 holds."""
    pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    image = make_whole_numbers(1, 2, 6, 8, low=100, high=255)
    labels = make_whole_numbers(1, 2, 6, 8, seed=1, low=-1, high=1, step=36)
    check(lambda x: pool(x.bfloat16()).double(), image, Grid(2, 2), labels=labels)


@set_trials(30)
@given(case=generate_images_on_grids(), fraction=st.tuples(*[st.floats(0.25, 1.5)] * 2), seed=seeds)
def test_adaptive_average_pool(case: tuple[Grid, Pair], fraction: tuple[float, float], seed: int):
    """Bit-equal: cells have 1 to 6 rows and columns, and pixels and gradients are multiples of 3600."""
    grid, size_px = case
    out_px = tuple(
        max(parts, math.ceil(size * share))
        for size, share, parts in zip(size_px, fraction, (grid.rows, grid.cols), strict=True)
    )
    assume(out_px != (1, 1))
    pool, image = nn.AdaptiveAvgPool2d(out_px), make_whole_numbers(1, 2, *size_px, seed=seed, step=3600)
    check(pool, image, grid, labels=make_whole_numbers(*pool(image).shape, seed=seed, step=3600))


@set_trials(15)
@given(case=generate_images_on_grids(), seed=seeds)
def test_global_average_pool_and_a_classifier(case: tuple[Grid, Pair], seed: int):
    """Weights behind the pool are shared by all tiles: their gradients are counted once."""
    grid, size_px = case
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    pixels = math.prod(size_px)
    image = make_whole_numbers(2, 1, *size_px, seed=seed, step=pixels)
    with_whole_weights(model, seed)
    model[0].bias.data *= pixels
    check(model, image, grid, labels=make_whole_numbers(2, 4, seed=seed, step=pixels))


# ---- pixels that move


@pytest.mark.nightly
@set_trials(60)
@given(case=generate_images_on_grids(), pads=st.tuples(*[st.integers(-3, 5)] * 4), value=st.integers(-2, 2), seed=seeds)
@example(case=(Grid(3, 1), (3, 1)), pads=(0, 0, 0, 3), value=2, seed=0)
def test_constant_pad(case: tuple[Grid, Pair], pads: tuple[int, int, int, int], value: int, seed: int):
    """A tile of outputs may lie wholly in the border; a negative pad cuts off."""
    grid, (height, width) = case
    left, right, above, below = pads
    assume(height + above + below >= grid.rows and width + left + right >= grid.cols)
    assume(min(height + min(above, 0) + min(below, 0), width + min(left, 0) + min(right, 0)) >= 0)
    check(lambda x: F.pad(x, pads, value=value), make_whole_numbers(1, 2, height, width, seed=seed), grid)


@set_trials(10)
@given(case=generate_images_on_grids(), pads=st.tuples(*[st.integers(0, 3)] * 2), seed=seeds)
def test_pad_of_one_axis(case: tuple[Grid, Pair], pads: Pair, seed: int):
    grid, size_px = case
    check(lambda x: F.pad(x, pads), make_whole_numbers(1, 1, *size_px, seed=seed), grid)


slices = st.builds(
    slice, st.none() | st.integers(-9, 9), st.none() | st.integers(-9, 12), st.none() | st.integers(1, 3)
)


@set_trials(70)
@given(case=generate_images_on_grids(), rows=slices, cols=slices, channels=slices, seed=seeds)
def test_slice(case: tuple[Grid, Pair], rows: slice, cols: slice, channels: slice, seed: int):
    grid, size_px = case
    image = make_whole_numbers(1, 3, *size_px, seed=seed)
    cut = image[:, channels, rows, cols]
    assume(cut.numel() and cut.shape[-2] >= grid.rows and cut.shape[-1] >= grid.cols)
    middle = image[:, channels, rows]  # the slices are taken one after the other
    assume(middle.shape[-2] >= grid.rows)
    check(lambda x: x[:, channels, rows, cols], image, grid)


CHANNELWISE = {
    "cat": lambda x: torch.cat([x, 2 * x, x[:, :1]], dim=1),
    "cat of batches": lambda x: torch.cat([x, 3 * x], dim=0),
    "chunk": lambda x: torch.mul(*x.chunk(2, dim=1)),
    "split": lambda x: sum(part.sum(1, keepdim=True) * n for n, part in enumerate(x.split(3, dim=1), 1)),
    "split_with_sizes": lambda x: torch.cat(x.split([1, 3], dim=1)[::-1], dim=1),
    "unbind": lambda x: x.unbind(1)[1] * x.unbind(1)[3],
    "permute": lambda x: (x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2),
    "permute within space": lambda x: x.permute(0, 1, 3, 2).relu().permute(0, 1, 3, 2),
    "unbind behind permute": lambda x: x.permute(0, 2, 3, 1).unbind(-1)[2],
    "cat behind permute": lambda x: torch.cat([y := x.permute(0, 2, 3, 1), 2 * y], -1).permute(0, 3, 1, 2),
    "sum over channels behind permute": lambda x: x.permute(0, 2, 3, 1).sum(-1),
    "mean over channels": lambda x: x.mul(4).mean(1),
    "sum over batch": lambda x: x.sum(0),
    "slice behind permute": lambda x: x.permute(0, 2, 3, 1)[..., 1:3].permute(0, 3, 1, 2),
    "softmax behind permute": lambda x: (x.permute(0, 2, 3, 1) * 0).softmax(-1).permute(0, 3, 1, 2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHANNELWISE)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_channels(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(CHANNELWISE[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


# ---- pixels by themselves


class Affine(nn.Module):
    """What a parameter of shape (1, C, 1, 1) does to an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.empty(channels, 1, 1))
        self.register_buffer("offset", make_whole_numbers(1, channels, 1, 1, seed=7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.weight + self.bias) - self.offset


POINTWISE = {
    "relu": torch.relu,
    "relu in place": lambda x: F.relu(x * 2, inplace=True) + 1,
    "add to itself": lambda x: x + x,
    "product with itself": lambda x: x * x,
    "absolute": torch.abs,
    "clamp": lambda x: x.clamp(-1, 2),
    "where": lambda x: torch.where(x > 0, x, 2 * x),
    "leaky": lambda x: F.leaky_relu(x, 0.5),
    "hardtanh": lambda x: F.relu6(3 * x),
    "zeros_like": lambda x: x + torch.zeros_like(x) + torch.ones_like(x),
    "through another type": lambda x: x.to(torch.float32).double() * 2,
    "contiguous and clone": lambda x: x.contiguous().clone() - x.detach(),
    "switched off dropout": lambda x: F.dropout(x, 0.5, training=False) * 2,
    "switched off dropout of channels": lambda x: F.dropout2d(x, 0.5, training=False) * 2,
    "switched off alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=False) * 2,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POINTWISE)
@set_trials(4)
@given(case=generate_images_on_grids(), seed=seeds)
def test_pointwise(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(POINTWISE[name], make_whole_numbers(2, 2, *size_px, seed=seed), grid)


@set_trials(15)
@given(case=generate_images_on_grids(), seed=seeds)
def test_parameters_and_buffers_for_each_channel(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(Affine(3), seed), make_whole_numbers(2, 3, *size_px, seed=seed), grid)


@set_trials(8)
@given(case=generate_images_on_grids(), seed=seeds)
def test_prelu(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(nn.PReLU(3), seed), make_whole_numbers(2, 3, *size_px, seed=seed), grid)


# ---- sums over space


REDUCTIONS = {
    "sum over space": lambda x: x.sum((-2, -1)),
    "sum of all": lambda x: x.sum(),
    "sum over space and channels": lambda x: x.sum((1, 2, 3)),
    "sum kept": lambda x: x * x.sum((2, 3), keepdim=True),
    "sum behind permute": lambda x: x.permute(0, 2, 3, 1).sum((1, 2)),
    "mean over space": lambda x: x.mean((2, 3)),
    "mean of all": lambda x: x.mean(),
    "mean taken off": lambda x: x - x.mean((-1, -2), keepdim=True),
    "mean in another type": lambda x: x.float().mean((2, 3), dtype=torch.float64),
    "sum in another type": lambda x: (x > 0).sum((2, 3), dtype=torch.float64) + x.sum((2, 3)),
    "global pool taken off": lambda x: x * F.adaptive_avg_pool2d(x, 1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REDUCTIONS)
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_sums_over_space(name: str, case: tuple[Grid, Pair], seed: int):
    """Bit-equal: pixels and gradients are multiples of what a mean divides by."""
    grid, size_px = case
    function, step = REDUCTIONS[name], 4 * math.prod(size_px)
    image = make_whole_numbers(2, 2, *size_px, seed=seed, step=step)
    check(function, image, grid, labels=make_whole_numbers(*function(image).shape, seed=seed, step=step))


class SqueezeAndExcite(nn.Module):
    """Channels weighed by what the whole image says: a shared value goes back to the tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.judge(x.sum((2, 3), keepdim=True))


@set_trials(12)
@given(case=generate_images_on_grids(), seed=seeds)
def test_squeeze_and_excite(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(SqueezeAndExcite(), seed), make_whole_numbers(2, 2, *size_px, seed=seed), grid)


# ---- floats: exponentials and quotients do not come out whole, so 1e-12


@pytest.mark.parametrize("softmax", [torch.softmax, torch.log_softmax])
@set_trials(8)
@given(case=generate_images_on_grids(), seed=seeds)
def test_softmax_over_channels(softmax: Callable[..., Tensor], case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(lambda x: softmax(x, 1), make_whole_numbers(2, 3, *size_px, seed=seed), grid, same=close)


def make_segmenter(seed: int) -> nn.Module:
    return with_whole_weights(nn.Conv2d(2, 4, 3, padding=1), seed)


class Judge(nn.Module):
    """A loss that may leave the pixels' losses unreduced: then they are summed."""

    def __init__(self, each: nn.Module) -> None:
        super().__init__()
        self.each = each

    def forward(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return self.each(prediction, labels).sum()


@set_trials(30)
@given(
    case=generate_images_on_grids(),
    weighted=st.booleans(),
    ignored=st.sampled_from([-100, 2]),
    seed=seeds,
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
)
def test_cross_entropy(
    case: tuple[Grid, Pair], weighted: bool, ignored: int, seed: int, reduction: str, smoothing: float
):
    """A tile may be ignored as a whole; the mean divides by what counts in all tiles."""
    grid, size_px = case
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double() if weighted else None
    judge = nn.CrossEntropyLoss(weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
    labels = make_whole_numbers(2, *size_px, seed=seed, low=0, high=3).long()
    assume((labels != ignored).any())
    image = make_whole_numbers(2, 2, *size_px, seed=seed)
    check(make_segmenter(seed), image, grid, labels=labels, loss=Judge(judge), same=close)


@set_trials(12)
@given(case=generate_images_on_grids(), reduction=st.sampled_from(["mean", "sum"]), weighted=st.booleans(), seed=seeds)
def test_cross_entropy_with_probabilities(case: tuple[Grid, Pair], reduction: str, weighted: bool, seed: int):
    grid, size_px = case
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double() if weighted else None
    labels = make_whole_numbers(2, 4, *size_px, seed=seed).softmax(1)
    judge, image = nn.CrossEntropyLoss(weight, reduction=reduction), make_whole_numbers(2, 2, *size_px, seed=seed)
    check(make_segmenter(seed), image, grid, labels=labels, loss=judge, same=close)


@pytest.mark.parametrize("judge", [nn.MSELoss, nn.L1Loss])
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_sums_of_pixel_losses_are_bit_equal(judge: type[nn.Module], case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    labels, image = make_whole_numbers(2, 4, *size_px, seed=seed + 1), make_whole_numbers(2, 2, *size_px, seed=seed)
    check(make_segmenter(seed), image, grid, labels=labels, loss=judge(reduction="sum"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("judge", [nn.MSELoss, nn.L1Loss, nn.BCEWithLogitsLoss])
@set_trials(8)
@given(case=generate_images_on_grids(), reduction=st.sampled_from(["mean", "sum", "none"]), seed=seeds)
def test_pixel_losses(judge: type[nn.Module], case: tuple[Grid, Pair], reduction: str, seed: int):
    grid, size_px = case
    labels = make_whole_numbers(2, 4, *size_px, seed=seed + 1, low=0, high=1)
    loss, image = Judge(judge(reduction=reduction)), make_whole_numbers(2, 2, *size_px, seed=seed)
    check(make_segmenter(seed), image, grid, labels=labels, loss=loss, same=close)


@set_trials(25)
@given(case=generate_images_on_grids(), affine=st.booleans(), tracked=st.booleans(), training=st.booleans(), seed=seeds)
def test_batch_norm(case: tuple[Grid, Pair], affine: bool, tracked: bool, training: bool, seed: int):
    """Also its running statistics, after the update."""
    grid, size_px = case
    norm = nn.BatchNorm2d(3, affine=affine, track_running_stats=tracked, momentum=0.3)
    image = make_whole_numbers(2, 3, *size_px, seed=seed)
    assume(all(len(set(channel.flatten().tolist())) > 1 for channel in image.unbind(1)))
    check(with_whole_weights(norm, seed).train(training), image, grid, same=close)


# ---- operators one behind the other, and stage behind stage


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "conv 3": lambda: nn.Conv2d(2, 2, 3, padding=1),
    "conv 4, stride 2": lambda: nn.Conv2d(2, 2, 4, stride=2, padding=2),
    "conv 1x3, dilated": lambda: nn.Conv2d(2, 2, (1, 3), padding=(0, 2), dilation=(1, 2)),
    "grouped": lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2),
    "up": lambda: nn.ConvTranspose2d(2, 2, 3, stride=2, padding=1, output_padding=1),
    "max": lambda: nn.MaxPool2d(3, 2, 1),
    "max, ceil": lambda: nn.MaxPool2d(2, ceil_mode=True),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "relu": nn.ReLU,
    "pad": lambda: nn.ZeroPad2d((0, 1, 2, 0)),
    "average": lambda: nn.AvgPool2d(2, 1, 1),
    "crop": lambda: Calls(lambda x: x[..., 1:, :-1]),
    "chunk": lambda: Calls(lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1)),
    "weighed": lambda: Calls(lambda x: x + x.sum((2, 3), keepdim=True)),
    "bilinear": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "copied border": lambda: nn.ReplicationPad2d((1, 0, 0, 2)),
    "moved axes": lambda: Calls(lambda x: x.permute(2, 0, 3, 1).relu().permute(1, 3, 0, 2)),
    "another shape": lambda: Calls(lambda x: x.unsqueeze(1).flip(2).flatten(1, 2)),
    "shuffled": lambda: Calls(lambda x: F.pixel_shuffle(torch.cat([x, 2 * x, x, -x], 1), 2)),
}


class Chain(nn.Module):
    """Blocks in a row; `fork` adds the block's input to its output where they have the same shape."""

    def __init__(self, names: Sequence[str], fork: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[name]() for name in names)
        self.fork = fork

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = torch.cat([x[:, :1] + y[:, 1:], y[:, :1]], 1) if self.fork and y.shape == x.shape else y
        return x


def has_fitting_sizes(model: nn.Module, size_px: Pair, grid: Grid) -> bool:
    """Whether every value between the blocks has a pixel for each tile, and is small enough for a test."""
    x = torch.zeros(1, 2, *size_px).double()
    for block in model.blocks:
        x = block(x)
        if x.shape[-2] < grid.rows or x.shape[-1] < grid.cols or x.numel() > 2 * 24 * 24:
            return False
    return True


chains = st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=6)


@set_trials(60)
@given(case=generate_images_on_grids(), names=chains, fork=st.booleans(), fused=st.integers(0, 4), seed=seeds)
def test_chains(case: tuple[Grid, Pair], names: list[str], fork: bool, fused: int, seed: int):
    """Whether each fetches its own halo or several share one."""
    grid, size_px = case
    model = with_whole_weights(Chain(names, fork), seed)
    assume(has_fitting_sizes(model, size_px, grid))
    check(model, make_whole_numbers(1, 2, *size_px, seed=seed), grid, fused=fused)


@pytest.mark.nightly
@set_trials(20)
@given(
    first=generate_images_on_grids(),
    second=st.sampled_from(["1x1", "1x2", "2x1", "2x2", "3x1"]),
    names=chains,
    spatial=st.integers(1, 3),
    fork=st.booleans(),
    seed=seeds,
)
def test_stages_with_other_grids(
    first: tuple[Grid, Pair], second: str, names: list[str], spatial: int, fork: bool, seed: int
):
    """A repartition between two spatial stages and a joint before one rank are linear maps too."""
    grid, size_px = first
    names = ["conv 3", *names, "conv 3", "grouped"]
    model = with_whole_weights(Chain(names, fork), seed)
    rows, cols = (max(axis) for axis in zip((grid.rows, grid.cols), map(int, second.split("x")), strict=True))
    assume(has_fitting_sizes(model, size_px, Grid(rows, cols)) and rows <= size_px[0] and cols <= size_px[1])
    grids = (str(grid), second, second)[:spatial]
    plan = Plan(split_size=3, spatial_size=spatial, slice_method=grids, precision="float64")
    assert_exact(model, make_whole_numbers(1, 2, *size_px, seed=seed), plan)


class SharedAcrossStages(nn.Module):
    """A value without pixels, made on tiles, is read in the next stage and in the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.second, self.third = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.conv(x).sum((2, 3))
        return self.third(self.second(pooled)) + pooled


@pytest.mark.parametrize("grids", [("2x2",), ("2x2", "1x2"), ("1x3", "2x2", "1x2")], ids=" then ".join)
def test_a_shared_value_crosses_from_stage_to_stage(grids: tuple[str, ...]):
    """All tiles hold it, one of them sends it, and its gradient comes back once."""
    plan = Plan(split_size=3, spatial_size=len(grids), slice_method=grids, balance=(1, 1, 1), precision="float64")
    assert_exact(with_whole_weights(SharedAcrossStages()), make_whole_numbers(2, 2, 6, 6), plan)


class Two(nn.Module):
    """What a forward does with two convolutions a and b."""

    def __init__(self, forward: Callable[[nn.Module, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 2, padding=1)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.a, self.b, x)

    def freeze(self, name: str) -> Two:
        self.get_submodule(name).requires_grad_(False)
        return self


def apply_detached_window(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    """No gradient flows back through the exchange of the detached value."""
    return a(x) * F.max_pool2d(a(x).detach(), 3, 1, 1)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "one weight read by two windows": lambda: Two(lambda a, b, x: a(x) + a(x * 2)),
    "a frozen convolution before": lambda: Two(lambda a, b, x: b(a(x))).freeze("a"),
    "a frozen convolution behind": lambda: Two(lambda a, b, x: b(a(x))).freeze("b"),
    "window of a detached value": lambda: Two(apply_detached_window),
    "a tensor that forward makes": lambda: Two(lambda a, b, x: a(x) * torch.arange(2.0, dtype=x.dtype)[:, None, None]),
    "sum of a detached value": lambda: Two(lambda a, b, x: a(x) * a(x).detach().sum((2, 3), keepdim=True)),
    "weights that no gradient reaches": lambda: Two(lambda a, b, x: a(x) + b(x).detach()[..., :-1, :-1]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("grid", ["1x1", "1x2", "2x2"])
def test_ways_to_use_a_weight(name: str, grid: str):
    assert_exact(with_whole_weights(WAYS[name]()), make_whole_numbers(2, 2, 7, 5), make_tiled_plan(grid))
