"""Norms whose groups are parts of an image, and variances over space, held against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.kernels import get_kernel
from tests.compiler.drawn import Pair, check, generate_images_on_grids, seeds
from tests.exact import assert_exact, close, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def is_varied(image: Tensor) -> bool:
    """Whether no channel of an image is all one value, of which a norm has no gradient but noise."""
    return all(len(set(channel.flatten().tolist())) > 1 for channel in image.flatten(0, 1))


@pytest.mark.nightly
@set_trials(20)
@given(case=generate_images_on_grids(), affine=st.booleans(), tracked=st.booleans(), training=st.booleans(), seed=seeds)
def test_instance_norm(case: tuple[Grid, Pair], affine: bool, tracked: bool, training: bool, seed: int):
    """Also its running statistics, which are means over the images of a batch."""
    grid, size_px = case
    norm = nn.InstanceNorm2d(3, affine=affine, track_running_stats=tracked, momentum=0.3)
    image = make_whole_numbers(2, 3, *size_px, seed=seed)
    assume(is_varied(image))
    check(with_whole_weights(norm, seed).train(training), image, grid, same=close)


@set_trials(15)
@given(case=generate_images_on_grids(), groups=st.sampled_from([1, 2, 4]), affine=st.booleans(), seed=seeds)
def test_group_norm(case: tuple[Grid, Pair], groups: int, affine: bool, seed: int):
    grid, size_px = case
    image = make_whole_numbers(2, 4, *size_px, seed=seed)
    assume(is_varied(image))
    check(with_whole_weights(nn.GroupNorm(groups, 4, affine=affine), seed), image, grid, same=close)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@set_trials(10)
@given(case=generate_images_on_grids(), with_channels=st.booleans(), affine=st.booleans(), seed=seeds)
def test_norm_over_space(norm: type[nn.Module], case: tuple[Grid, Pair], with_channels: bool, affine: bool, seed: int):
    """Its weight has pixels: each tile takes its own."""
    grid, size_px = case
    image = make_whole_numbers(2, 3, *size_px, seed=seed)
    assume(is_varied(image))
    shape = (3, *size_px) if with_channels else size_px
    check(with_whole_weights(norm(shape, elementwise_affine=affine), seed), image, grid, same=close)


class OverChannels(nn.Module):
    """A norm of each pixel, as ConvNeXt has it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(LAST)).permute(FIRST)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_norm_over_channels(norm: type[nn.Module], case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(
        with_whole_weights(OverChannels(norm(4)), seed), make_whole_numbers(2, 4, *size_px, seed=seed), grid, same=close
    )


SPREADS = {
    "variance over space": lambda x: x.var((2, 3)),
    "biased variance": lambda x: x.var((-2, -1), unbiased=False, keepdim=True) * x,
    "variance of all": lambda x: x.var(),
    "variance by a correction": lambda x: x.var((1, 2, 3), correction=2),
    "deviation": lambda x: x / (x.std((2, 3), keepdim=True) + 1),
    "variance and mean": lambda x: torch.cat(torch.var_mean(x, (0, 2, 3)), 0),
    "deviation behind permute": lambda x: x.permute(LAST).std((1, 2)),
    "deviation of all": lambda x: x.std() * x,
    "deviation by a correction": lambda x: x.std((2, 3), correction=0),
    "deviation and mean of all": lambda x: torch.stack(torch.std_mean(x)),
    "deviation and mean": lambda x: torch.cat(torch.std_mean(x, (2, 3)), 1),
    "deviation and mean by a correction": lambda x: torch.cat(torch.std_mean(x, (2, 3), correction=2), 1),
    "variance and mean by a correction": lambda x: torch.cat(torch.var_mean(x, (2, 3), correction=2), 1),
    "variance and mean of all": lambda x: torch.stack(torch.var_mean(x)),
    "standardised by hand": lambda x: (x - x.mean((1, 2, 3), True)) / (x.var((1, 2, 3), keepdim=True) + 1e-5).sqrt(),
    "variance over channels": lambda x: x.var(1),
    "biased variance of all": lambda x: x.var(False),
    "biased deviation of all": lambda x: x.std(False) * x,
    "biased variance and mean of all": lambda x: torch.stack(torch.var_mean(x, False)),
    "biased deviation and mean of all": lambda x: torch.stack(torch.std_mean(x, False)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPREADS)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_variances(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    image = make_whole_numbers(2, 4, *size_px, seed=seed)
    assume(is_varied(image) and image[0, 0].numel() > 2)  # a correction of 2 leaves nothing of two pixels
    check(SPREADS[name], image, grid, same=close)


@pytest.mark.parametrize("name", ["deviation", "deviation and mean"])
def test_the_deviation_of_a_constant_channel_passes_no_gradient(name: str):
    """Also of those that a dropout sets to 0; autograd's slope of the root is infinite there."""
    image = make_whole_numbers(2, 4, 6, 8)
    image[0, 1] = 3
    check(lambda x: SPREADS[name](F.dropout2d(x, 0.5)), image, Grid(1, 2), same=close)


def test_what_lies_far_from_zero_loses_nothing_to_cancellation():
    """A mean of a million with a deviation of one: sums of squares in float64 would keep four digits."""
    image = make_whole_numbers(2, 4, 8, 8) + 1e6
    wider = lambda a, b: torch.allclose(a, b, rtol=1e-9, atol=1e-9)  # noqa: E731  (the oracle rounds too)
    check(with_whole_weights(nn.GroupNorm(2, 4)), image, Grid(2, 2), same=wider)


def test_norms_before_and_behind_the_joint():
    """On one rank, and where space is flattened, they are what they are."""
    norms = [nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4), nn.LayerNorm((4, 6, 7))]
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *norms, nn.Flatten(2), nn.InstanceNorm1d(4))
    plan = Plan(split_size=2, spatial_size=1, slice_method="2x2", precision="float64")
    assert_exact(with_whole_weights(model), make_whole_numbers(2, 2, 6, 7), plan, same=close)


def test_a_norm_over_one_spatial_axis():
    """For few pixels every rank normalises all of them."""
    check(
        lambda x: F.layer_norm(x, (7,)) + x.var(2, keepdim=True), make_whole_numbers(2, 2, 8, 7), Grid(2, 2), same=close
    )


ROWS_AS_CHANNELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm at rest": lambda: nn.BatchNorm1d(6).eval(),
    "instance norm": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    "instance norm at rest": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True).eval(),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "channel shuffle": lambda: nn.ChannelShuffle(2),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ROWS_AS_CHANNELS)
@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2)])
def test_rows_that_stand_where_channels_do(name: str, grid: Grid):
    """Of a value (N, H, W), every rank normalises all rows."""

    class OfSums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = with_whole_weights(ROWS_AS_CHANNELS[name]())

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.sum(1))

    check(OfSums(), make_whole_numbers(2, 2, 6, 8), grid, same=close)


class BackwardArguments(TorchDispatchMode):
    """Records the arguments of every `native_batch_norm_backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.native_batch_norm_backward.default:
            self.calls.append(arguments)
        return function(*arguments, **(keywords or {}))


def test_batch_norm_backward_passes_what_cuda_kernels_require():
    """CUDA's channels_last kernels fail on an internal check where the saved statistics are None."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    moments = get_kernel("tile.moments")(x, 0, 1)
    with BackwardArguments() as seen:
        get_kernel("tile.batch_norm")(x, moments, torch.ones(3), torch.zeros(3), [40], 1e-5).square().sum().backward()
    assert len(seen.calls) == 1
    save_mean, save_invstd = seen.calls[0][5:7]
    assert save_mean.numel() == save_invstd.numel() == 0  # empty, as the forward pass in evaluation mode leaves them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_of_small_numbers_adds_the_eps_of_the_type_in_which_it_computes(dtype: torch.dtype):
    def normalise_small_numbers(x: Tensor) -> Tensor:
        return F.rms_norm((x * 2**-6).to(dtype), tuple(x.shape[1:])).float()

    image = make_whole_numbers(2, 2, 6, 8).float()
    check(normalise_small_numbers, image, Grid(2, 2), same=lambda a, b: torch.allclose(a, b, rtol=0.02, atol=0.01))


class PassingStatistics(nn.Module):
    """Statistics that nobody keeps, as where a model is trained anew for each task."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), training=True)


class ViewedStatistics(nn.Module):
    """The buffers are updated by way of their views."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 2).double())
        self.register_buffer("variance", torch.ones(2, 2).double())

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean.view(-1), self.variance.view(-1), training=True)


class UnregisteredStatistics(nn.Module):
    """The statistics are plain attributes, which a trace takes for constants."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = torch.zeros(4).double(), torch.ones(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=True)


class OfWeights(nn.Module):
    """Normalises a parameter, of which no rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes, self.norm = nn.Parameter(torch.empty(6, 4)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.prototypes).sum(0)[:, None, None]


def test_norms_of_weights_and_by_statistics_that_nobody_keeps():
    check(PassingStatistics(), make_whole_numbers(2, 4, 6, 8), Grid(2, 2), same=close)
    with pytest.raises(TraceError, match="updates running statistics that are no buffers of the model"):
        check(ViewedStatistics(), make_whole_numbers(2, 4, 6, 8), Grid(2, 2))
    with pytest.raises(TraceError, match="updates running statistics that are no buffers of the model"):
        check(UnregisteredStatistics(), make_whole_numbers(2, 4, 6, 8), Grid(2, 2))
    check(with_whole_weights(OfWeights()), make_whole_numbers(2, 4, 6, 8), Grid(2, 2), same=close)
