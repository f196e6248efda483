"""Class tokens and registers, which lie on the first rank beside its pixels: between stages, and out of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.compiler import local_rules
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.train.recipe import prepare
from tests.compiler.test_tokens import to_tokens
from tests.exact import assert_exact, close, make_tiled_plan, make_whole_numbers


@pytest.fixture(autouse=True, scope="module")
def _few_pixels() -> Iterator[None]:
    """Nothing may be gathered, as of a large image."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_rules, "WHOLE_PX", 3)
        yield


class Registers(nn.Module):
    """Three registers before the pixels, in two layers; the answer has them, too."""

    def __init__(self, axes: int = 2) -> None:
        super().__init__()
        self.stem, self.tokens = (
            (nn.Conv1d, nn.Conv2d)[axes - 1](3, 4, 3, padding=1),
            nn.Parameter(torch.randn(1, 3, 4)),
        )
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        pixels = to_tokens(self.stem(x))
        t = torch.cat([self.tokens.expand(len(x), -1, -1), pixels], 1)
        t = t + torch.arange(t.shape[1], dtype=x.dtype, device=x.device)[:, None] / 8
        t = F.layer_norm(self.one(t), (4,))
        return self.two(t + F.scaled_dot_product_attention(t, t, t) + t[:, :1])


def weigh(y: Tensor, _labels: Tensor) -> Tensor:
    """Return a sum in which each position has a weight of its own."""
    return (y * torch.arange(y.shape[1], dtype=y.dtype, device=y.device)[:, None]).sum()


PLANS = {
    "tiles, then one rank": Plan(split_size=2, slice_method="2x2"),
    "tiles, then other tiles": Plan(split_size=2, spatial_size=2, slice_method=("1x3", "2x2")),
    "tiles, then the same tiles": Plan(split_size=2, spatial_size=2, slice_method="2x1"),
    "tiles, then a share of the images": Plan(split_size=2, slice_method="1x2", local_dp=2),
    "layers": Plan(split_size=3, spatial_size=0),
}


@pytest.mark.parametrize("name", PLANS)
def test_class_tokens_pass_from_stage_to_stage(name: str):
    torch.manual_seed(1)
    model, plan = Registers().double(), replace(PLANS[name], precision="float64")
    for balance in [(2, 2), (3, 1)] if plan.split_size == 2 else [(2, 1, 1)]:
        assert_exact(model, make_whole_numbers(2, 3, 6, 7), replace(plan, balance=balance), loss=weigh, same=close)


def test_only_the_first_ranks_send_and_receive_them():
    plan = replace(PLANS["tiles, then other tiles"], balance=(2, 2))
    programs = prepare(Registers(), plan, (2, 3, 6, 7), weigh).programs
    of_tokens = [
        program.rank
        for program in programs
        for item in program.forward
        if isinstance(item, Exchange) and item.purpose == "stage" and item.shape == (2, 3, 4)
    ]
    assert of_tokens == [0, 3]


@pytest.mark.parametrize("grid", ["1x1", "2x2", "1x3"])
@pytest.mark.parametrize("fused", [0, 2])
def test_class_tokens_in_the_answer(grid: str, fused: int):
    torch.manual_seed(1)
    assert_exact(
        Registers().double(), make_whole_numbers(2, 3, 6, 7), make_tiled_plan(grid, fused), loss=weigh, same=close
    )


def test_class_tokens_of_signals():
    torch.manual_seed(1)
    assert_exact(Registers(axes=1).double(), make_whole_numbers(2, 3, 11), make_tiled_plan("3"), loss=weigh, same=close)


@pytest.mark.parametrize("name", [None, *PLANS])
def test_tokens_are_trained_and_nothing_else(name: str | None):
    """Every rank's result has a gradient, though only the first one has tokens (Jia et al., 2022, arXiv:2203.12119)."""
    torch.manual_seed(1)
    model = Registers().double().requires_grad_(requires_grad=False)
    model.tokens.requires_grad_()
    plan = make_tiled_plan("2x2") if name is None else replace(PLANS[name], precision="float64")
    assert_exact(model, make_whole_numbers(2, 3, 6, 7), plan, loss=weigh, same=close)
