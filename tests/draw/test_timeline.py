"""The chart of a step holds every event where and as long as it was, on its rank's row."""

from __future__ import annotations

import random
import time

import pytest
import torch
from legible import read, unreadable
from matplotlib.patches import PathPatch
from torch import nn

from engines.comm.loopback import LoopbackWorld, run_ranks
from engines.errors import PlanError
from engines.plan import Plan
from engines.program.timeline import Event, Timeline
from engines.training import RankTraining, prepare
from mpi4dl_nb.draw.figure import alt_text
from mpi4dl_nb.draw.timeline import BACKWARD, FORWARD, LOOKS, OTHER, look, show_timeline

PLAN = Plan(split_size=2, spatial_size=1, slice_method="1x2")


def event(rank: int, kind: str, start_s: float, end_s: float, phase: str = "forward") -> Event:
    return Event(rank, f"{kind}1", kind, phase, 0, start_s, end_s, 0)


TWO_RANKS = Timeline(
    (
        event(0, "compute", 5.0, 5.5),
        event(0, "halo", 5.5, 5.6),
        event(0, "compute", 5.7, 6.0, "backward"),
        event(1, "stage", 5.0, 5.8),
        event(1, "update", 5.8, 6.0, "update"),
    )
)


@pytest.fixture(scope="module")
def measured() -> Timeline:
    """One real step on two tiles and a second stage."""
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    recipe = prepare(model, PLAN, (2, 3, 16, 16))
    inputs = {"images": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])}

    def step(world: LoopbackWorld) -> tuple[Event, ...]:
        training = RankTraining(world, recipe)
        return training.step(training.cut(inputs)).events

    return Timeline.of(run_ranks(PLAN.ranks, step))


def bars(figure) -> dict[str, list[tuple[float, float, int, bool]]]:
    """What is drawn by the legend's names: start and length in ms, row, and whether in its lower half."""
    drawn = {}
    for patch in figure.axes[0].patches:
        assert isinstance(patch, PathPatch)
        for corners in patch.get_path().vertices.reshape(-1, 5, 2):
            (x0, y0), (x1, y1) = corners.min(0), corners.max(0)
            row = round((y0 + y1) / 2)
            place = (pytest.approx(x0, abs=1e-6), pytest.approx(x1 - x0, abs=1e-6), row, (y0 + y1) / 2 > row)
            drawn.setdefault(patch.get_label(), []).append(place)
    return drawn


def test_each_event_is_drawn_where_and_as_long_as_it_was():
    assert bars(show_timeline(TWO_RANKS)) == {
        "compute, forward": [(0, 500, 0, False)],
        "compute, backward": [(700, 300, 0, False)],
        "halo": [(500, 100, 0, True)],
        "stage transfer": [(0, 800, 1, True)],
        "update of the weights": [(800, 200, 1, False)],
    }


def test_every_event_of_a_real_step_is_drawn(measured):
    drawn = bars(show_timeline(measured, PLAN))
    assert sum(len(places) for places in drawn.values()) == len(measured.events)
    for each in measured.events:
        place = (each.start_s - measured.start_s) * 1e3, (each.end_s - each.start_s) * 1e3, each.rank
        assert place in [bar[:3] for bar in drawn[look(each).name]]
    assert set(drawn) == {"compute, forward", "compute, backward", "halo", "stage transfer", "all-reduce",
                          "update of the weights"}  # fmt: skip


def test_the_shares_stand_beside_the_rows():
    shown = read(show_timeline(TWO_RANKS))
    assert "compute 80% communicate and wait 10%" in shown
    assert "compute 20% communicate and wait 80%" in shown


def test_a_plan_names_the_roles(measured):
    shown = read(show_timeline(measured, PLAN))
    assert all(role in shown for role in ("rank 1 stage 0, tile 1", "rank 2 stage 1, tile 0"))
    assert f"One training step: {measured.seconds * 1e3:.4g} ms on 3 ranks" in shown


def test_the_alt_text_has_the_numbers(measured):
    assert alt_text(show_timeline(TWO_RANKS)) == (
        "One training step: 1000 ms on 2 ranks. rank 0: compute 80%, communicate and wait 10%; "
        "rank 1: compute 20%, communicate and wait 80%."
    )
    work = measured.share(2, "compute") + measured.share(2, "update")
    assert f"rank 2, stage 1, tile 0: compute {work:.0%}" in alt_text(show_timeline(measured, PLAN))


def test_kinds_differ_in_colour_and_in_hatch():
    looks = (FORWARD, BACKWARD, *LOOKS.values(), OTHER)
    assert len({each.colour for each in looks}) == len({each.hatch for each in looks}) == len(looks)


def test_a_kind_of_tomorrow_is_drawn_too():
    assert look(event(0, "gather", 0, 1)) is OTHER


def many(ranks: int, each: int) -> Timeline:
    draw, events = random.Random(0), []
    for rank in range(ranks):
        now_s = 0.0
        for _ in range(each):
            length_s = draw.random() * 1e-3
            events.append(event(rank, draw.choice(["compute", "halo", "all-reduce"]), now_s, now_s + length_s))
            now_s += length_s
    return Timeline(tuple(events))


@pytest.mark.parametrize("ranks", [1, 2, 12, 13, 40])
def test_no_text_lies_on_another(ranks):
    assert unreadable(show_timeline(many(ranks, 5), Plan(split_size=1, slice_method=f"1x{ranks}"))) == []


def test_a_thousand_events_per_rank_are_drawn_at_once():
    """As one path each, 51,200 hatched bars took four minutes; as one path per rank and kind, seconds."""
    timeline = many(8, 1000)
    start_s = time.perf_counter()
    figure = show_timeline(timeline)
    figure.png()
    assert len(figure.axes[0].patches) == 8 * 3
    assert time.perf_counter() - start_s < 10


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(PlanError, match="holds no event"):
        show_timeline(Timeline(()))
    with pytest.raises(PlanError, match="ranks 0, 1, but the plan needs 3 ranks"):
        show_timeline(TWO_RANKS, PLAN)
