"""The formulas of the papers are what the schedules leave idle, exactly."""

from __future__ import annotations

import pytest

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan.make_schedule import make_schedule
from mpi4dl_nb.engines.plan.schedule import Batch, compute_bubble_share

LINES = ("fill_drain", "1f1b", "interleaved", "zero_bubble")
RANKS, MICRO_BATCHES = (1, 2, 3, 4, 8), range(1, 17)


def compute_idle_share(name: str, placement, directions, micro_batches: int) -> float:
    numbers = [tuple(range(i * micro_batches, (i + 1) * micro_batches)) for i in range(len(directions))]
    return make_schedule(name, placement, [Batch(*each) for each in zip(directions, numbers, strict=True)]).idle_share


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", LINES)
def test_one_stage_on_a_rank(name, ranks):
    for micro_batches in MICRO_BATCHES:
        for directions in ((0,), (0, 0)):
            share = compute_idle_share(name, [[(rank,) for rank in range(ranks)]], directions, micro_batches)
            assert share == compute_bubble_share(name, ranks, micro_batches)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("per_rank", [2, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", LINES)
def test_several_stages_on_a_rank(name, ranks, per_rank):
    for micro_batches in MICRO_BATCHES:
        stages = [(stage % ranks,) for stage in range(ranks * per_rank)]
        share = compute_idle_share(name, [stages], (0,), micro_batches)
        formula = compute_bubble_share(name, len(stages), micro_batches, per_rank)
        assert share == formula if micro_batches % ranks == 0 else share >= formula


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_gems(ranks, count):
    line = [(rank,) for rank in range(ranks)]
    for micro_batches in MICRO_BATCHES:
        share = compute_idle_share("gems", [line, line[::-1]], [batch % 2 for batch in range(count)], micro_batches)
        assert share == compute_bubble_share("gems", ranks, micro_batches, batches=count)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_gems_idles_less_than_layer_parallelism_the_more_batches_follow(stages):
    """Li and Hoefler 2021, Chimera: (p - 1) / (p + 1/2) for many batches of one micro-batch."""
    plain = compute_bubble_share("fill_drain", stages, 1)
    shares = [compute_bubble_share("gems", stages, 1, batches=count) for count in (1, 2, 4, 10**9)]
    assert plain == shares[0] > shares[1] > shares[2] > shares[3] == pytest.approx((stages - 1) / (stages + 0.5))


def test_what_has_no_formula_is_refused():
    with pytest.raises(PlanError, match="'gpipe' is unknown"):
        compute_bubble_share("gpipe", 2, 2)
    with pytest.raises(PlanError, match="5 stages, 2 per rank"):
        compute_bubble_share("interleaved", 5, 2, stages_per_rank=2)
    with pytest.raises(PlanError, match="0 micro-batches"):
        compute_bubble_share("1f1b", 2, 0)
    with pytest.raises(PlanError, match="no formula for gems with stages_per_rank=2"):
        compute_bubble_share("gems", 4, 2, stages_per_rank=2)
