"""Signals and volumes on tiles: operators along one and three axes against one process, as those along two.

Numbers are whole where nothing is divided, so that ranks and one process agree to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb import Cluster, Training, forecast
from mpi4dl_nb.engines.compiler import local_rules
from mpi4dl_nb.engines.errors import ImageError, PlanError, TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid, find_compact_grid
from mpi4dl_nb.engines.models import UNet3d
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from tests.compiler.drawn import Calls, check, seeds
from tests.exact import close, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

AXES = [1, 3]


def pick(name: str, axes: int) -> type[nn.Module]:
    """The layer of this name along so many axes: `Conv` along three is `nn.Conv3d`."""
    layer: type[nn.Module] = getattr(nn, f"{name}{axes}d")
    return layer


@dataclass(frozen=True)
class Windows:
    """Windows that slide along each of some axes, and the grid that cuts inputs and outputs."""

    grid: Grid
    sizes: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]


@st.composite
def generate_windows(draw: st.DrawFn, axes: int, pool: bool = False, dilated: bool = True) -> Windows:
    """Pools may pad by half their kernel at most."""
    most = 4 if axes == 1 else 2
    rows = []
    for _ in range(axes):
        parts, kernel, stride = draw(st.integers(1, most)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        dilation = draw(st.integers(1, 2)) if dilated else 1
        padding, out = draw(st.integers(0, kernel // 2 if pool else 2)), draw(st.integers(parts, most + 3))
        size = (out - 1) * stride + dilation * (kernel - 1) + 1 - 2 * padding
        assume(size >= parts)
        rows.append((parts, size, out, kernel, stride, padding, dilation))
    parts, *others = zip(*rows, strict=True)
    assume(math.prod(parts) > 1)
    return Windows(Grid(*parts), *others)


@st.composite
def generate_blocks(draw: st.DrawFn, axes: int) -> tuple[Grid, tuple[int, ...]]:
    """A grid, and the size of an input that it can cut."""
    parts = tuple(draw(st.integers(1, 4 if axes == 1 else 2)) for _ in range(axes))
    assume(math.prod(parts) > 1)
    return Grid(*parts), tuple(draw(st.integers(count, 6)) for count in parts)


@pytest.mark.parametrize("axes", AXES)
@set_trials(40)
@given(data=st.data(), groups=st.integers(1, 2), bias=st.booleans(), seed=seeds)
def test_convolution(axes: int, data: st.DataObject, groups: int, bias: bool, seed: int):
    w = data.draw(generate_windows(axes))
    conv = pick("Conv", axes)(2 * groups, 2 * groups, w.kernel, w.stride, w.padding, w.dilation, groups, bias)
    check(with_whole_weights(conv, seed), make_whole_numbers(2, 2 * groups, *w.sizes, seed=seed), w.grid)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("axes", AXES)
@set_trials(20)
@given(data=st.data(), seed=seeds)
def test_convolution_that_keeps_the_size(axes: int, data: st.DataObject, seed: int):
    grid, sizes = data.draw(generate_blocks(axes))
    kernel = tuple(data.draw(st.integers(1, 4)) for _ in sizes)
    conv = pick("Conv", axes)(1, 2, kernel, padding="same")
    check(with_whole_weights(conv, seed), make_whole_numbers(2, 1, *sizes, seed=seed), grid)


@pytest.mark.parametrize("axes", AXES)
@set_trials(40)
@given(data=st.data(), bias=st.booleans(), wish=st.integers(0, 1), seed=seeds)
def test_transposed_convolution(axes: int, data: st.DataObject, bias: bool, wish: int, seed: int):
    """The windows read backwards: what were outputs is the input."""
    w = data.draw(generate_windows(axes))
    extra = tuple(min(wish, max(pair) - 1) for pair in zip(w.stride, w.dilation, strict=True))
    conv = pick("ConvTranspose", axes)(2, 1, w.kernel, w.stride, w.padding, extra, 1, bias, w.dilation)
    check(with_whole_weights(conv, seed), make_whole_numbers(2, 2, *w.out, seed=seed), w.grid)


@pytest.mark.parametrize("axes", AXES)
@set_trials(40)
@given(data=st.data(), ceil=st.booleans(), seed=seeds)
def test_max_pool_and_its_places(axes: int, data: st.DataObject, ceil: bool, seed: int):
    """The first of equal positions, by its number in the whole input."""
    w = data.draw(generate_windows(axes, pool=True))
    pool = pick("MaxPool", axes)(w.kernel, w.stride, w.padding, w.dilation, return_indices=True, ceil_mode=ceil)
    x = make_whole_numbers(2, 2, *w.sizes, seed=seed, low=-9, high=-1)
    assume(pool(x)[0].isfinite().all())  # of a dilated window that holds no pixel at all, PyTorch's index is beyond x
    check(lambda x: pool(x)[0], x, w.grid)
    check(lambda x: pool(x)[0] * pool(x)[1], x, w.grid)


@pytest.mark.parametrize("axes", AXES)
@set_trials(40)
@given(data=st.data(), ceil=st.booleans(), counted=st.booleans(), seed=seeds)
def test_average_pool(axes: int, data: st.DataObject, ceil: bool, counted: bool, seed: int):
    w = data.draw(generate_windows(axes, pool=True, dilated=False))
    assume(all(size >= kernel for size, kernel in zip(w.sizes, w.kernel, strict=True)))  # ATen refuses others
    pool = pick("AvgPool", axes)(w.kernel, w.stride, w.padding, ceil, counted)
    check(pool, make_whole_numbers(2, 2, *w.sizes, seed=seed), w.grid, same=close)


@pytest.mark.parametrize("kind", ["AdaptiveAvgPool", "AdaptiveMaxPool"])
@pytest.mark.parametrize("axes", AXES)
@set_trials(30)
@given(data=st.data(), seed=seeds)
def test_adaptive_pools(axes: int, kind: str, data: st.DataObject, seed: int):
    """Also to a single cell, and of averages to fewer cells than tiles."""
    grid, sizes = data.draw(generate_blocks(axes))
    low = grid if kind == "AdaptiveMaxPool" else (1,) * axes
    out = data.draw(st.just((1,) * axes) | st.tuples(*(st.integers(least, 6) for least in low)))
    check(pick(kind, axes)(out), make_whole_numbers(2, 2, *sizes, seed=seed), grid, same=close)


@set_trials(20)
@given(data=st.data(), seed=seeds)
def test_unpool(data: st.DataObject, seed: int):
    grid, sizes = data.draw(generate_blocks(3))
    sizes = tuple(2 * size for size in sizes)
    pool, unpool = nn.MaxPool3d(2, return_indices=True), nn.MaxUnpool3d(2)
    check(lambda x: unpool(*pool(x), output_size=x.shape), make_whole_numbers(1, 2, *sizes, seed=seed), grid)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "linear, aligned"])
@pytest.mark.parametrize("axes", AXES)
@set_trials(20)
@given(data=st.data(), by_factor=st.booleans(), seed=seeds)
def test_interpolation(axes: int, mode: str, data: st.DataObject, by_factor: bool, seed: int):
    grid, sizes = data.draw(generate_blocks(axes))
    name, _, aligned = mode.partition(", ")
    name = "trilinear" if (name, axes) == ("linear", 3) else name
    how = {"align_corners": bool(aligned)} if "linear" in name else {}
    size = {"scale_factor": 2} if by_factor else {"size": data.draw(st.tuples(*(st.integers(n, 9) for n in grid)))}
    x = make_whole_numbers(1, 2, *sizes, seed=seed)
    check(lambda x: F.interpolate(x, mode=name, **size, **how), x, grid, same=close)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("axes", AXES)
@set_trials(16)
@given(data=st.data(), seed=seeds)
def test_pads(axes: int, mode: str, data: st.DataObject, seed: int):
    grid, sizes = data.draw(generate_blocks(axes))
    pads = [data.draw(st.integers(0, size - 1)) for size in reversed(sizes) for _ in range(2)]
    check(lambda x: F.pad(x, pads, mode=mode), make_whole_numbers(1, 2, *sizes, seed=seed), grid)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "instance norm": F.instance_norm,
    "group norm": lambda x: F.group_norm(x, 2),
    "mean and maximum": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True) * x + x.amax(-1, keepdim=True),
    "softmax over channels": lambda x: x.softmax(1),
    "log softmax over the last axis": lambda x: x.log_softmax(-1),
    "variance": lambda x: x.var(tuple(range(2, x.dim()))),
    "slice": lambda x: x[..., 1:],
    "roll and flip": lambda x: x.roll(1, -1) * x.flip(2),
    "assignment": lambda x: torch.slice_scatter(x, x[..., :1] * 2, -1, 0, 1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(x.shape),
    "channels last": lambda x: x.movedim(1, -1).cumsum(-1).movedim(-1, 1),
    "repeat": lambda x: x.repeat(1, 2, *[1] * (x.dim() - 2)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("axes", AXES)
@set_trials(8)
@given(data=st.data(), seed=seeds)
def test_other_operators(axes: int, name: str, data: st.DataObject, seed: int):
    grid, sizes = data.draw(generate_blocks(axes))
    assume(sizes[-1] > grid[-1])  # of a slice, every tile has something
    check(OTHERS[name], make_whole_numbers(2, 4, *sizes, seed=seed), grid, same=close)


class OfPlanes(nn.Module):
    """Convolutions of three axes on images whose channels are planes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 2, (3, 3, 2), stride=(2, 1, 1), padding=(1, 1, 0))
        self.up = nn.ConvTranspose3d(2, 1, (2, 3, 3), stride=(2, 1, 2), padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x[:, None]))


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(1, 3)])
def test_a_kernel_of_three_axes_on_images(grid: Grid):
    """The first axis of the kernel is one that no tile cuts."""
    check(with_whole_weights(OfPlanes()), make_whole_numbers(2, 4, 6, 8), grid)
    x = make_whole_numbers(2, 4, 6, 8)
    check(lambda x: F.max_pool3d(x[:, None], (2, 3, 3), (2, 1, 1), (0, 1, 1)), x, grid)


class Volumes(nn.Module):
    """Two levels of a U-Net with group norm, and trilinear upsampling with aligned corners."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.coarse = nn.Sequential(nn.MaxPool3d(2), nn.Conv3d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2, mode="trilinear", align_corners=True)
        self.head = nn.Conv3d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.head(torch.cat([fine, self.up(self.coarse(fine))], 1))


def compute_dice(prediction: Tensor, labels: Tensor) -> Tensor:
    """The Dice loss of the second class."""
    share = prediction.softmax(1)[:, 1]
    return 1 - (2 * (share * labels).sum() + 1) / (share.sum() + labels.sum() + 1)


@pytest.mark.parametrize("grid", [Grid(2, 2, 2), Grid(1, 2, 3), Grid(3, 1, 1)])
def test_a_unet_of_volumes_with_dice(grid: Grid):
    torch.manual_seed(0)
    labels = make_whole_numbers(2, 12, 10, 14, low=0, high=1)
    x = make_whole_numbers(2, 1, 12, 10, 14)
    check(Volumes().double(), x, grid, labels=labels, loss=compute_dice, same=close)
    check(Volumes().double(), x, grid, fused=2, labels=labels, loss=compute_dice, same=close)


@pytest.mark.parametrize(
    ("shape", "method", "fitting"),
    [((1, 1, 8, 32, 32), "2x2", "1x2x2"), ((1, 1, 64), "2x3", "6"), ((1, 3, 64, 16), "2x2x1", "4x1")],
)
def test_a_plan_for_other_axes_is_refused(shape: tuple[int, ...], method: str, fitting: str):
    with pytest.raises(
        PlanError, match=f"cuts along . axes, .* have .. Use slice_method='{fitting}': .* smallest halos"
    ):
        prepare(nn.Identity(), Plan(split_size=1, slice_method=method), shape)


@pytest.mark.parametrize(
    ("tiles", "size_px", "fitting"),
    [
        (8, (64, 64, 64), "2x2x2"),
        (8, (256, 32, 32), "8x1x1"),
        (8, (3, 64, 128), "1x2x4"),
        (4, (16, 24, 32), "1x2x2"),
        (None, (64, 24, 24), "4x1x1"),
        (6, (100,), "6"),
        (6, (64, 32), "3x2"),
        (8, (2, 2, 64), "1x1x8"),
        (4, (16, 1024), "square"),
        ((8, 4), (64, 64, 64), ("2x2x2", "1x2x2")),
    ],
    ids=str,
)
def test_a_number_alone_is_divided_so_that_halos_are_smallest(
    tiles: int | tuple[int, ...] | None, size_px: tuple[int, ...], fitting: str | tuple[str, ...]
):
    stages = len(tiles) if isinstance(tiles, tuple) else 1
    plan = Plan(split_size=stages, spatial_size=stages, num_spatial_parts=tiles)
    assert plan.fit(size_px).slice_method == fitting
    assert plan.fit(size_px).ranks == plan.ranks


def test_a_number_alone_trains_volumes():
    plan = Plan(split_size=1, num_spatial_parts=8, precision="float64")
    model = UNet3d(width=4)
    with Cluster(8, backend="loopback") as cluster:
        training = Training(model, plan, cluster, (1, 1, 8, 12, 32))
        assert str(training.plan.grids[0]) == "1x2x4"
        assert training.verify()["ok"]
    assert forecast(model, plan, (1, 1, 8, 12, 32), "DGX H100").plan == training.plan


TOO_MANY = {
    "planes": ((1, 1, 3, 8, 8), "4x1x1", "3 planes of pixels cannot be cut into 4 tiles. Use .* at most 3 along"),
    "rows": ((1, 1, 8, 4, 8), "1x5x1", "4 rows of pixels cannot be cut into 5 tiles. Use .* at most 4 along"),
    "columns": ((1, 1, 8, 8, 2), "1x1x3", "2 columns of pixels cannot be cut into 3 tiles. Use .* at most 2 along"),
    "positions": ((1, 1, 5), "7", "5 positions cannot be cut into 7 tiles. Use .* at most 5 along"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_more_parts_than_positions_are_refused(name: str):
    shape, grid, told = TOO_MANY[name]
    with pytest.raises(PlanError, match=told):
        prepare(Calls(lambda x: 2 * x), Plan(split_size=1, slice_method=grid), shape).check_programs()


def test_windows_that_no_cut_respects_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_rules, "WHOLE_PX", 16)
    in_windows = Calls(lambda x: (2 * x.unflatten(2, (2, 8))).flatten(2, 3))
    told = "2 windows of 8 rows cannot be cut into 4 tiles. Use a slice_method with at most 2 along that axis"
    with pytest.raises(PlanError, match=f"aten.unflatten.*stage 0: {told}"):
        prepare(in_windows, Plan(split_size=1, slice_method="4x1"), (1, 2, 16, 8)).check_programs()
    prepare(in_windows, Plan(split_size=1, slice_method="2x1"), (1, 2, 16, 8)).check_programs()


def test_stages_with_other_axes_are_refused():
    with pytest.raises(PlanError, match=r"cuts images along 2 and 3 axes\. Use grids with as many numbers"):
        Plan(split_size=2, spatial_size=2, slice_method=("2x2", "2x2x1"))


def test_a_size_that_a_network_refuses_is_named_with_the_next_that_it_takes():
    told = r"does run on 4 x 16 x 16 px and on 8 x 16 x 16 px \(planes in multiples of 4\): crop or pad"
    with pytest.raises(TraceError, match=told):
        prepare(UNet3d(width=4), Plan(split_size=1, slice_method="2x1x1"), (1, 1, 6, 16, 16))


@pytest.mark.parametrize("plan", [Plan(split_size=2, spatial_size=0), Plan(split_size=1, slice_method="2")])
def test_an_image_without_its_batch_is_no_signal(plan: Plan):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    with pytest.raises(ImageError, match=r"conv2d in 0, .* one image \(C, H, W\). Give a batch of one: \(1, 3, 8, 9\)"):
        prepare(model, plan, (3, 8, 9), lambda prediction, _: prediction.mean())


def test_a_grid_of_billions_is_refused_at_once():
    with pytest.raises(PlanError, match="there may be"):
        Plan(slice_method="99999x99999")
    assert find_compact_grid((1, 1, 1), (1 << 31) - 1).tiles == (1 << 31) - 1
