"""The living page of a widget in a saved notebook: what it has, when it is made anew, and where it is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest
import torch
from torch import nn

from mpi4dl_nb import (
    Cluster,
    Configurator,
    Plan,
    Slicer,
    Stepper,
    TimelineView,
    Training,
    forecast,
    immunohistochemistry,
)
from mpi4dl_nb.widgets import saved_frame, stepper
from mpi4dl_nb.widgets.figure_widget import STILL, StillFigure
from tests.unpacking import unpack_part

PLAN, SHAPE = Plan(split_size=1, slice_method="1x2"), (2, 3, 16, 16)
FRAME = re.compile(r'<iframe sandbox="allow-scripts" title="(\w+), [^"]*" srcdoc="([^"]*)"')
PACKED = re.compile(r'<script type="application/gzip">([^<]*)</script>')


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


class Shown(list):
    """The snapshots of a widget that is displayed, the newest last."""

    def __init__(self, widget: StillFigure) -> None:
        super().__init__([widget._snapshot_html])
        widget._still = self

    def update(self, shown: Any) -> None:
        self.append(shown.data)


def unpack_frame(html: str) -> dict[str, Any]:
    """What the frame in a snapshot has of its widget."""
    (frame,) = FRAME.finditer(html)
    (packed,) = PACKED.findall(unescape(frame[2]))
    return unpack_part(packed)


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    with Cluster(2, backend="loopback") as cluster:
        yield Training(make_model(), PLAN, cluster, SHAPE)


@pytest.fixture
def slicer() -> Iterator[Slicer]:
    slicer = Slicer(immunohistochemistry()[:64, :64], PLAN, make_model())
    yield slicer
    slicer.close()


def test_a_slicer_is_saved_as_it_is_seen(slicer: Slicer):
    shown = Shown(slicer)
    assert unpack_frame(shown[-1])["views"][0]["values"]["tile"] == slicer.tile.value
    slicer.tile.value = 1 - slicer.tile.value
    values = unpack_frame(shown[-1])["views"][0]["values"]
    assert values["tile"] == slicer.tile.value
    assert shown[-1].index("<img") < shown[-1].index("<iframe"), "the still picture is there too"


def test_a_step_is_saved_once_it_is_finished(training: Training):
    widget = Stepper(training, torch.rand(SHAPE), torch.tensor([0, 1]))
    shown = Shown(widget)
    assert not FRAME.search(shown[-1])
    widget.record_step()
    (history, values) = unpack_frame(shown[-1])["views"][0]["answers"]["history"]["true"]
    assert len(history["history"]) == len(values) == len(widget.record.frames)
    widget.close()
    assert FRAME.search(shown[-1])
    assert f'class="{STILL}"' not in shown[-1], "where the widget was, its record stays"


def test_a_long_record_loses_frames_and_says_so(training: Training, monkeypatch: pytest.MonkeyPatch):
    widget = Stepper(training, torch.rand(SHAPE), torch.tensor([0, 1]))
    widget.record_step()
    most = sum(len(frame.values) for frame in widget.record.frames) // 2
    monkeypatch.setattr(stepper, "FRAME_RECORD_BYTES", most)
    part = widget._make_framed_part()
    frames = part.views[0].answers["history"]["true"][1]
    assert 2 <= len(frames) < len(widget.record.frames)
    assert sum(map(len, frames)) <= most
    assert re.fullmatch(r"\d+ older frames were dropped, .*", part.remarks[0])
    widget.close()


def test_a_configurator_is_saved_with_what_it_has_computed():
    widget = Configurator(make_model(), (4, 3, 64, 64), plan=Plan(split_size=1, slice_method="2x2"), machine="Summit")
    shown = Shown(widget)
    assert widget.wait()
    assert len(unpack_frame(shown[-1])["links"]["plans"]) == 1
    widget.knobs["split_size"].value = 2
    assert widget.wait()
    of_two = unpack_frame(shown[-1])["links"]["plans"]
    assert [row["values"]["split_size"] for row in of_two] == ["2", "1"]
    widget.knobs["split_size"].value = 1  # computed before
    assert widget.wait()
    assert [row["values"]["split_size"] for row in unpack_frame(shown[-1])["links"]["plans"]] == ["1", "2"]
    widget.close()


def test_a_frame_is_left_out(slicer: Slicer, monkeypatch: pytest.MonkeyPatch):
    for owner, name, value in (
        (Slicer, "frame_px", 0),
        (slicer, "frame_px", 0),
        (slicer, "save_picture", False),
        (saved_frame, "MOST_FRAME_BYTES", 1000),
    ):
        assert FRAME.search(slicer._snapshot_html)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert "<iframe" not in slicer._snapshot_html


def test_an_image_that_cannot_be_read_leaves_the_figure(slicer: Slicer, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError("of a slide that the caller has opened")

    monkeypatch.setattr("mpi4dl_nb.widgets.slicer_view.encode_pyramid", fail)
    assert "<img" in slicer._snapshot_html
    assert "<iframe" not in slicer._snapshot_html


def test_a_timeline_is_alive_at_once():
    timeline = TimelineView(forecast(make_model(), PLAN, SHAPE, "Summit").timeline, PLAN)
    assert [match[1] for match in FRAME.finditer(timeline._snapshot_html)] == ["TimelineView"]
    timeline.close()
    assert "<iframe" not in timeline._saved_html
