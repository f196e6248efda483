"""The idle share of schedules: the same on every rank, counted from the events of forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

from mpi4dl_nb.engines.bench import bubble
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.schedule import compute_bubble_share
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent

PLANS: dict[str, dict[str, Any]] = {
    "fill_drain": {"split_size": 3, "parts": 2},
    "1f1b": {"split_size": 2, "parts": 4},
    "interleaved": {"split_size": 4, "parts": 2, "stages_per_rank": 2},
    "zero_bubble": {"split_size": 3, "parts": 3},
    "gems": {"split_size": 3, "bidirectional": True},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", PLANS)
def test_every_schedule_is_measured_beside_its_formula(schedule: str):
    plan = Plan(schedule=schedule, spatial_size=0, **PLANS[schedule])
    lines = run_ranks(plan.ranks, lambda world: bubble.bench_bubble(world, plan, stage_s=0.001))
    assert all(line == lines[0] for line in lines)
    line, depth = lines[0], plan.split_size // plan.stages_per_rank
    formula = compute_bubble_share(schedule, plan.split_size, plan.parts, plan.stages_per_rank, plan.replica_batches)
    assert line["formula"] == round(formula, 4)
    assert 0 < line["idle"] < 1
    assert line["against_layers"] == pytest.approx((1 - line["idle"]) * depth, abs=1e-3 * depth)


def test_a_stage_sleeps_once_forward_and_twice_backward(monkeypatch: pytest.MonkeyPatch):
    slept: list[float] = []
    monkeypatch.setattr(bubble.time, "sleep", slept.append)
    plan = Plan(schedule="1f1b", split_size=2, spatial_size=0, parts=4)
    run_ranks(plan.ranks, lambda world: bubble.bench_bubble(world, plan, stage_s=0.00123))
    assert slept.count(0.00123) == 3 * plan.split_size * plan.parts * (1 + 3)  # steps, with the warm-up


def test_idle_is_what_is_neither_computed_nor_over():
    def make_event(rank: int, kind: str, start_s: float, end_s: float) -> TimelineEvent:
        return TimelineEvent(rank, "x", kind, "forward", 0, start_s, end_s, 0)

    late = TimelineEvent(0, "update", "update", "update", 0, 4, 9, 0)
    events = make_event(0, "compute", 0, 2), make_event(0, "stage", 2, 4), make_event(1, "compute", 1, 4)
    both = Timeline((*events, late))
    assert both.idle == pytest.approx(1 - (2 / 4 + 3 / 4) / 2)
