"""`attention_keys`: gathered or in a ring, attention is that of one process, and a plan says which of the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import nn

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler import local_rules
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Grid
from mpi4dl_nb.engines.plan import ATTENTION_KEYS, Plan
from mpi4dl_nb.engines.program.ring import RingAttention
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.verify import verify
from tests.compiler.drawn import Pair, generate_images_on_grids, seeds
from tests.compiler.test_attention import PLANS, RINGS, TokenMixer, check_rule
from tests.exact import make_tiled_plan
from tests.sampling import set_trials


@pytest.fixture
def _no_gather() -> Iterator[None]:
    """Beyond the limit: no more than three positions may be gathered, unless a plan wants it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_rules, "WHOLE_PX", 3)
        yield


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RINGS)
@set_trials(3)
@given(case=generate_images_on_grids(), seed=seeds)
def test_a_ring_of_few_keys(name: str, case: tuple[Grid, Pair], seed: int):
    check_rule(name, case, seed, "ring")


@pytest.mark.usefixtures("_no_gather")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in RINGS if not name.startswith("by ")])
@set_trials(3)
@given(case=generate_images_on_grids(), seed=seeds)
def test_many_keys_that_are_gathered(name: str, case: tuple[Grid, Pair], seed: int):
    check_rule(name, case, seed, "gather")


@pytest.mark.parametrize("fused", [0, 2])
@pytest.mark.parametrize("name", ["rows", "columns", "columns, with dropout"])
@pytest.mark.parametrize("attention_keys", ATTENTION_KEYS)
def test_axes_with_fused_halos(attention_keys: str, name: str, fused: int):
    check_rule(name, (Grid(2, 2), (7, 9)), 0, attention_keys, fused)


@pytest.mark.parametrize("attention_keys", ATTENTION_KEYS)
@pytest.mark.parametrize("name", ["tiles", "a pipeline of tiles and one rank", "computed again"])
def test_every_value_trains(name: str, attention_keys: str):
    torch.manual_seed(1)
    model, loss = TokenMixer(), nn.CrossEntropyLoss()
    plan = replace(PLANS[name], precision="float64", attention_keys=attention_keys)
    recipe = prepare(model, plan, (4, 3, 8, 6), loss)
    results = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))
    assert [told for told in results if not told["ok"]] == []


def count_rings(attention_keys: str, model: nn.Module, image_shape: tuple[int, ...] = (1, 3, 8, 8)) -> int:
    plan = replace(make_tiled_plan("2x2"), attention_keys=attention_keys)
    compiler = Compiler(prepare(model, plan, image_shape, lambda made, labels: made.sum()).graph, plan)
    return sum(isinstance(item, RingAttention) for item in compiler.compile_rank(0).forward)


def test_the_plan_decides():
    model, causal = TokenMixer(), TokenMixer(causal=True)
    assert [count_rings(keys, model) for keys in ATTENTION_KEYS] == [0, 0, 1]
    assert [count_rings(keys, causal) for keys in ATTENTION_KEYS] == [1, 0, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_rules, "WHOLE_PX", 3)
        assert [count_rings(keys, model) for keys in ATTENTION_KEYS] == [1, 0, 1]


class Asks(nn.Module):
    """A few trained queries, or keys, beside the pixels: as in a Perceiver (Jaegle et al., 2021, arXiv:2103.03206)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, few = x.flatten(2).transpose(1, 2), self.latents.expand(len(x), -1, -1)
        mixed = nn.functional.scaled_dot_product_attention(tokens, few, few)
        return mixed.transpose(1, 2).reshape(x.shape)


@pytest.mark.usefixtures("_no_gather")
def test_keys_that_every_rank_has_do_not_travel():
    assert [count_rings(keys, Asks(), (1, 4, 8, 8)) for keys in ATTENTION_KEYS] == [0, 0, 0]


@pytest.mark.parametrize("value", ["rings", "", "Ring", None, 3, True, ["ring"], ("ring",), {"ring": 1}])
def test_other_values_are_refused(value: object):
    with pytest.raises(PlanError, match=r"^attention_keys="):
        Plan(attention_keys=value)
