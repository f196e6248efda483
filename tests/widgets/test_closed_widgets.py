"""A closed widget shows its last figure where it is displayed, and nothing keeps it in memory."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from ipywidgets.widgets import widget as registry
from torch import nn

from mpi4dl_nb import (
    Cluster,
    Configurator,
    ImageError,
    Monitor,
    Plan,
    PlanError,
    Slicer,
    Stepper,
    TimelineView,
    Training,
    Tuner,
    Workbench,
)
from mpi4dl_nb.widgets import figure_widget

PLAN, SHAPE = Plan(split_size=1, slice_method="1x2"), (2, 3, 16, 16)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with Cluster(2, backend="loopback") as cluster:
        cluster.calibrate(tmp_path_factory.mktemp("machine") / "machine.json", quick=True, accept_noise=True)
        training = Training(make_model(), PLAN, cluster, SHAPE)
        batch = torch.rand(SHAPE), torch.randint(2, (2, 16, 16))
        training.step(*batch)
        yield SimpleNamespace(cluster=cluster, training=training, batch=batch, image=torch.rand(3, 16, 16))


class Page(list):
    """What a notebook displays: in each place [identity, data], where an update changes all of its identity."""

    def display(self, shown: object, raw: bool = False, display_id: bool = False, identity: object = None) -> object:
        handle = SimpleNamespace()
        handle.display = lambda again: self.display(again, identity=handle)
        handle.update = self.update_places(handle)
        self.append([identity or handle, shown if raw else {"text/html": shown.data}])
        return handle if display_id else None

    def update_places(self, handle: object) -> Callable[[object], None]:
        def update(shown: object) -> None:
            for place in self:
                if place[0] is handle:
                    place[1] = {"text/html": shown.data}

        return update


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    found = Page()
    monkeypatch.setattr(figure_widget, "display", found.display)
    return found


def is_soon(test: Callable[[], bool], most_s: float = 120) -> bool:
    stop = time.monotonic() + most_s
    while not (found := test()) and time.monotonic() < stop:
        time.sleep(0.1)
    return found


WIDGETS: dict[str, Callable[[SimpleNamespace], object]] = {
    "slicer": lambda of: Slicer(of.image, PLAN, of.training.recipe),
    "stepper": lambda of: Stepper(of.training, *of.batch),
    "timeline": lambda of: TimelineView(of.training.timeline()),
    "workbench": lambda of: Workbench(of.training, of.image),
    "configurator": lambda of: Configurator(make_model(), SHAPE, of.cluster, PLAN),
    "monitor": lambda of: Monitor(of.training),
    "tuner": lambda of: Tuner(make_model(), SHAPE, of.cluster, progress=False),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WIDGETS)
def test_a_closed_widget_is_a_figure_and_is_collected(made: SimpleNamespace, page: Page, name: str):
    gc.collect()
    before = set(registry._instances)
    widget = WIDGETS[name](made)
    widget._ipython_display_()
    assert "application/vnd.jupyter.widget-view+json" in page[0][1]
    widget.close()
    page.clear()
    widget._ipython_display_()
    assert [set(data) for _, data in page] == [{"text/html"}]
    assert set(registry._instances) <= before, "a part of it is still open"
    gone = weakref.ref(widget)
    del widget
    assert is_soon(lambda: gc.collect() >= 0 and gone() is None)  # a prediction may still be under way


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["slicer", "workbench"])
def test_the_saved_picture_follows_what_is_seen(made: SimpleNamespace, page: Page, name: str):
    widget = WIDGETS[name](made)
    widget._ipython_display_()
    widget._ipython_display_()  # a second cell
    view, seen = getattr(widget, "slicer", widget).view, set()
    for change in (
        {"tile": 1 - view.tile},
        {"fields": True},
        {"picked": [3, 4, 3, 4]},
        {"place": [2, 2, 6]},
        {"reading": "picture"},
    ):
        view.set_state(change)
        pictures = {page[at][1]["text/html"] for at in (1, 3)}
        assert pictures == {widget._snapshot_html}
        seen |= pictures
    assert len(seen) >= 4
    widget.close()


def test_a_plan_that_does_not_fit_is_refused_by_the_constructor(made: SimpleNamespace):
    with pytest.raises(PlanError):
        Slicer(made.image, Plan(split_size=1, slice_method="1x32"), made.training.recipe)


def test_a_batch_that_is_refused_leaves_nothing_behind(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(ImageError):
        Stepper(made.training, torch.rand(1, 3, 5, 5), made.batch[1])
    gc.collect()
    assert ignored == []
