"""The chart of a step holds every event where and as long as it was, on its rank's row."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from threading import Barrier

import pytest
import torch
from legible import find_unreadable, read
from matplotlib.patches import PathPatch
from torch import nn

from mpi4dl_nb.draw.timeline import BACKWARD, FORWARD, LOOKS, OTHER, WAIT, WEIGHTS, get_style, show_timeline
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.step_report import StepReport, build_timeline
from mpi4dl_nb.engines.train.training import RankTraining

PLAN = Plan(split_size=2, spatial_size=1, slice_method="1x2")
TILES = Plan(split_size=1, slice_method="1x2")


def make_event(
    rank: int, kind: str, start_s: float, end_s: float, phase: str = "forward", wait_s: float = 0.0, number: int = 0
) -> TimelineEvent:
    return TimelineEvent(rank, f"{kind}1", kind, phase, number, start_s, end_s, 0, wait_s)


TWO_RANKS = Timeline(
    (
        make_event(0, "compute", 5.0, 5.5),
        make_event(0, "halo", 5.5, 5.6),
        make_event(0, "compute", 5.7, 6.0, "backward"),
        make_event(1, "stage", 5.0, 5.8),
        make_event(1, "update", 5.8, 6.0, "update"),
    )
)


@pytest.fixture(scope="module")
def measured() -> Timeline:
    """One real step on two tiles and a second stage."""
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    recipe = prepare(model, PLAN, (2, 3, 16, 16))
    inputs = {"images": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])}

    def step(world: LoopbackWorld) -> tuple[TimelineEvent, ...]:
        training = RankTraining(world, recipe)
        return training.step(training.cut(inputs)).events

    return Timeline.of(run_ranks(PLAN.ranks, step))


PIPELINE = Timeline(
    (
        make_event(0, "compute", 1.0, 1.3),
        make_event(0, "stage", 1.3, 1.7, "backward", 0.35),
        make_event(0, "compute", 1.7, 2.0, "backward"),
        make_event(1, "stage", 1.0, 1.35, wait_s=0.3),
        make_event(1, "compute", 1.35, 1.5),
        make_event(1, "compute", 1.5, 1.65, "backward"),
        make_event(1, "stage", 1.65, 1.7, "backward"),
    )
)


def read_bars(figure, chart: int = 0) -> dict[str, list[tuple[float, float, int, bool]]]:
    """What is drawn by the legend's names: start and length in ms, row, and whether in its lower half."""
    drawn = {}
    for patch in figure.axes[chart].patches:
        assert isinstance(patch, PathPatch)
        for corners in patch.get_path().vertices.reshape(-1, 5, 2):
            (x0, y0), (x1, y1) = corners.min(0), corners.max(0)
            row = round((y0 + y1) / 2)
            place = (pytest.approx(x0, abs=1e-6), pytest.approx(x1 - x0, abs=1e-6), row, (y0 + y1) / 2 > row)
            drawn.setdefault(patch.get_label(), []).append(place)
    return drawn


def test_each_event_is_drawn_where_and_as_long_as_it_was():
    assert read_bars(show_timeline(TWO_RANKS)) == {
        "compute, forward": [(0, 500, 0, False)],
        "compute, backward": [(700, 300, 0, False)],
        "halo": [(500, 100, 0, True)],
        "stage transfer": [(0, 800, 1, True)],
        "update of the weights": [(800, 200, 1, False)],
    }


def test_every_event_of_a_real_step_is_drawn(measured):
    drawn = read_bars(show_timeline(measured, PLAN))
    waits = [each for each in measured.events if each.wait_s]
    assert sum(len(places) for places in drawn.values()) == len(measured.events) + len(waits)
    for each in measured.events:
        start_s = each.start_s - measured.start_s
        place = start_s * 1e3, (each.end_s - each.wait_s - each.start_s) * 1e3, each.rank
        assert place in [bar[:3] for bar in drawn[get_style(each).name]]
    names = "compute, forward; compute, backward; halo; stage transfer; all-reduce; update of the weights"
    assert set(drawn) - {WAIT.name} == set(names.split("; "))


def test_waiting_is_the_end_of_what_waited():
    drawn = read_bars(show_timeline(PIPELINE))
    assert drawn["stage transfer"] == [(300, 50, 0, True), (0, 50, 1, True), (650, 50, 1, True)]
    assert drawn[WAIT.name] == [(350, 350, 0, True), (50, 300, 1, True)]


def test_the_shares_stand_beside_the_rows():
    shown = read(show_timeline(TWO_RANKS))
    assert "compute 80% communicate 10%, wait 0%" in shown
    assert "compute 20% communicate 80%, wait 0%" in shown
    assert "compute 60% communicate 5%, wait 35%" in read(show_timeline(PIPELINE))


def test_bubbles_are_marked_with_their_share_and_work_with_its_micro_batch():
    figure = show_timeline(PIPELINE)
    texts = {(text.get_text(), *(round(c, 6) for c in text.get_position())) for text in figure.axes[0].texts}
    first = {("F0", 150, -0.22), ("B0", 850, -0.22), ("waits 35%", 525, 0.22)}
    second = {("F0", 425, 0.78), ("B0", 575, 0.78), ("waits 30%", 200, 1.22), ("waits 30%", 850, 1.22)}
    assert texts == first | second
    assert find_unreadable(figure) == []


def test_a_prediction_of_some_replicas_is_shown_beside_all_ranks():
    """It simulates only those that differ from one another."""
    plan = Plan(split_size=1, spatial_size=0, data_parallel=2)
    first = Timeline(tuple(event for event in TWO_RANKS.events if event.rank == 0))
    figure = show_timeline(TWO_RANKS, plan, predicted=first)
    assert [len(axes.get_yticklabels()) for axes in figure.axes[:2]] == [2, 1]
    with pytest.raises(PlanError, match="The prediction is of ranks 1 too, but 1 ranks were measured"):
        show_timeline(first, predicted=TWO_RANKS)


def test_measured_and_predicted_have_one_axis_of_time():
    figure = show_timeline(PIPELINE, predicted=TWO_RANKS)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0, 1000)
    assert read_bars(figure, 0) == read_bars(show_timeline(PIPELINE))
    assert read_bars(figure, 1) == read_bars(show_timeline(TWO_RANKS))
    shown = read(figure)
    assert "One training step, measured: 1000 ms on 2 ranks" in shown
    faster = Timeline(
        tuple(make_event(each.rank, each.kind, each.start_s / 2, each.end_s / 2) for each in TWO_RANKS.events)
    )
    alt = show_timeline(PIPELINE, predicted=faster).alt
    assert "One training step, predicted: 500 ms (-50%) on 2 ranks." in alt
    assert alt.count("rank 1: compute") == 2
    assert find_unreadable(figure) == []


def test_a_part_of_the_step_can_be_shown():
    figure = show_timeline(PIPELINE, span_ms=(300, 700))
    assert figure.axes[0].get_xlim() == (300, 700)
    assert ("waits 35%", 525) in [(text.get_text(), round(text.get_position()[0])) for text in figure.axes[0].texts]
    with pytest.raises(PlanError, match=r"span_ms=\(5, 2\) must be"):
        show_timeline(PIPELINE, span_ms=(5, 2))
    for span in ((1,), 3, ("1", "2")):
        with pytest.raises(PlanError, match=r"span_ms=.* must be \(start, end\)"):
            show_timeline(PIPELINE, span_ms=span)


def test_a_span_after_the_end_is_refused():
    with pytest.raises(PlanError, match=r"span_ms=\(1000, 1200\) starts after the end of the step, at 1000 ms"):
        show_timeline(PIPELINE, span_ms=(1000, 1200))
    assert show_timeline(PIPELINE, span_ms=(900, 1200)).axes[0].get_xlim() == (900, 1200)


def test_a_rank_that_waits_says_so():
    """Rank 1 cannot begin before rank 0 has worked on the first micro-batch."""
    model = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    plan = Plan(split_size=2, spatial_size=0, balance=(1, 1))
    recipe = prepare(model, plan, (2, 3, 128, 128))
    inputs = {"images": torch.rand(2, 3, 128, 128), "labels": torch.tensor([0, 1])}

    both = Barrier(2)

    def step_late(training: RankTraining) -> tuple[TimelineEvent, ...]:
        images = training.cut(inputs)
        both.wait()
        time.sleep(0.2 if training.world.rank == 0 else 0)
        return training.step(images).events

    def run_steps(world: LoopbackWorld) -> list[tuple[TimelineEvent, ...]]:
        training = RankTraining(world, recipe)
        return [step_late(training) for _ in range(3)]

    for timeline in map(Timeline.of, zip(*run_ranks(2, run_steps), strict=True)):
        first = next(each for each in timeline.events if each.rank == 0 and each.kind == "compute")
        got = next(each for each in timeline.events if each.rank == 1 and each.kind == "stage")
        assert first.end_s - got.start_s > 0.025, "it never came in time to wait"
        assert got.wait_s >= (first.end_s - got.start_s) / 2
        assert all(0 <= each.wait_s <= each.end_s - each.start_s for each in timeline.events)
        assert all(each.wait_s == 0 for each in timeline.events if each.kind == "compute")


def test_a_plan_names_the_roles(measured):
    shown = read(show_timeline(measured, PLAN))
    assert all(role in shown for role in ("rank 1 stage 0, tile 1", "rank 2 stage 1, tile 0"))
    assert f"One training step: {measured.seconds * 1e3:.4g} ms on 3 ranks" in shown


def test_the_alt_text_has_the_numbers(measured):
    assert show_timeline(TWO_RANKS).alt == (
        "One training step: 1000 ms on 2 ranks. rank 0: compute 80%, communicate 10%, wait 0%; "
        "rank 1: compute 20%, communicate 80%, wait 0%."
    )
    assert f"rank 2, stage 1, tile 0: compute {measured.time_shares[2].work:.0%}" in show_timeline(measured, PLAN).alt


def test_kinds_differ_in_colour_and_in_hatch():
    looks = (FORWARD, BACKWARD, WEIGHTS, *LOOKS.values(), OTHER, WAIT)
    assert len({each.colour for each in looks}) == len({each.hatch for each in looks}) == len(looks)


def test_a_kind_of_tomorrow_is_drawn_too():
    assert get_style(make_event(0, "gather", 0, 1)) is OTHER


def make_timeline(ranks: int, each: int) -> Timeline:
    draw, events = random.Random(0), []
    for rank in range(ranks):
        now_s = 0.0
        for _ in range(each):
            length_s = draw.random() * 1e-3
            events.append(make_event(rank, draw.choice(["compute", "halo", "all-reduce"]), now_s, now_s + length_s))
            now_s += length_s
    return Timeline(tuple(events))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 12, 13, 40])
def test_no_text_lies_on_another(ranks):
    assert find_unreadable(show_timeline(make_timeline(ranks, 5), Plan(split_size=1, slice_method=f"1x{ranks}"))) == []


def test_a_thousand_events_per_rank_are_drawn_at_once():
    """As one path each, 51,200 hatched bars took four minutes; as one path per rank and kind, seconds."""
    timeline = make_timeline(8, 1000)
    start_s = time.perf_counter()
    figure = show_timeline(timeline)
    figure.to_png()
    assert len(figure.axes[0].patches) == 8 * 3
    assert time.perf_counter() - start_s < 10


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(PlanError, match="holds no event"):
        show_timeline(Timeline(()))
    with pytest.raises(PlanError, match="ranks 0, 1, but the plan needs 3 ranks"):
        show_timeline(TWO_RANKS, PLAN)


def test_a_trace_has_both_as_processes(tmp_path):
    path = PIPELINE.to_chrome(tmp_path / "trace.json", predicted=TWO_RANKS)
    rows = json.loads(path.read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "measured", 1: "predicted"}
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert threads[1, 1] == "rank 1"
    spans = [(row["pid"], row["tid"], row["cat"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"]
    assert (0, 0, "compute", 0, pytest.approx(3e5)) in spans
    assert (1, 1, "stage", 0, pytest.approx(8e5)) in spans
    assert len(spans) == len(PIPELINE.events) + len(TWO_RANKS.events)
    alone = json.loads(PIPELINE.to_chrome(tmp_path / "one.json").read_text())["traceEvents"]
    assert {row["pid"] for row in alone} == {0}


def test_the_clocks_of_hosts_are_aligned_by_the_sum_before_the_update():
    # Ranks 0 and 1 on one host, rank 2 on another one, whose clock runs `ahead_s`.
    def record(rank: int, work_s: float, ahead_s: float = 0.0) -> list[TimelineEvent]:
        agree = TimelineEvent(rank, "agree", "all-reduce", "update", 0, ahead_s + work_s, ahead_s + 2.0, 16)
        return [make_event(rank, "compute", ahead_s, ahead_s + work_s), agree]

    one_clock = Timeline.of([record(0, 1.0), record(1, 1.5), record(2, 1.9)], "aaa")
    aligned = Timeline.of([record(0, 1.0), record(1, 1.5), record(2, 1.9, ahead_s=-70_000.0)], "aab")
    assert aligned.seconds == pytest.approx(one_clock.seconds) == 2.0
    assert [each.start_s for each in aligned.events] == pytest.approx([each.start_s for each in one_clock.events])
    assert aligned.time_shares[2].work == pytest.approx(0.95)
    with pytest.raises(PlanError, match=r"2 hosts.*Complete the step first"):
        Timeline.of([record(0, 1.0), record(2, 1.9)[:1]], "ab")


def test_every_rank_reports_the_clock_of_its_events_and_the_sum_by_which_they_are_aligned():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Flatten(), nn.Linear(768, 2))
    recipe = prepare(model, TILES, (2, 3, 16, 16))
    inputs = {"images": torch.rand(2, 3, 16, 16), "labels": torch.tensor([0, 1])}

    def step(world: LoopbackWorld) -> StepReport:
        training = RankTraining(world, recipe)
        report = training.step(training.cut(inputs))
        return replace(report, clock=f"{report.clock} of rank {world.rank}")

    reports = run_ranks(2, step)
    agreed = [each.end_s for each in build_timeline(reports).events if each.name == "agree"]
    assert agreed == pytest.approx([agreed[0]] * 2, abs=1e-9, rel=0)
