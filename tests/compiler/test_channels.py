"""Channels and batch reordered, split, merged, picked, multiplied: rows and columns stay where they are."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from tests.compiler.drawn import Pair, check, generate_images_on_grids, seeds
from tests.exact import close, make_whole_numbers, with_whole_weights
from tests.sampling import set_trials

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def make_matrix(x: Tensor) -> Tensor:
    """(3, 4), made of what a graph can make."""
    return torch.arange(12.0, dtype=x.dtype, device=x.device).reshape(3, 4) - 5


def apply_channel_shuffle(x: Tensor) -> Tensor:
    """ShuffleNet's own way to write it (Zhang et al., 2017, arXiv:1707.01083)."""
    n, channels, height, width = x.shape
    return x.view(n, 2, channels // 2, height, width).transpose(1, 2).contiguous().view(n, channels, height, width)


SHAPES = {
    "channel shuffle by views": apply_channel_shuffle,
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "unflatten and flatten": lambda x: x.unflatten(1, (2, 2)).mul(2).flatten(1, 2),
    "flatten batch into channels": lambda x: (2 * x.flatten(0, 1)[None]).view(x.shape),
    "reshape without a size": lambda x: x.reshape(1, -1, *x.shape[2:]).relu().reshape(*x.shape[:3], -1),
    "channels last, split": lambda x: x.permute(LAST).reshape(*x.shape[:1], *x.shape[2:], 2, 2).sum(-1).permute(FIRST),
    "unsqueeze and squeeze": lambda x: x.unsqueeze(1).mul(2).squeeze(1),
    "squeeze of every one": lambda x: (x.sum(1, keepdim=True) * 2)[:, None],
    "unsqueeze last": lambda x: x.unsqueeze(-1).mul(3).squeeze(-1),
    "squeeze of several": lambda x: x[:, None, None].mul(2).squeeze((1, 2)),
    "squeeze of all": lambda x: x[None].mul(2).squeeze() if 1 not in x.shape else x * 2,
    "view as": lambda x: x.contiguous().view(2, 2, 2, *x.shape[2:]).mul(2).view_as(x),
    "swapdims": lambda x: x.swapdims(1, 2).mul(2).swapdims(2, 1),
    "moveaxis": lambda x: x.moveaxis(1, 3).mul(2).moveaxis(3, 1),
    "broadcast to": lambda x: x[:, :1].broadcast_to(x.shape) * x,
    "new full": lambda x: x * x.new_full((4, 1, 1), 3.0),
    "reshape as": lambda x: x.view(2, 2, 2, *x.shape[2:]).reshape_as(x) * 2,
    "transpose": lambda x: x.transpose(0, 1).mul(2).transpose(1, 0),
    "transpose of space": lambda x: x.transpose(-1, -2).relu().transpose(2, 3),
    "swapaxes": lambda x: x.swapaxes(1, 3).mul(3).swapaxes(3, 1),
    "movedim": lambda x: x.movedim(1, -1).relu().movedim(-1, 1),
    "movedim of several": lambda x: x.movedim((2, 3), (0, 1)).mul(2).permute(2, 3, 0, 1),
    "mT": lambda x: x.mT.mul(2).mT,
    "stack": lambda x: torch.stack([x, 2 * x, x.relu()], 1).sum(1),
    "stack at the end": lambda x: torch.stack([x, 3 * x], -1).sum(-1),
    "stack in front": lambda x: torch.stack([x, 3 * x]).mul(2).unbind(0)[1],
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).sum(2),
    "expand of one channel": lambda x: x.sum(1, keepdim=True).expand_as(x) * x,
    "expand of what all ranks hold": lambda x: x.sum((2, 3), keepdim=True).expand_as(x) * x,
    "repeat": lambda x: x.repeat(1, 2, 1, 1) * 2,
    "tile": lambda x: x.tile(2, 1, 1, 1) * 2,
    "repeat interleave": lambda x: x.repeat_interleave(2, 1) * 2,
    "concat": lambda x: torch.concat([x, 2 * x], 1),
    "new zeros": lambda x: torch.cat([x, x], 0) + x.new_ones((4, 1, 1, 1)) + x.new_zeros(()),
}

BROADCAST = {
    "a mask and an image": lambda x: torch.mul(*torch.broadcast_tensors(x[:, :1] > 0, x[:1] * 2)),
    "a row and an image": lambda x: torch.mul(*torch.broadcast_tensors(x[:1, :, :1], x[:, :1])),
    "an image and a mask without pixels": lambda x: torch.mul(*torch.broadcast_tensors(x.sum((2, 3), True)[:1], x > 0)),
}

ALONG = {
    "flip of channels": lambda x: x.flip(1) * 2,
    "roll of channels": lambda x: x.roll(1, 1) + x,
    "cumulative sum over channels": lambda x: x.cumsum(1),
    "max over channels": lambda x: x.max(1, keepdim=True)[0] * x,
    "max over channels, gone": lambda x: x.max(1)[0],
    "max and mean, as attention has it": lambda x: torch.cat([x.max(1, True)[0], (4 * x).mean(1, True)], 1),
    "amax over channels": lambda x: 12 * x.amax(1),
    "min of batch": lambda x: x.min(0)[0],
    "argmax over channels": lambda x: x * x.argmax(1, keepdim=True),
    "argmin over channels": lambda x: x * x.argmin(1, keepdim=True),
    "cumulative product": lambda x: x.cumprod(1),
    "all over channels": lambda x: x * (x > -2).all(1, keepdim=True),
    "product over channels": lambda x: x.mul(0).add(2).prod(1) * x.sum(1),
    "any over channels": lambda x: x * (x > 2).any(1, keepdim=True),
    "sorted channels": lambda x: x.sort(1)[0],
    "best channels": lambda x: x.topk(2, 1)[0],
    "median over channels": lambda x: x[:, :3].median(1)[0],
    "one channel": lambda x: x[:, 1] * 2,
    "one image": lambda x: x[0] + x[1],
    "last channel, behind": lambda x: x.permute(LAST)[..., -1],
    "a list of channels": lambda x: x[:, torch.arange(0, 4, 2, device=x.device)],
    "channels by number": lambda x: x.index_select(1, torch.arange(0, 4, 3, device=x.device)),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "whole halves": lambda x: x + x.detach().floor_divide(2) + x.detach().long() // 3,
    "masks in place": lambda x: x * functools.reduce(operator.ior, [x > 1, x < -2]) * operator.iand(x > -9, x < 9),
    "gather": lambda x: x.gather(1, x[:, :1].relu().long()),
    "one hot": lambda x: x * F.one_hot(x.argmax(1), 4).permute(FIRST),
    "pad of channels": lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)),
    "pad of channels and columns": lambda x: F.pad(x, (2, 0, 0, 1, 1, 0), value=3.0),
    "linear over channels last": lambda x: F.linear(x.permute(LAST), make_matrix(x)).permute(FIRST),
    "matmul over channels last": lambda x: (x.permute(LAST) @ make_matrix(x).T).permute(FIRST),
    "einsum of channels": lambda x: torch.einsum("nchw,kc->nkhw", x, make_matrix(x)),
    "einsum of two images": lambda x: torch.einsum("nchw,nchw->nhw", x, 2 * x),
    "einsum over space": lambda x: torch.einsum("nchw,nkhw->nck", x, 2 * x),
    "einsum over all": lambda x: torch.einsum("nchw,nchw->", x, 2 * x),
    "where a scalar": lambda x: torch.where(x > 0, x, 1.0),
    "masked": lambda x: x.masked_fill(x > 1, 0.5),
}

CLOSE = {
    "glu": lambda x: F.glu(x, 1),
    "logsumexp over channels": lambda x: x.logsumexp(1),
    "cosine similarity": lambda x: F.cosine_similarity(x + 0.5, x.flip(1) + 0.5),
    "normalised channels": lambda x: F.normalize(x + 0.5),
    "local response norm": lambda x: F.local_response_norm(x, 3),
    "variance over channels": lambda x: x.var(1),
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*SHAPES, *ALONG])
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_channels_and_batch(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check({**SHAPES, **ALONG}[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
def test_sums_whose_axes_are_permuted_in_memory(grid: Grid):
    """`einsum` computes the result, and its gradient arrives, in another order of axes."""
    check(lambda x: torch.einsum("bkhw,bchw->bck", 2 * x[:, :2], x), make_whole_numbers(2, 4, 6, 8), grid)
    check(
        lambda x: torch.einsum("bkhw,bchw->bck", 2 * x[:, :2], x).mT.tanh(),
        make_whole_numbers(2, 4, 6, 8) / 64,
        grid,
        same=close,
    )


@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
@pytest.mark.parametrize("name", BROADCAST)
def test_several_values_that_are_broadcast(name: str, grid: Grid):
    """Of other types and numbers of pixels; those that have the common shape already are not among them.

    An exchange follows, which carries a gradient only if one is known to come.
    """
    check(lambda x: (y := BROADCAST[name](x)) + y.flip(3), make_whole_numbers(2, 4, 6, 8), grid)


def find_largest_channel(x: Tensor) -> Tensor:
    """(N, 1, 1, 1): the channel with the largest sum."""
    return x.sum((2, 3), keepdim=True).argmax(1, keepdim=True)


FIRST_PIXELS = {
    "scatter of a number": lambda x: x.scatter(1, find_largest_channel(x), 9.0),
    "scatter of values": lambda x: x.scatter(1, find_largest_channel(x), x.detach() * 2),
    "scatter_add": lambda x: x.scatter_add(1, find_largest_channel(x), x.detach() * 2),
    "scatter by one row": lambda x: x.scatter(1, x[:, :, :1].argmax(1, keepdim=True), 9.0),
    "gather": lambda x: x.gather(1, find_largest_channel(x)).flatten(1),
    "gather of one row": lambda x: x.gather(1, x[:, :, :1].argmax(1, keepdim=True)).flatten(1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FIRST_PIXELS)
@pytest.mark.parametrize("grid", [Grid(1, 2), Grid(2, 2)])
def test_an_index_of_the_first_pixels_is_not_broadcast(name: str, grid: Grid):
    check(FIRST_PIXELS[name], make_whole_numbers(2, 4, 6, 8), grid)


def test_an_index_of_the_first_pixels_of_a_large_image_is_refused():
    with pytest.raises(TraceError, match=r"aten\.scatter\.value .* does not broadcast .* \(1, 1, 1, 1\): expand it"):
        check(FIRST_PIXELS["scatter of a number"], make_whole_numbers(1, 2, 150, 140), Grid(2, 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CLOSE)
@set_trials(5)
@given(case=generate_images_on_grids(), seed=seeds)
def test_functions_of_channels(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(CLOSE[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid, same=close)


class Mixer(nn.Module):
    """A perceptron on the channels of each pixel, as ConvNeXt has it (Liu et al., 2022, arXiv:2201.03545)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(x.permute(LAST)))).permute(FIRST)


@set_trials(12)
@given(case=generate_images_on_grids(), seed=seeds)
def test_a_perceptron_on_each_pixel(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(Mixer(), seed), make_whole_numbers(2, 4, *size_px, seed=seed), grid)


class Places(nn.Module):
    """What depends on the place: a learned code, one for each row, and the columns' numbers as a channel."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.empty(2, height, width))
        self.row = nn.Parameter(torch.empty(height, 1))
        self.register_buffer("mask", make_whole_numbers(1, 1, height, width, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        cols = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device).expand(x.shape[0], 1, *x.shape[2:])
        return torch.cat([(x + self.code) * self.mask, x * self.row, cols, torch.stack([x, 0 * x + self.code])[0]], 1)


@set_trials(20)
@given(case=generate_images_on_grids(), seed=seeds)
def test_each_tile_takes_its_own_part_of_what_depends_on_the_place(case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(with_whole_weights(Places(*size_px), seed), make_whole_numbers(3, 2, *size_px, seed=seed), grid)


class Scaled(nn.Module):
    """A parameter without pixels, cast to the type of a tiled value, and that to the type of a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        low = x[..., ::2].float()
        return self.gamma.type_as(low) * x.type_as(low).type_as(self.gamma) + torch.ops.aten.to.other(self.gamma, low)


@pytest.mark.parametrize("shape", [(), (4, 1, 1), (1, 4, 1, 1)])
def test_casts_to_the_type_of_another_value(shape: tuple[int, ...]):
    check(with_whole_weights(Scaled(*shape)), make_whole_numbers(2, 4, 6, 8), Grid(2, 2))
