"""Widgets in cells of 320 to 1,400 px: nothing is cut, covered or higher than the window, and nothing jumps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Configurator, Plan, Slicer, Stepper, TimelineView, Training, Tuner, forecast
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.predict.machines import MACHINES
from tests.page.cells import (
    AROUND_PX,
    WIDTHS_PX,
    WINDOW_PX,
    find_faults,
    measure_height,
    measure_places,
    set_cell_width,
)
from tests.page.harness import PageHarness

PLAN = Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(2, 1))
SHAPE = 2, 3, 24, 40


def make_model() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(4, 2, 3, padding=1))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        yield cluster


@pytest.fixture
def stepper(cluster: Cluster) -> Iterator[Stepper]:
    torch.manual_seed(0)
    stepper = Stepper(Training(make_model(), PLAN, cluster, SHAPE), torch.randn(SHAPE), torch.randint(2, (2, 24, 40)))
    yield stepper
    stepper.close()


@pytest.fixture(scope="module")
def views() -> dict[str, Any]:
    """The view of each widget that needs no ranks."""
    plan = Plan(split_size=2, num_spatial_parts=4)
    configurator = Configurator(resnet20_v1(), (4, 3, 64, 64), plan=plan, machine="Summit")
    assert configurator.wait()
    with Cluster(2, backend="loopback") as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "calibrate", lambda *_, **__: MACHINES["Summit"])  # a measurement takes longer
        tuner = Tuner(resnet20_v1(), (2, 3, 64, 64), cluster, progress=False)
    return {
        "slicer": Slicer(immunohistochemistry(), plan, resnet20_v1()).view,
        "timeline": TimelineView(forecast(resnet20_v1(), plan, (4, 3, 64, 64), "Summit").timeline, plan),
        "configurator": configurator.view,
        "tuner": tuner.view,
    }


def check_widths(harness: PageHarness) -> None:
    for wide_px in WIDTHS_PX:
        set_cell_width(harness, wide_px)
        assert find_faults(harness) == [], wide_px
        assert measure_height(harness) <= WINDOW_PX[1] - AROUND_PX, wide_px


@pytest.mark.parametrize("name", ["slicer", "timeline", "configurator", "tuner"])
def test_all_can_be_read_in_a_cell_of_any_width(chromium: object, views: dict[str, Any], name: str):
    harness = PageHarness(chromium, views[name], WINDOW_PX)
    harness.advance(5)
    check_widths(harness)
    harness.close()


def test_the_stepper_can_be_read_in_a_cell_of_any_width(chromium: object, stepper: Stepper):
    harness = PageHarness(chromium, stepper.view, WINDOW_PX, reduced_motion="reduce")
    for kind, phase in (("halo", "forward"), ("all-reduce", "forward"), ("halo", "backward")):
        stepper.kind.value, stepper.phase.value = kind, phase
        stepper._handle_key("b")
        harness.advance(3)
        check_widths(harness)
    set_cell_width(harness, 320)
    left_out = harness.page.locator(".mpi4dl-left-out")
    assert left_out.inner_text() == (
        "This view is too narrow for the numbers of a message, the schedule and the memory of the ranks, and what they "
        "do next."
    )
    assert not harness.page.locator(".mpi4dl-strips").is_visible()
    set_cell_width(harness, 1000)
    assert not left_out.is_visible()
    assert harness.page.locator(".mpi4dl-strips").is_visible()
    harness.close()


def test_the_picture_of_a_slicer_has_the_width_of_its_cell(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["slicer"], WINDOW_PX)
    for wide_px, share in ((320, 0.9), (500, 0.9), (690, 0.9), (1000, 0.6), (1400, 0.6)):
        set_cell_width(harness, wide_px)
        _, _, wide, high = measure_places(harness, ".mpi4dl-stage")[".mpi4dl-stage"]
        assert wide >= share * wide_px
        assert high >= 200
    harness.close()


def test_the_picture_of_a_plan_is_beside_its_card_where_both_have_room(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["configurator"], WINDOW_PX)
    set_cell_width(harness, 500)
    room, card = measure_places(harness, ".mpi4dl-plan-room", ".mpi4dl-plan-card").values()
    assert room[0] + room[2] <= card[0]
    assert room[3] >= 240
    harness.close()


def test_the_chart_of_a_tuner_leaves_room_for_the_chosen_plan_below_it(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["tuner"], (1500, 768))
    for wide_px in (320, 500, 700):
        set_cell_width(harness, wide_px)
        (_, top, _, high), side = measure_places(harness, ".mpi4dl-tuning", ".mpi4dl-tuning-side").values()
        assert side[1] + side[3] <= top + high, wide_px
    harness.close()


def test_the_rows_of_a_timeline_are_scrolled_and_not_its_view(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["timeline"], (1500, 768))
    for wide_px in WIDTHS_PX:
        set_cell_width(harness, wide_px)
        hidden_px = harness.page.locator(".mpi4dl-page").evaluate("(view) => view.scrollHeight - view.clientHeight")
        assert hidden_px <= 0, wide_px
    harness.close()


def test_the_tools_of_a_timeline_wrap_as_two_groups(chromium: object, views: dict[str, Any]):
    """The search with its arrows, and what zooms."""
    harness = PageHarness(chromium, views["timeline"], WINDOW_PX)
    for wide_px in WIDTHS_PX:
        set_cell_width(harness, wide_px)
        tops = harness.page.locator(".mpi4dl-timeline-tools").evaluate(
            "(tools) => [...tools.querySelectorAll('input, button')].map((each) => each.getBoundingClientRect().top)"
        )
        assert max(tops[:3]) - min(tops[:3]) < 5, wide_px
        assert max(tops[3:]) - min(tops[3:]) < 5, wide_px
    harness.close()


@pytest.mark.parametrize("name", ["slicer", "timeline", "configurator", "tuner"])
def test_a_limit_of_the_height_is_kept(chromium: object, views: dict[str, Any], name: str):
    view = views[name]
    harness = PageHarness(chromium, view, WINDOW_PX)
    view.max_height = 420
    harness.advance(5)
    assert measure_height(harness) <= 420
    view.max_height = None
    harness.advance(5)
    assert measure_height(harness) > 420
    harness.close()


def test_nothing_jumps_in_a_slicer_from_layer_to_layer(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["slicer"], WINDOW_PX)
    parts = ".mpi4dl-strip", ".mpi4dl-stage", ".mpi4dl-words", ".mpi4dl-status"
    for wide_px in (500, 1000):
        set_cell_width(harness, wide_px)
        before = measure_places(harness, *parts)
        strip = harness.page.get_by_role("slider", name="layer")
        strip.focus()
        for _ in range(6):
            harness.page.keyboard.press("PageUp")
            harness.page.mouse.move(200, 400)
            harness.page.wait_for_timeout(300)  # until the status line has the words of the pixel
            assert measure_places(harness, *parts) == before
        harness.page.keyboard.press("Home")
        harness.page.get_by_role("button", name="Keys").click()
        assert measure_places(harness, *parts) == before
        harness.page.keyboard.press("Escape")
    harness.close()


def test_nothing_jumps_in_a_stepper_from_instruction_to_instruction(chromium: object, stepper: Stepper):
    harness = PageHarness(chromium, stepper.view, WINDOW_PX, reduced_motion="reduce")
    for wide_px in (1400, 700):
        set_cell_width(harness, wide_px)
        stepper._handle_key("r")
        harness.advance(3)
        parts = ".mpi4dl-scrubber", ".mpi4dl-stage", ".mpi4dl-strips", ".mpi4dl-step-table", ".mpi4dl-step-caption"
        before = measure_places(harness, *parts)
        while not stepper.stepping.done:
            stepper._handle_key("n")
            harness.advance(2)
            assert measure_places(harness, *parts) == before, stepper.view.alt[:80]
        stepper._handle_key("n")  # it is refused
        harness.advance(2)
        assert harness.page.get_by_role("alert").inner_text().startswith("⚠ The step is done")
        assert measure_places(harness, *parts) == before
    harness.close()


def test_the_title_of_a_slicer_is_whole_in_a_cell_of_any_width(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["slicer"], WINDOW_PX)
    views["slicer"].layer = 3
    for wide_px in WIDTHS_PX:
        set_cell_width(harness, wide_px)
        hidden_px = harness.page.locator(".mpi4dl-title").evaluate(
            "(title) => [title.scrollHeight - title.clientHeight, title.scrollWidth - title.clientWidth]"
        )
        assert max(hidden_px) <= 1, wide_px
    views["slicer"].layer = 0
    harness.close()


def test_a_message_is_beside_ranks_that_would_be_no_larger_above_it(chromium: object, stepper: Stepper):
    """In a high window all of them have enough height, but not the width."""
    harness = PageHarness(chromium, stepper.view, (1500, 950), reduced_motion="reduce")
    set_cell_width(harness, 1000)
    assert harness.page.locator(".mpi4dl-strips").is_visible()
    assert harness.page.locator(".mpi4dl-flat").count() == 0
    harness.close()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_message_is_shown_whole_beside_small_tiles(chromium: object, stepper: Stepper, phase: str):
    """Backward, what is after a gradient was added is in its last line."""
    harness = PageHarness(chromium, stepper.view, WINDOW_PX, reduced_motion="reduce")
    set_cell_width(harness, 820)
    stepper._handle_key("r")
    stepper.stepping.until(kind="halo", phase=phase)
    stepper.refresh()
    harness.advance(3)
    strips = harness.page.locator(".mpi4dl-strips")
    assert strips.locator("table").count() == 3
    assert strips.evaluate("(element) => element.scrollHeight - element.clientHeight") <= 0
    harness.close()


def test_all_groups_of_options_are_in_view_beside_the_picture_of_a_plan(chromium: object, views: dict[str, Any]):
    harness = PageHarness(chromium, views["configurator"], (1500, 768))
    set_cell_width(harness, 700)
    hidden_px = harness.page.locator(".mpi4dl-plan-more").evaluate("(more) => more.scrollHeight - more.clientHeight")
    assert hidden_px <= 0
    harness.close()
