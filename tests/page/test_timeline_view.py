"""The timeline on a page: zoomed, moved, searched and selected by pointer and by keyboard alone, and fast enough."""

from __future__ import annotations

import random

import pytest

from mpi4dl_nb import TimelineView, show_timeline
from mpi4dl_nb.draw.timeline import get_style
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent
from tests.page.harness import PageHarness
from tests.page.measures import measure_frames
from tests.unpacking import unpack_tables

PLAN = Plan(split_size=1, slice_method="1x2")


def make_timeline(ranks: int, each: int, scale: float = 1.0) -> Timeline:
    """Ranks that compute and send in turns; every fourth message waits for half of its time."""
    draw, events = random.Random(0), []
    for rank in range(ranks):
        now_s = 3.0
        for number in range(each):
            length_s = (0.5 + draw.random()) * 1e-4 * scale
            kind = "halo" if number % 2 else "compute"
            phase = "forward" if number < each / 2 else "backward"
            wait_s = length_s / 2 if number % 4 == 3 else 0.0
            name = f"stage0.{kind}{number}"
            events.append(TimelineEvent(rank, name, kind, phase, 0, now_s, now_s + length_s, number % 2 * 2048, wait_s))
            now_s += length_s
    draw.shuffle(events)  # the order of a timeline's events is no order of time
    return Timeline(tuple(events))


class TimelinePage:
    """A timeline in a page, and where its parts are."""

    def __init__(self, chromium, view: TimelineView, **context) -> None:
        self.view = view
        self.harness = PageHarness(chromium, view, **context)
        self.page = self.harness.page
        self.rows = self.page.get_by_role("application")
        self.status = self.page.get_by_role("status").last
        self.harness.advance(4)

    def send_keys(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
            self.page.wait_for_timeout(200)  # it glides to what is shown next

    def move_pointer(self, x: float, y: float) -> None:
        box = self.rows.bounding_box()
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        self.harness.advance()

    @property
    def shown(self) -> str:
        """The part of the step that is shown, as the page tells it."""
        return self.page.locator(".mpi4dl-timeline-count").last.inner_text()


@pytest.fixture
def shown(chromium):
    timeline = make_timeline(2, 40)
    page = TimelinePage(
        chromium,
        TimelineView(timeline, PLAN, make_timeline(2, 40, 0.5), {"stage0.compute4": "blocks.1.conv"}),
    )
    yield page
    page.harness.close()


def test_the_numbers_on_the_page_are_those_of_the_events():
    timeline = make_timeline(2, 40)
    view = TimelineView(timeline, PLAN)
    columns = unpack_tables(view.columns)
    starts, ends, waits, sent, rows, looks, names, kinds, phases, parts, places = columns.values()
    words = view.words
    for at, place in enumerate(places):
        event = timeline.events[place]
        assert (starts[at], ends[at]) == (event.start_s - timeline.start_s, event.end_s - timeline.start_s)
        assert (waits[at], sent[at], parts[at]) == (event.wait_s, event.bytes, event.micro_batch)
        found = words["names"][names[at]], words["kinds"][kinds[at]], words["phases"][phases[at]]
        assert found == (event.name, event.kind, event.phase)
        assert words["rows"][rows[at]]["rank"] == event.rank
        assert words["looks"][looks[at]]["name"] == get_style(event).name
    assert sorted(places) == list(range(80))
    assert all((rows[at], starts[at]) <= (rows[at + 1], starts[at + 1]) for at in range(79))
    assert words["rows"][1]["shares"][0] == timeline.time_shares[1].work
    assert view.figure.alt == show_timeline(timeline, PLAN).alt
    assert f'alt="{view.figure.alt}"' in view._repr_mimebundle_()["text/html"]  # where no widget is live


def test_what_cannot_be_shown_is_refused():
    timeline = make_timeline(2, 4)
    with pytest.raises(PlanError, match="holds no event"):
        TimelineView(Timeline(()))
    with pytest.raises(PlanError, match="needs 5 ranks"):
        TimelineView(timeline, Plan(split_size=2))
    with pytest.raises(PlanError, match="of ranks 2 too, but 2 ranks were measured"):
        TimelineView(timeline, predicted=make_timeline(3, 4))
    view = TimelineView(timeline)
    with pytest.raises(PlanError, match="selected=8 is none of the 8 events"):
        view.selected = 8
    assert view.selected == -1


def test_an_event_is_reached_and_described_by_keyboard(shown):
    view = shown.view
    shown.rows.focus()
    shown.send_keys("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")
    assert (view.event.rank, view.event.name, view.rank) == (0, "stage0.halo3", 0)
    said = shown.status.inner_text()
    for part in ("stage0.halo3", "halo, forward", "rank 0 (stage 0, tile 0)", "own time", "sends 2.0 KB", "predicted:"):
        assert part in said
    shown.send_keys("ArrowRight", "ArrowDown")
    assert view.event.rank == view.rank == 1
    shown.send_keys("Home")
    assert view.event.name == "stage0.compute0"
    shown.send_keys("End")
    assert view.event.name == "stage0.halo39"
    shown.send_keys("Escape")
    assert (view.selected, view.rank, view.event) == (-1, -1, None)


def test_keys_zoom_and_move_and_show_all_again(shown):
    whole = shown.shown
    assert whole.startswith("all ")
    shown.rows.focus()
    shown.send_keys("w", "w", "+")
    closer = shown.shown
    assert " from " in closer
    shown.send_keys("d")
    assert shown.shown != closer
    assert shown.shown.split(" from ")[0] == closer.split(" from ")[0]
    shown.send_keys("0")
    assert shown.shown == whole


def test_the_pointer_describes_selects_drags_and_zooms(shown):
    shown.move_pointer(152, 40)
    tooltip = shown.page.locator(".mpi4dl-tooltip")
    assert "stage0.compute0" in tooltip.inner_text()
    assert "stage0.compute0" in shown.status.inner_text()
    box = shown.rows.bounding_box()
    shown.page.mouse.click(box["x"] + 152, box["y"] + 40)
    shown.harness.advance()
    assert shown.view.event.name == "stage0.compute0"
    shown.page.mouse.wheel(0, -400)
    shown.harness.advance()
    zoomed = shown.shown
    assert " from " in zoomed
    shown.page.mouse.move(box["x"] + 600, box["y"] + 60)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    shown.page.mouse.up()
    shown.harness.advance()
    assert shown.shown != zoomed
    assert shown.view.event.name == "stage0.compute0"  # a drag is no click


def test_a_click_on_a_bar_of_another_rank_moves_nothing(shown):
    box = shown.rows.bounding_box()
    shown.page.mouse.click(box["x"] + 152, box["y"] + 40)
    shown.move_pointer(152, 105)
    for _ in range(6):  # until the bar is longer than the view
        shown.page.mouse.wheel(0, -400)
        shown.harness.advance()
    before = shown.shown
    shown.page.mouse.click(box["x"] + 152, box["y"] + 105)
    shown.page.wait_for_timeout(250)
    assert (shown.view.event.rank, shown.view.rank) == (1, 1)
    assert shown.shown == before


def test_a_rank_is_chosen_by_its_name(shown):
    box = shown.rows.bounding_box()
    shown.page.mouse.click(box["x"] + 30, box["y"] + 110)
    shown.harness.advance()
    assert (shown.view.rank, shown.view.selected) == (1, -1)


def test_a_search_finds_layers_and_kinds(shown):
    search = shown.page.get_by_role("searchbox")
    search.fill("blocks.1")
    shown.harness.advance()
    assert shown.page.get_by_text("2 of 80 events").is_visible()
    search.press("Enter")
    shown.harness.advance()
    first = shown.view.event
    search.press("Enter")
    shown.harness.advance()
    assert {first.name, shown.view.event.name} == {"stage0.compute4"}
    assert {first.rank, shown.view.rank} == {0, 1}
    legend = shown.page.get_by_role("button", name="halo", exact=True)
    legend.click()
    assert search.input_value() == "halo"
    assert shown.page.get_by_text("40 of 80 events").is_visible()
    assert shown.page.evaluate("() => document.activeElement.textContent") == "halo", "the legend was made anew"
    assert shown.page.get_by_role("button", name="halo", exact=True).get_attribute("aria-pressed") == "true"
    search.focus()
    search.press("Escape")
    assert search.input_value() == ""


def test_the_kernel_selects_and_replaces_what_is_shown(shown):
    view = shown.view
    view.selected = next(
        at for at, each in enumerate(view.timeline.events) if (each.rank, each.name[-3:]) == (1, "o11")
    )
    shown.harness.advance(4)
    assert "stage0.halo11" in shown.status.inner_text()
    assert view.rank == 1
    shown.rows.focus()
    shown.page.keyboard.press("w")
    view.show(make_timeline(3, 10))  # while it glides
    shown.page.wait_for_timeout(200)
    assert shown.shown.startswith("all ")
    assert "on 3 ranks" in shown.rows.get_attribute("aria-label")
    assert "on 3 ranks" in view.figure.alt
    assert "stage0.halo11" not in shown.status.inner_text()


def test_a_newer_step_that_differs_in_its_times_only_is_shown(shown):
    words, before = shown.view.words, shown.shown
    shown.view.show(make_timeline(2, 40, 3.0), PLAN, make_timeline(2, 40, 0.5))
    shown.harness.advance(4)
    assert shown.view.words["names"] == words["names"]
    assert shown.shown != before


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["zoom", "drag", "hover"])
def test_two_hundred_thousand_events_are_moved_smoothly(chromium, kind):
    """The median frame has to be near the 17 ms of 60 frames a second, with room for a machine that is busy."""
    page = TimelinePage(chromium, TimelineView(make_timeline(8, 25_000)))
    found = measure_frames(page.page, "canvas.mpi4dl-timeline-rows", kind, 60)
    page.harness.close()
    assert found["frames_per_s"] > 15
    assert found["handler_ms"] < 16


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_texts_are_legible_in_both_themes(chromium, colours):
    page = TimelinePage(chromium, TimelineView(make_timeline(2, 8), PLAN))
    ink, paper = ("#e8e8e8", "#111318") if colours == "dark" else ("#1f2328", "#ffffff")
    style = f"--jp-ui-font-color1: {ink}; --jp-layout-color0: {paper}; background: {paper}"
    page.page.evaluate("style => { document.body.style.cssText = style; }", style)
    page.harness.advance(4)
    seen = page.page.evaluate(
        """() => { const canvas = document.querySelector("canvas.mpi4dl-timeline-rows");
        const { data } = canvas.getContext("2d").getImageData(0, 28, 140, 60); let most = 0, least = 255;
        for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) {
            most = Math.max(most, data[at]); least = Math.min(least, data[at]); }
        return [least, most]; }"""
    )
    page.harness.close()
    assert seen[1] > 200 if colours == "dark" else seen[0] < 60
