"""What a page sends: what no widget can be is refused at once, and changes nothing; the widget stays usable."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Configurator, Plan, Slicer, Stepper, TimelineView, Training, forecast, open_image
from mpi4dl_nb.draw.navigation import MOST_TILES
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.widgets.figure_widget import RangeBar
from mpi4dl_nb.widgets.page_view import PageView
from mpi4dl_nb.widgets.tuner import ChoiceTable, TuningView

PLAN = Plan(split_size=1, slice_method="2x2")
HUGE = 10**9


def set_from_page(view: PageView, **state: Any) -> None:
    """Send state as a page does."""
    view._handle_msg({"content": {"data": {"method": "update", "state": state, "buffer_paths": []}}, "buffers": []})


def ask_from_page(view: PageView, content: Any) -> list[Any]:
    """Send a message as a page does, and return the replies."""
    replies: list[Any] = []
    view.send = lambda reply, buffers=None: replies.append(reply)
    view._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    return replies


def record_sent_state(view: PageView) -> list[str]:
    """Return a list that fills with the names of traits that the kernel sends to its pages again."""
    names: list[str] = []
    view.send_state = lambda key=None: names.extend(key if isinstance(key, list | tuple | set) else [key])
    return names


@pytest.fixture(scope="module")
def slicer():
    made = Slicer(np.full((300, 400, 3), 200, np.uint8), PLAN, resnet20_v1())
    yield made
    made.close()


@pytest.mark.parametrize(
    "state",
    [
        {"layer": HUGE}, {"layer": -1}, {"layer": 1.5}, {"layer": "1"}, {"tile": 4}, {"tile": -1}, {"place": [0, 0]},
        {"place": [HUGE**2, 0, 50]}, {"place": [0, 0, 0]}, {"place": "abc"}, {"picked": [300, 0, 0, 0]},
        {"picked": [0, 0, 0]}, {"picked": [0, 0, 0, HUGE]}, {"picked": [-1, 0, 0, 0]}, {"reading": "all"},
        {"facts": {}}, {"numbers": ""}, {"_esm": "alert(1)"}, {"layer": HUGE, "tile": 1, "place": [HUGE, 0, 1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_slicer_keeps_its_state_and_the_page_gets_it_again(slicer, state):
    view = slicer.view
    before = {name: getattr(view, name) for name in view.keys}
    sent = record_sent_state(view)
    set_from_page(view, **state)
    wrong = {name for name in state if name != "tile" or len(state) == 1}  # tile 1 is possible, whatever the layer
    assert {name: getattr(view, name) for name in wrong} == {name: before[name] for name in wrong}
    assert set(sent) >= wrong
    set_from_page(view, tile=0, place=[])
    assert slicer.figure.alt


def test_a_slicer_takes_what_is_possible(slicer):
    last = len(slicer.points) - 1
    rows, cols = slicer.points[last].size_px
    set_from_page(slicer.view, layer=last, tile=3, place=[-20, 380, 90], picked=[rows - 1, cols - 1, 0, 0], fields=True)
    view = slicer.view
    assert (view.layer, view.tile, view.place, view.fields) == (last, 3, [-20, 380, 90], True)
    assert slicer.figure.alt
    set_from_page(slicer.view, layer=0, tile=0, place=[], picked=[], fields=False)


@pytest.mark.parametrize(
    "tiles",
    [
        [[HUGE, 0, 0]], [[-1, 0, 0]], [[0, HUGE, 0]], [[0, 0, -1]], [[0, 0]], [["x", 0, 0]], [[0.0, 0, 0]], "abc", 5,
        None, [[0, 0, 0]] * 20_000, [[0, 0, 0], [9, 0, 0]], {"level": 0},
    ],
    ids=lambda tiles: str(tiles)[:30],
)  # fmt: skip
def test_tiles_that_a_picture_does_not_have_are_refused_before_one_is_read(slicer, monkeypatch, tiles):
    monkeypatch.setattr(slicer.view.picture, "read", lambda *_: pytest.fail("a tile was read"))
    begin_s = time.perf_counter()
    (reply,) = ask_from_page(slicer.view, {"tiles": tiles})
    assert time.perf_counter() - begin_s < 1
    assert list(reply) == ["refused"]


def test_as_many_tiles_as_a_screen_shows_are_sent(slicer):
    replies = ask_from_page(slicer.view, {"tiles": [[0, 0, 0], [0, 1, 1], [1, 0, 0]]})
    assert [reply["tiles"] for reply in replies] == [[[0, 0, 0]], [[0, 1, 1]], [[1, 0, 0]]]
    assert MOST_TILES > 7680 / 128 * 4320 / 128, "a screen of 8K pixels"


@pytest.mark.parametrize("content", ["text", 5, None, [1, 2], {}, {"unknown": 1}], ids=str)
def test_a_message_of_another_kind_is_ignored(slicer, content):
    assert ask_from_page(slicer.view, content) == []


@cache
def make_timeline():
    return forecast(resnet20_v1(), Plan(split_size=2, num_spatial_parts=4), (2, 3, 64, 64), "Summit").timeline


@pytest.mark.parametrize(
    "state", [{"selected": HUGE}, {"selected": -2}, {"rank": 5}, {"rank": -2}, {"words": {}}], ids=str
)
def test_a_timeline_has_only_events_and_ranks_of_its_step(state):
    view = TimelineView(make_timeline())
    set_from_page(view, **state)
    assert (view.selected, view.rank) == (-1, -1)
    assert view.words
    set_from_page(view, selected=2, rank=4)
    assert view.selected == 2
    assert view.event is view.timeline.events[2]


@pytest.mark.parametrize("value", [HUGE, -1, 2.5, "3"])
def test_a_slider_stays_within_its_limits(value):
    bar = RangeBar(value=3, min=0, max=7)
    set_from_page(bar, value=value)
    assert bar.value == 3
    set_from_page(bar, value=7, max=9)
    assert (bar.value, bar.max) == (7, 7)


@pytest.mark.parametrize("text", ["another plan", "", 7, None, ["b"]])
def test_only_plans_that_are_shown_are_chosen_and_measured(text):
    asked: list[str] = []
    knows = ["a", "b"].__contains__
    for view in (TuningView(asked.append, asked.append, knows), ChoiceTable(asked.append, knows)):
        view.chosen = "a"
        set_from_page(view, chosen=text)
        for name in view.rules.requests:
            assert "refused" in ask_from_page(view, {name: text})[0]
        assert (view.chosen, asked) == ("a", [])
        set_from_page(view, chosen="b")
        assert view.chosen == "b"


@pytest.fixture(scope="module")
def configurator():
    made = Configurator(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)), (2, 3, 16, 16))
    yield made
    made.close()


@pytest.mark.parametrize(
    "texts",
    [
        {"split_size": str(HUGE)}, {"data_parallel": str(HUGE)}, {"data_parallel": "1048576"}, {"grid": [HUGE, HUGE]},
        {"grid": [1024, 1024]}, {"num_spatial_parts": "1000000"}, {"image_px": str(HUGE)}, {"batch": str(HUGE)},
        {"parts": "9" * 150}, {"times": "-1"}, {"machine": "<b>none</b>"}, {"slice_method": "0x0"},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_no_plan_has_are_named_at_their_control(configurator, texts):
    ask_from_page(configurator.view, {"set": {"split_size": "1", "spatial_size": "1", "grid": [1, 1]}})
    assert configurator.wait(60)
    assert not configurator.wrong
    good = dict(configurator.view.values)
    begin_s = time.perf_counter()
    assert ask_from_page(configurator.view, {"set": texts, "asked": 7})[-1] == {"answered": 7}
    assert configurator.wait(20)
    assert time.perf_counter() - begin_s < 20
    assert configurator.wrong
    ask_from_page(configurator.view, {"set": {name: good[name] for name in texts} | {"grid": [1, 1]}})
    assert configurator.wait(60)
    assert configurator.plan.ranks == 1


@pytest.mark.parametrize(
    "texts",
    [
        5,
        "all",
        None,
        {"grid": "2x2"},
        {"grid": [1]},
        {"grid": [1, 1, 1]},
        {"grid": [1, 2.5]},
        {"parts": "9" * 100_000},
        {"times": [1]},
        {"times": {}},
    ],
    ids=lambda texts: str(texts)[:30],
)
def test_what_is_no_setting_changes_nothing(configurator, texts):
    before = dict(configurator.view.values)
    replies = ask_from_page(configurator.view, {"set": texts, "asked": 8})
    assert "refused" in replies[0]
    assert replies[-1] == {"answered": 8}, "until it has this number, the page waits"
    assert configurator.view.values == before
    assert ask_from_page(configurator.view, {"set": {"split_size": "1"}, "asked": "9"}) == []


def test_a_stepper_knows_only_its_keys():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with Cluster(2, backend="loopback") as cluster:
        training = Training(model, Plan(split_size=1, slice_method="1x2"), cluster, (2, 3, 8, 8))
        stepper = Stepper(training, torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
        done = stepper.stepping.event.number
        for content in ({"key": "x"}, {"key": ["n"]}, {"key": None}, {"focus": "0"}, {"focus": 1e9}):
            assert "refused" in ask_from_page(stepper.view, content)[0]
        ask_from_page(stepper.view, {"focus": HUGE})
        set_from_page(stepper.view, meta={}, setup={}, focus=HUGE)
        assert stepper.stepping.event.number == done
        assert stepper.view.meta
        assert ask_from_page(stepper.view, {"key": "n", "asked": 3})[-1] == {"answered": 3}
        assert stepper.stepping.event.number > done
        stepper.close()


def test_a_picture_may_be_larger_than_any_tile(tmp_path):
    slicer = Slicer(open_image(np.zeros((40, 3000, 3), np.uint8)), Plan(split_size=1, slice_method="1x2"))
    assert ask_from_page(slicer.view, {"tiles": [[0, 0, 11], [4, 0, 0]]})[-1]["tiles"] == [[4, 0, 0]]
    assert "refused" in ask_from_page(slicer.view, {"tiles": [[0, 0, 12]]})[0]
