"""Whatever a plan combines, ranks compute what one process computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, seed, settings
from torch import nn

from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler import trace_cache
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.train.verify import verify
from tests.combinations.drawn_plans import draw_flags, format_command
from tests.sampling import SEED

_MODELS: dict[str, nn.Module] = {}


@cache
def _trace_once(model: nn.Module, *rest: Any) -> Any:
    return trace(model, *rest)


@pytest.fixture(autouse=True)
def traces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is traced once for each size: most of the time would go there."""
    monkeypatch.setattr(trace_cache, "trace", _trace_once)
    monkeypatch.setattr(nn, "CrossEntropyLoss", cache(nn.CrossEntropyLoss))
    build = options.build_model
    monkeypatch.setattr(
        options, "build_model", lambda chosen: _MODELS.setdefault(f"{chosen.model} {chosen.seed}", build(chosen))
    )


CHECKS = list(HealthCheck)


@seed(SEED)
@settings(max_examples=4, suppress_health_check=CHECKS)
@given(flags=draw_flags(most_ranks=8))
def test_some_random_plans_are_exact_over_loopback(flags: list[str]) -> None:
    check_exact(flags)


@pytest.mark.nightly
@seed(SEED)
@settings(max_examples=100, suppress_health_check=CHECKS)
@given(flags=draw_flags(most_ranks=16))
def test_random_plans_are_exact_over_loopback(flags: list[str]) -> None:
    check_exact(flags)


def check_exact(flags: list[str]) -> None:
    chosen = options.make_parser("").parse_args(flags)
    ranks = options.make_plan(chosen).ranks
    model, recipe = options.make_recipe(chosen, ranks)
    loss = nn.CrossEntropyLoss()
    told = run_ranks(ranks, lambda world: verify(world, recipe, model, loss, chosen.seed))[0]
    event(recipe.plan.schedule)
    assert told["ok"], f"{told}\n{format_command(flags, ranks)}"
