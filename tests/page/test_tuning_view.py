"""Plans as points on a page: chosen by pointer and by keyboard, described beside the chart, and measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from mpi4dl_nb.draw.tuning import format_table_html, show_tuning
from mpi4dl_nb.draw.tuning_points import make_points, pack_points
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.predict.candidates import Candidate, Measurement
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.predict.search import search
from mpi4dl_nb.widgets.tuner import ChoiceTable, TuningView
from tests.draw.legible import find_unreadable, read
from tests.page.harness import PageHarness


@pytest.fixture(scope="module")
def found():
    """All plans of a small model for two ranks: the best as measured, the last as failed; and a limit of memory."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))
    traces = TraceCache(model, (2, 3, 64, 64), nn.CrossEntropyLoss())
    all_plans = search(2, 2, traces.get_graph, MACHINES["Summit"])
    limit = sorted(each.peak_bytes for each in all_plans.fitting)[-2]
    some = search(2, 2, traces.get_graph, MACHINES["Summit"], limit)
    candidates = [Candidate(each) for each in some.fitting]
    best = candidates[0].forecast
    peaks = tuple(2 * each.peak_bytes for each in best.memory)
    candidates[0] = replace(candidates[0], measured=Measurement((2 * best.seconds,), peaks))
    candidates[-1] = replace(candidates[-1], failure="it does not <run>")
    return candidates, limit, some.too_large


@pytest.fixture
def shown(chromium, found):
    candidates, limit, too_large = found
    asked = []
    view = TuningView(
        lambda plan: asked.append(("choose", plan)), lambda plan: asked.append(("measure", plan)), lambda _: True
    )
    view.words = pack_points(make_points(candidates, None, limit, too_large), limit)
    view.chosen = repr(candidates[0].plan)
    harness = PageHarness(chromium, view)
    harness.advance(3)
    yield view, harness.page, asked, harness
    harness.close()


def place(view: TuningView) -> int:
    """Where the chosen plan is among the points."""
    return [each["plan"] for each in view.words["points"]].index(view.chosen)


def test_points_are_the_costs_of_the_plans_and_the_front_is_unbeaten(found):
    candidates, limit, too_large = found
    points = make_points(candidates, None, limit, too_large)
    assert len(points) == len(candidates) + len(too_large)
    for point, each in zip(points, candidates, strict=False):
        assert point.image_s == pytest.approx(1 / each.predicted_images_per_s)
        assert point.bytes == each.predicted_bytes
    assert points[0].cost == (pytest.approx(1 / candidates[0].images_per_s), candidates[0].peak_bytes)
    assert dict(points[0].facts)["speed"] == "50% of what was predicted"
    works = [point for point in points if point.number and not point.failure]
    for point in works:
        beaten = [each for each in works if each.cost != point.cost and all(map(_is_least, each.cost, point.cost))]
        assert point.on_front == (not beaten)
    assert not any(point.on_front for point in points if point.failure or not point.number)


def _is_least(one: float, other: float) -> bool:
    return one <= other


def test_a_plan_is_reached_described_and_measured_by_keyboard(shown):
    view, page, asked, harness = shown
    page.get_by_role("application").focus()
    points = view.words["points"]
    order = sorted((at for at, each in enumerate(points) if each["number"]), key=lambda at: (points[at]["cost"][1], at))
    page.keyboard.press("ArrowRight")
    harness.advance()
    assert place(view) == order[min(order.index(0) + 1, len(order) - 1)]
    page.keyboard.press("Home")
    fastest = min((at for at, each in enumerate(points) if each["number"]), key=lambda at: points[at]["cost"][0])
    page.keyboard.press("ArrowDown")
    harness.advance()
    name = page.get_by_role("region", name="the chosen plan").get_by_role("heading").inner_text()
    assert name == f"{place(view) + 1}. {points[place(view)]['name']}"
    assert points[place(view)]["name"] in page.get_by_role("status").inner_text()
    assert asked[-1] == ("choose", view.chosen)
    asked.clear()
    page.keyboard.press("m")
    page.get_by_role("button", name="Measure this plan").click()
    harness.advance()
    assert asked == [("measure", view.chosen)] * 2
    assert fastest in order
    view.busy = True
    harness.advance()
    assert page.get_by_role("button", name="Measure this plan").is_disabled()
    assert page.evaluate("() => document.activeElement.textContent") == "Measure this plan"
    page.keyboard.press("Enter")
    page.get_by_role("application").focus()
    page.keyboard.press("m")
    harness.advance()
    assert len(asked) == 2


def test_a_click_chooses_a_plan_and_the_kernel_does(shown, found):
    view, page, _, harness = shown
    candidates, limit, _ = found
    marks = page.locator(".mpi4dl-tuning-chart .mpi4dl-tuning-point").last  # the measured one lies on top
    box = marks.locator(".measured").bounding_box()
    view.chosen = repr(candidates[-1].plan)
    harness.advance()
    panel = page.get_by_role("region", name="the chosen plan")
    assert "it does not <run>" in panel.inner_text()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    harness.advance()
    assert view.chosen == repr(candidates[0].plan)
    assert "50% of what was predicted" in panel.inner_text()
    assert format_bytes(limit) in panel.inner_text()


def test_a_choice_names_its_plan_though_the_rows_are_sorted_anew(shown, found):
    view, page, asked, harness = shown
    candidates, limit, too_large = found
    page.get_by_role("application").focus()
    harness.is_busy = True  # the kernel measures: it hears nothing of this choice yet
    panel = page.get_by_role("region", name="the chosen plan").get_by_role("heading")
    for _ in candidates:  # to one that is not the fastest
        page.keyboard.press("ArrowDown")
        number, name = panel.inner_text().split(". ")
        if number != "1":
            break
    harness.is_busy = False
    backwards = list(reversed(candidates))
    view.words = pack_points(make_points(backwards, None, limit, too_large), limit)
    harness.advance()
    page.keyboard.press("m")
    harness.advance()
    assert panel.inner_text().endswith(f". {name}")
    assert number != "1"
    assert asked == [("measure", repr(candidates[int(number) - 1].plan))]


def test_a_plan_that_does_not_fit_is_described_and_neither_chosen_nor_measured(shown):
    view, page, asked, harness = shown
    box = page.locator(".mpi4dl-tuning-chart .too-large .predicted").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    harness.advance()
    panel = page.get_by_role("region", name="a plan that does not fit")
    assert panel.get_by_role("button", name="Measure this plan").is_disabled()
    page.get_by_role("application").focus()
    page.keyboard.press("m")
    page.keyboard.press("Enter")
    harness.advance()
    assert "cannot be measured: it does not fit" in page.get_by_role("status").inner_text()
    assert asked == []
    page.keyboard.press("Home")
    harness.advance()
    assert not panel.is_visible()
    assert asked == [("choose", view.chosen)]


def test_the_table_folds_and_chooses_by_keyboard(chromium, found):
    plans, asked = [repr(each.plan) for each in found[0]], []
    rows = ChoiceTable(
        asked.append, lambda _: True, html=format_table_html(found[0], "plan"), summary="All plans as a table"
    )
    rows.chosen = plans[0]
    harness = PageHarness(chromium, rows)
    page = harness.page
    assert not page.get_by_role("table").is_visible()
    page.get_by_text("All plans as a table").focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("table").is_visible()
    page.get_by_role("radio", checked=True).focus()
    page.keyboard.press("ArrowDown")
    harness.advance()
    assert (rows.chosen, asked) == (plans[1], plans[1:2])
    rows.html, rows.chosen = format_table_html(found[0][:2], "plan"), plans[0]
    harness.advance()
    assert page.get_by_role("table").is_visible()  # what is open stays so
    assert page.get_by_role("radio").first.is_checked()
    harness.close()


def test_the_figure_has_the_same_points(found):
    candidates, limit, too_large = found
    figure = show_tuning(candidates, limit, None, too_large)
    assert find_unreadable(figure) == []
    assert "time for an image in ms" in read(figure)
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert {"front (measured, else predicted)", f"a rank may hold {format_bytes(limit)}"} < set(names)
    numbers = [str(point.number) for point in make_points(candidates, None, limit, too_large) if point.on_front]
    assert f"in time and memory: {', '.join(numbers)}. A rank may hold {format_bytes(limit)}." in figure.alt
