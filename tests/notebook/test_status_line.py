"""A wait of more than a second shows a line below the cell, which says what is done, and is gone afterwards."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mpi4dl_nb import Cluster, Plan, Training, capabilities, forecast, largest_image, scaling, status_line
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.launch import startup_monitor
from mpi4dl_nb.status_line import show_status, with_status


@pytest.fixture
def page(monkeypatch) -> list[str]:
    """The texts that a notebook's page shows one after another in place of the line."""
    texts: list[str] = []

    def display(bundle, **keywords):
        texts.append(bundle["text/plain"])
        return SimpleNamespace(update=lambda bundle, **keywords: texts.append(bundle["text/plain"]))

    monkeypatch.setattr(status_line, "get_ipython", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr(status_line, "display", display)
    return texts


@pytest.fixture
def at_once(page, monkeypatch) -> list[str]:
    """The same, where no wait is too short for a line."""
    monkeypatch.setattr(status_line.StatusLine, "show_later", lambda self, after_s: self.show())
    return page


def test_a_line_is_shown_changed_and_gone(page):
    with show_status("Tracing ...") as line:
        line.update("Compiling ...")
    assert page == ["Tracing ...", "Compiling ...", ""]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_line_is_gone_however_the_wait_ends(page, kind):
    with pytest.raises(kind), show_status("Tracing ..."):
        raise kind
    assert page == ["Tracing ...", ""]


def test_a_slow_start_is_shown_by_a_line_that_is_gone_afterwards_and_not_as_an_error(page, capsys, monkeypatch):
    monkeypatch.setattr(startup_monitor, "_SAY_S", 0.0)
    start = startup_monitor.StartupMonitor(2, lambda: 0.1)
    start.update(1, "Of 2 ranks only 1 have joined")
    start.close()
    assert page[0].startswith("The start takes longer than usual, and goes on. Of 2 ranks only 1 have joined after")
    assert page[-1] == ""
    assert capsys.readouterr().err == ""


def test_a_short_wait_shows_nothing(page):
    with show_status("Tracing ...", after_s=30.0):
        pass
    deadline_s = time.perf_counter() + 5
    while any(thread.name == "status line" for thread in threading.enumerate()) and time.perf_counter() < deadline_s:
        time.sleep(0.01)
    assert page == []
    assert not any(thread.name == "status line" for thread in threading.enumerate())


def test_a_long_wait_shows_its_present_text(page):
    with show_status("Tracing ...", after_s=0.05) as line:
        line.update("Compiling ...")
        deadline_s = time.perf_counter() + 5
        while not page and time.perf_counter() < deadline_s:
            time.sleep(0.01)
    assert page == ["Compiling ...", ""]


def test_a_script_starts_no_thread(monkeypatch):
    monkeypatch.setattr(status_line, "get_ipython", lambda: None)
    with show_status("Tracing ...", after_s=0.01):
        assert not any(thread.name == "status line" for thread in threading.enumerate())


def test_a_function_with_a_line_keeps_its_help_and_its_own_callback(at_once):
    def call_back(seen=None):
        """Return nothing."""
        seen(1, 2)

    own: list[tuple[int, int]] = []
    wrapped = with_status("Studying", counts="seen")(call_back)
    wrapped()
    wrapped(seen=lambda *counts: own.append(counts))
    assert at_once == ["Studying ...", "Studying: 1 of 2 ...", "", "Studying ...", ""]
    assert own == [(1, 2)]
    assert wrapped.__doc__ == "Return nothing."


PLAN, SHAPE = Plan(split_size=2, spatial_size=0), (2, 3, 32, 32)


@pytest.mark.nightly
def test_what_takes_long_in_a_cell_shows_a_line(at_once):
    def take_texts(line: str) -> list[str]:
        texts, at_once[:] = list(at_once), []
        assert texts[-1] == "", f"{line} stays"
        assert any(line in text for text in texts), texts
        return texts

    forecast(resnet20_v1(), PLAN, SHAPE, "Summit")
    take_texts("Compiling and simulating 2 stages")
    capabilities(resnet20_v1(), "Summit", 2, (32,), 2)
    take_texts("Forecasting plans: 3 of")
    scaling(resnet20_v1(), "Summit", Plan(split_size=1, spatial_size=0), SHAPE, ranks=(1, 2))
    take_texts("number of ranks")
    largest_image(resnet20_v1(), PLAN, "Summit", most_px=128)
    take_texts("largest image")
    with Cluster(2, backend="loopback") as cluster:
        training = Training(resnet20_v1(), PLAN, cluster, SHAPE)
        take_texts("Compiling 2 stages")
        assert training.verify()["ok"]
        assert len([text for text in take_texts("3 steps on 2 ranks") if text]) == 3
        with pytest.raises(ValueError, match="no batch"):
            training.verify(data=[])
        assert at_once[-1] == ""
    assert torch.is_grad_enabled()
