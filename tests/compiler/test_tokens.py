"""Rows and columns that are merged into tokens, windows or groups, and what networks compute with them on tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from tests.compiler.drawn import Calls, Pair, check, generate_images_on_grids, seeds
from tests.compiler.test_whole import make_compiler
from tests.exact import (
    assert_exact,
    close,
    finish,
    make_tiled_plan,
    make_whole_numbers,
    prepare_worker,
    with_whole_weights,
)
from tests.sampling import set_trials

WINDOW = 4


def to_tokens(x: Tensor) -> Tensor:
    """(N, C, H, W) as (N, H * W, C)."""
    return x.flatten(2).transpose(1, 2)


def to_image(tokens: Tensor, like: Tensor) -> Tensor:
    return tokens.transpose(1, 2).reshape(like.shape[0], -1, *like.shape[2:])


def make_matrix(x: Tensor) -> Tensor:
    """(3, 4), made of what a graph can make."""
    return torch.arange(12.0, dtype=x.dtype, device=x.device).reshape(3, 4) - 5


def make_rows(x: Tensor) -> Tensor:
    """(3, C * H * W), made of what a graph can make."""
    return torch.arange(3.0 * x[0].numel(), dtype=x.dtype, device=x.device).remainder(5).reshape(3, -1) - 2


def to_windows(x: Tensor) -> Tensor:
    """(N, C, H, W) as (windows, 4 * 4, C)."""
    n, c, h, w = x.shape
    tiles = x.reshape(n, c, h // WINDOW, WINDOW, w // WINDOW, WINDOW)
    return tiles.permute(0, 2, 4, 3, 5, 1).reshape(-1, WINDOW * WINDOW, c)


def from_windows(windows: Tensor, like: Tensor) -> Tensor:
    n, c, h, w = like.shape
    tiles = windows.reshape(n, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c)
    return tiles.permute(0, 5, 1, 3, 2, 4).reshape(n, c, h, w)


def space_to_depth(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.view(n, c, h // WINDOW, WINDOW, w // WINDOW, WINDOW)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * WINDOW * WINDOW, h // WINDOW, w // WINDOW)


def depth_to_space(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // 4, 2 * h, 2 * w)


def attend(x: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(to_tokens(x), keys, 2 * keys, mask)


def make_mask(x: Tensor) -> Tensor:
    """(tokens, tokens): each attends to those at or before its place, and to the first three."""
    place = torch.arange(x.shape[2] * x.shape[3], device=x.device)
    return (place[:, None] >= place) | (place < 3)


EXACT = {
    "tokens": lambda x: 2 * x.flatten(2),
    "tokens, channels last": lambda x: 2 * to_tokens(x),
    "tokens, there and back": lambda x: to_image(2 * to_tokens(x), x),
    "tokens of all images": lambda x: to_tokens(x).reshape(-1, 4).relu(),
    "everything": lambda x: 2 * x.flatten(),
    "linear over all of each image": lambda x: F.linear(x.flatten(1), make_rows(x), make_matrix(x)[0, :3]),
    "linear over all pixels of each channel": lambda x: F.linear(x.flatten(2), make_rows(x[:, :1])),
    "all of each image": lambda x: x.flatten(1) * 3,
    "a matrix for each token": lambda x: F.linear(to_tokens(x), make_matrix(x)),
    "a matrix product for each token": lambda x: to_tokens(x) @ make_matrix(x).T,
    "a matrix over channels first": lambda x: make_matrix(x) @ x.flatten(2),
    "a stack of matrices": lambda x: make_matrix(x)[None].expand(2, 3, 4).bmm(x.flatten(2)),
    "a matrix over channels last": lambda x: (x.permute(0, 2, 3, 1) @ make_matrix(x).T).permute(0, 3, 1, 2),
    "linear over channels last": lambda x: F.linear(x.permute(0, 2, 3, 1), make_matrix(x)).permute(0, 3, 1, 2),
    "channels by channels": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "channels by channels, in a stack": lambda x: x.flatten(2).bmm(to_tokens(2 * x)),
    "einsum over tokens": lambda x: torch.einsum("nct,ndt->ncd", x.flatten(2), 2 * x.flatten(2)),
    "einsum of tokens": lambda x: torch.einsum("nct,kc->ntk", x.flatten(2), make_matrix(x)),
    "einsum of a value with itself": lambda x: torch.einsum("nik,njk->nij", to_tokens(x), to_tokens(x)),
    "einsum of one value in two ways": lambda x: torch.einsum("ncij,nckj->ncik", x, x),
    "einsum over space": lambda x: torch.einsum("nchw,nkhw->nck", x, 2 * x),
    "sum over tokens": lambda x: x.flatten(2).sum(-1),
    "sum over tokens, of each channel": lambda x: x.flatten(2).sum(-1, keepdim=True) + x.flatten(2),
    "largest token": lambda x: to_tokens(x).amax(1),
    "sum over channels of tokens": lambda x: to_tokens(x).sum(-1),
    "a table for each token": lambda x: to_tokens(x) + torch.arange(to_tokens(x).shape[1], device=x.device)[:, None],
    "stacked tokens": lambda x: torch.stack([to_tokens(x), 2 * to_tokens(x)], 1).sum(1),
    "joined channels of tokens": lambda x: torch.cat([to_tokens(x), to_tokens(2 * x)], -1),
    "parts of channels of tokens": lambda x: torch.mul(*to_tokens(x).chunk(2, -1)),
    "some channels of tokens": lambda x: to_tokens(x)[..., 1:3] + to_tokens(x)[..., :1],
    "one channel of tokens": lambda x: to_tokens(x)[..., 2] * 2,
    "picked channels of tokens": lambda x: to_tokens(x).index_select(-1, torch.tensor([2, 0])),
    "expanded tokens": lambda x: to_tokens(x)[:, None].expand(-1, 3, -1, -1).sum(1),
    "one number for each token": lambda x: to_tokens(x) * to_tokens(x).sum(-1, keepdim=True).expand(-1, -1, 4),
    "repeated tokens, gathered": lambda x: x.flatten(2).flip(-1) * 2,
    "a class token, gathered": lambda x: torch.cat([x.flatten(2).sum(-1, keepdim=True), x.flatten(2)], -1),
    "heads": lambda x: (2 * to_tokens(x).unflatten(-1, (2, 2)).transpose(1, 2)).transpose(1, 2).flatten(2),
    "turned": lambda x: x.transpose(2, 3).flatten(2).mul(2).unflatten(2, (x.shape[3], x.shape[2])).transpose(2, 3),
    "mixed, gathered": lambda x: (2 * x).reshape(x.shape[0], -1, x.shape[3], x.shape[2]),
}

IN_WINDOWS = {
    "windows": lambda x: 2 * to_windows(x),
    "windows, there and back": lambda x: from_windows(2 * to_windows(x), x),
    "sum of each window": lambda x: from_windows(to_windows(x) + to_windows(x).sum(1, keepdim=True), x),
    "product in each window": lambda x: from_windows(to_windows(x) @ to_windows(x).transpose(1, 2) @ to_windows(x), x),
    "space to depth": space_to_depth,
    "space to depth to space": lambda x: depth_to_space(depth_to_space(2 * space_to_depth(x))),
    "depth to space": lambda x: depth_to_space(2 * x),
}

CLOSE = {
    "softmax over tokens": lambda x: x.flatten(2).softmax(-1) * x.flatten(2),
    "softmax over tokens and channels": lambda x: to_tokens(x).flatten(1).softmax(-1),
    "softmax over channels of tokens": lambda x: to_tokens(x).softmax(-1),
    "softmax in another type": lambda x: x.float().flatten(2).softmax(-1, dtype=torch.float64) + x.flatten(2),
    "softmax over rows, gathered": lambda x: x.softmax(-2) * x,
    "log softmax over tokens": lambda x: x.flatten(2).log_softmax(-1),
    "log softmax of channels": lambda x: x.log_softmax(1),
    "means of runs of tokens, gathered or not": lambda x: F.avg_pool1d(x.flatten(2), 2),
    "mean of all tokens": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1) * x.flatten(2),
    "means of runs of channels": lambda x: F.avg_pool1d(to_tokens(x), 2),
    "means of windows of tokens, gathered": lambda x: F.avg_pool1d(x.flatten(2), 2, 1),
    "mean over tokens": lambda x: to_tokens(x).mean(1),
    "standard deviation of groups": lambda x: x.reshape(2, 2, -1) / (1 + x.reshape(2, 2, -1).std(-1, keepdim=True)),
    "normalised over tokens": lambda x: F.normalize(x.flatten(2) + 0.5, dim=-1),
    "log-sum-exp of tokens": lambda x: x.flatten(2).logsumexp(-1),
    "layer norm of tokens": lambda x: F.layer_norm(to_tokens(x), (4,)),
    "layer norm over tokens": lambda x: F.layer_norm(x.flatten(2), x.flatten(2).shape[1:]),
    "group norm of tokens": lambda x: F.group_norm(x.flatten(2), 2),
    "instance norm of tokens": lambda x: F.instance_norm(x.flatten(2) + 0.25),
    "global context": lambda x: x.flatten(2) @ x[:, :1].flatten(2).softmax(-1).transpose(1, 2),
    "attention": lambda x: attend(x, to_tokens(x)),
    "attention to fewer keys": lambda x: attend(x, to_tokens(F.max_pool2d(x, (1, 2), ceil_mode=True))),
    "attention with a mask": lambda x: attend(x, to_tokens(x), make_mask(x)),
    "attention by hand": lambda x: (to_tokens(x) @ to_tokens(x).transpose(1, 2)).softmax(-1) @ to_tokens(2 * x),
    "causal attention, gathered": lambda x: F.scaled_dot_product_attention(*[to_tokens(x)] * 3, is_causal=True),
    "attention to all of a few": lambda x: attend(x, x.amax((2, 3))[:, None]),
    "channel attention": lambda x: (F.normalize(x.flatten(2) + 0.5, dim=-1) @ to_tokens(x)).softmax(-1) @ x.flatten(2),
}


def compute_dice(y: Tensor, t: Tensor) -> Tensor:
    y, t = y.sigmoid().flatten(2), t.flatten(2)
    return 1 - (2 * (y * t).sum(-1) / (y.square() + 1).sum(-1)).mean()


def label_tokens(t: Tensor) -> Tensor:
    return t.argmax(1).flatten(1)


LOSSES = {
    "dice": compute_dice,
    "each image": lambda y, t: (y.view(y.shape[0], -1) - t.view(t.shape[0], -1)).square().mean(1).sum(),
    "binary": lambda y, t: F.binary_cross_entropy_with_logits(y.flatten(2), (t.flatten(2) > 0).to(y.dtype)),
    "classes of tokens": lambda y, t: F.cross_entropy(y.flatten(2), label_tokens(t)),
    "classes of all pixels": lambda y, t: F.cross_entropy(to_tokens(y).reshape(-1, 4), label_tokens(t).reshape(-1)),
    "probabilities": lambda y, t: F.cross_entropy(y.flatten(2), t.flatten(2).softmax(1), label_smoothing=0.1),
    "summed": lambda y, t: F.nll_loss(y.log_softmax(1).flatten(2), label_tokens(t), reduction="sum"),
    "each pixel": lambda y, t: F.cross_entropy(y.flatten(2), label_tokens(t), reduction="none").square().mean(),
}


@st.composite
def generate_windows_on_grids(draw: st.DrawFn) -> tuple[Grid, Pair]:
    """An image of whole windows; tiles need not be."""
    rows, cols = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    grid = Grid(draw(st.integers(1, min(rows, 3))), draw(st.integers(1, min(cols, 3))))
    return grid, (WINDOW * rows, WINDOW * cols)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", EXACT)
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_tokens_are_exact_to_the_bit(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(EXACT[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", IN_WINDOWS)
@set_trials(8)
@given(case=generate_windows_on_grids(), seed=seeds)
def test_windows_are_exact_to_the_bit(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(IN_WINDOWS[name], make_whole_numbers(2, 4, *size_px, seed=seed), grid)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CLOSE)
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_norms_and_products_of_tokens(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    check(CLOSE[name], make_whole_numbers(2, 4, max(2, size_px[0]), max(2, size_px[1]), seed=seed), grid, same=close)


class Behind(nn.Module):
    """A function of an image behind two convolutions, whose halos may be fetched at once."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.convolutions = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.convolutions(x))


@pytest.mark.parametrize("name", ["mean of all tokens", "means of runs of tokens, gathered or not"])
def test_tokens_are_averaged_behind_fused_halos(name: str):
    check_behind_fused_halos(CLOSE[name], "2x1")


@pytest.mark.nightly
@pytest.mark.parametrize("grid", ["2x1", "2x2"])
@pytest.mark.parametrize("name", [*EXACT, *IN_WINDOWS, *CLOSE])
def test_tokens_behind_fused_halos(name: str, grid: str):
    check_behind_fused_halos((EXACT | IN_WINDOWS | CLOSE)[name], grid)


def check_behind_fused_halos(function: Callable[[Tensor], Tensor], grid: str) -> None:
    torch.manual_seed(0)
    assert_exact(Behind(function).double(), torch.randn(2, 4, 8, 12).double(), make_tiled_plan(grid, 2), same=close)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LOSSES)
@set_trials(6)
@given(case=generate_images_on_grids(), seed=seeds)
def test_losses_of_tokens(name: str, case: tuple[Grid, Pair], seed: int):
    grid, size_px = case
    images, labels = (make_whole_numbers(2, 4, *size_px, seed=seed + number) for number in range(2))
    check(lambda x: x * 0.5, images, grid, labels=labels, loss=LOSSES[name], same=close)


class Segformer(nn.Module):
    """A decoder of tokens between convolutions, with dropout (Xie et al., 2021, arXiv:2105.15203)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.norm, self.linear, self.dropout = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(to_image(self.dropout(self.linear(self.norm(to_tokens(x)))), x))


class WindowAttention(nn.Module):
    """Attention within shifted windows, with a bias (Liu et al., 2021, arXiv:2103.14030)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(WINDOW * WINDOW, WINDOW * WINDOW))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).roll((1, 2), (2, 3))
        t = to_windows(x)
        return self.head(from_windows(F.scaled_dot_product_attention(t, t, t, self.bias), x).roll((-1, -2), (2, 3)))


class GlobalContext(nn.Module):
    """One sum over all pixels, weighted by a softmax over them (Cao et al., 2019, arXiv:1904.11492)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.key, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 1, 1),
            nn.Conv2d(4, 2, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weights = self.key(x).flatten(2).softmax(-1)
        return self.head(x + (x.flatten(2) @ weights.transpose(1, 2)).unsqueeze(-1))


NETWORKS = {
    "tokens": Segformer,
    "windows": WindowAttention,
    "dropout": lambda: Segformer(0.4),
    "context": GlobalContext,
}


@pytest.mark.parametrize("fused", [0, 2])
@pytest.mark.parametrize("grid", ["1x1", "1x3", "2x2", "3x2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_tokens(name: str, grid: str, fused: int):
    torch.manual_seed(1)
    model = NETWORKS[name]().double()
    assert_exact(model, make_whole_numbers(2, 3, 12, 20), make_tiled_plan(grid, fused), same=close)


class ChannelsLast(nn.Module):
    """A shift of (N, H, W, C) between two convolutions, as Swin shifts its windows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).permute(0, 2, 3, 1).roll((1, 2), (1, 2)).permute(0, 3, 1, 2))


def test_a_window_is_stored_as_the_value_that_it_is_of():
    """Images with their channels last; a value whose channels are last already, in its own order."""
    model, images = ChannelsLast().double(), torch.randn(2, 3, 12, 20).double()
    plan = make_tiled_plan("2x2")
    worker = run_ranks(4, lambda world: finish(prepare_worker(model, images, torch.zeros(2, 2, 12, 20), plan)(world)))[
        3
    ]
    windows = {item.axes: item for item in worker.program.forward if isinstance(item, Exchange) and item.window}
    assert windows.keys() == {(-2, -1), (-3, -2)}
    for axes, item in windows.items():
        part = worker.runtime.exchange_runners[item.key]._make_part(0)
        channels = {(-2, -1): 1, (-3, -2): 3}[axes]
        assert (part.shape[channels], part.stride(channels), item.is_image) == (part.shape[channels], 1, channels == 1)
    assert_exact(model, images, plan, same=close)


def test_what_works_on_each_token_sends_nothing():
    program = make_compiler(Segformer(), (1, 3, 512, 768)).compile_rank(0)
    exchanges = [item.name for item in program.forward if isinstance(item, Exchange)]
    assert len(exchanges) == 2  # the halos of the two convolutions


def test_tokens_that_are_mixed_are_refused_for_a_large_image():
    with pytest.raises(TraceError, match=r"aten.flip.*are merged; beyond 16384 pixels.*write a rule"):
        make_compiler(Calls(lambda x: x.flatten(2).flip(-1)), (1, 2, 129, 128))
    with pytest.raises(TraceError, match=r"reads all 129 x 128 pixels of transpose_2; beyond 16384 pixels"):
        make_compiler(Calls(lambda x: to_tokens(x) @ to_tokens(x).transpose(1, 2)), (1, 2, 129, 128))


PLANS = {
    "tiles, then one rank": Plan(split_size=2, spatial_size=1, slice_method="2x2", precision="float64"),
    "tiles, then other tiles": Plan(split_size=2, spatial_size=2, slice_method=("1x3", "2x2"), precision="float64"),
    "tiles, then a share of the images": Plan(
        split_size=2, spatial_size=1, slice_method="1x2", local_dp=2, precision="float64"
    ),
    "layers": Plan(split_size=3, spatial_size=0, precision="float64"),
}


class Layers(nn.Module):
    """Tokens cross the border of each two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(to_tokens(self.stem(x))).relu())


@pytest.mark.parametrize("name", PLANS)
def test_tokens_pass_from_stage_to_stage(name: str):
    plan = PLANS[name]
    balances = [(1, 2), (2, 1)] if plan.split_size == 2 else [(1, 1, 1)]
    for balance in balances:
        assert_exact(
            with_whole_weights(Layers()), make_whole_numbers(2, 3, 6, 7), replace(plan, balance=balance), same=close
        )
