"""The monitor is told what `fit` does, shows it without holding it up, and stops it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Monitor, Plan, Training
from mpi4dl_nb.draw.monitor import format_progress_html
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.train.training_events import EpochResult, Recovered, SkippedImage, StepResult
from mpi4dl_nb.training import progress
from mpi4dl_nb.training.progress import ProgressRecorder, RefreshRate
from mpi4dl_nb.widgets import monitor as module

PLAN = Plan(split_size=2, spatial_size=1, slice_method="1x2")
IMAGES = SyntheticImages(8, (12, 16), 2)


@pytest.fixture(scope="module")
def cluster():
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        yield cluster


@pytest.fixture
def training(cluster):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    made = Training(model, PLAN, cluster, (2, 3, 12, 16))
    yield made
    made.close()


def list_drawers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "monitor"]


class Acts:
    """A watcher that acts when so many steps are done; beside a monitor."""

    def __init__(self, monitor: Monitor, step: int, act) -> None:
        self.step, self.act, self.monitor_handler = step, act, monitor.handle_event
        monitor.handle_event = self.handle_event

    def handle_event(self, event) -> None:
        self.monitor_handler(event)
        if isinstance(event, StepResult) and event.step + 1 == self.step:
            self.act()


def test_a_fit_is_shown_as_it_was(training):
    monitor = Monitor()
    history = training.fit(IMAGES, epochs=2, monitor=monitor)
    progress = monitor.progress
    assert progress.losses == history.losses
    assert tuple(progress.epochs) == history.epochs
    assert (progress.total, progress.ends, len(progress.speeds)) == (8, (4, 8), 8)
    assert (progress.state, progress.running, progress.left_s) == ("done", False, None)
    assert "8 of 8 steps done" in monitor.figure.alt
    assert f"to {history.losses[-1]:.4g}" in monitor.figure.alt
    assert f"loss {history.losses[-1]:.5g}" in monitor.numbers.value
    assert "<b>done</b>" in monitor.numbers.value
    assert all(f"rank {rank}: stage" in monitor.tables.value for rank in range(3))
    assert monitor.stop.disabled
    assert not list_drawers()


@pytest.mark.nightly
def test_a_monitor_of_a_training_shows_all_its_fits(training):
    monitor = Monitor(training)
    assert "0 steps done" in monitor.figure.alt
    training.fit(IMAGES, steps=1)
    training.fit(IMAGES, steps=2, go_on=False)
    assert len(monitor.progress.losses) == 2


@pytest.mark.nightly
def test_the_button_ends_it_after_the_step_and_leaves_a_checkpoint(training, tmp_path):
    monitor = Monitor(training)
    Acts(monitor, 3, monitor.stop.click)
    history = training.fit(IMAGES, epochs=5, save=tmp_path)
    assert (len(history.losses), history.stopped) == (3, True)
    assert monitor.progress.state == f"stopped after 3 steps; saved as {history.saved}"
    whole = training.fit(IMAGES, epochs=1)
    assert len(whole.losses) == 1, "it goes on in the middle of the epoch"
    assert not whole.stopped
    assert training.load(history.saved) == 3
    assert training.fit(IMAGES, epochs=1).losses == whole.losses


def test_the_button_without_a_folder_keeps_what_is_learned(training):
    monitor = Monitor(training)
    Acts(monitor, 2, monitor.stop.click)
    before = training.state_dict()["0.weight"]
    history = training.fit(IMAGES)
    assert (len(history.losses), history.saved) == (2, None)
    assert "the ranks keep what they have learned" in monitor.numbers.value
    assert not torch.equal(training.state_dict()["0.weight"], before)


def test_a_click_before_a_fit_stops_nothing(training):
    monitor = Monitor(training)
    monitor.stop.click()
    assert len(training.fit(IMAGES).losses) == 4


def test_an_error_is_shown_and_raised(training):
    monitor = Monitor(training)

    def fail() -> None:
        raise RuntimeError("a watcher of one's own has failed")

    Acts(monitor, 2, fail)
    with pytest.raises(RuntimeError):
        training.fit(IMAGES)
    assert "ended by an error: a watcher of one&#x27;s own has failed" in monitor.numbers.value
    assert not list_drawers()


def test_after_a_recovery_with_fewer_ranks_it_shows_those_and_the_error_that_follows(training):
    monitor = Monitor(training)

    def shrink_and_fail() -> None:
        training.plan = Plan(split_size=2, spatial_size=0)
        monitor.handle_event(Recovered("a rank has died", 1, 0))
        raise RankError("another rank has died")

    Acts(monitor, 2, shrink_and_fail)
    with pytest.raises(RankError, match="another rank") as caught:
        training.fit(IMAGES)
    assert not hasattr(caught.value, "__notes__")
    assert monitor.trouble.text == ""
    assert (monitor.progress.plan.ranks, monitor.progress.reports) == (2, ())
    assert "another rank has died" in monitor.numbers.value
    assert "1 of 4 steps done" in monitor.figure.alt


def test_a_recovery_to_the_start_leaves_no_last_step():
    gathered = ProgressRecorder(PLAN, total=10)
    gathered.add(StepResult(0, 0, 4, 1.0, 2.0, None, 0.0), [])
    gathered.add(Recovered("", 0, 0), [])
    assert "step 0 of 10" in format_progress_html(gathered.get_progress("running", True))


def test_a_bad_image_does_not_make_its_step_fast(monkeypatch):
    now = iter([0.0, 4.0, 5.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    gathered = ProgressRecorder(PLAN)
    gathered.add(SkippedImage("a.png: it ends early"), [])
    gathered.add(StepResult(0, 0, 10, 1.0, 2.0, None, 0.0), [])
    assert list(gathered.current.speeds) == [2.0]


class FailsAtTheEnd:
    stops = False

    def begin(self, training, total) -> None: ...

    def handle_event(self, event) -> None:
        if self.error:
            raise self.error

    def end(self, outcome) -> None:
        raise ValueError("cannot show the end")

    def __init__(self, error: Exception | None) -> None:
        self.error = error


def test_what_fails_at_the_end_does_not_hide_why_a_fit_ended(training):
    with pytest.raises(RankError, match="a rank has died") as caught:
        training.fit(IMAGES, monitor=FailsAtTheEnd(RankError("a rank has died")))
    assert "ValueError: cannot show the end" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="cannot show the end"):
        training.fit(IMAGES, monitor=FailsAtTheEnd(None), go_on=False)


def test_what_cannot_be_drawn_at_the_end_leaves_the_history(training, monkeypatch):
    monitor = Monitor(training)

    def fail(progress) -> str:
        raise ValueError("no ink")

    Acts(monitor, 4, lambda: monkeypatch.setattr(module, "format_tables_html", fail))
    assert len(training.fit(IMAGES).losses) == 4
    assert "ValueError: no ink" in monitor.trouble.text


def test_a_closed_monitor_leaves_the_progress_bar_and_is_collected(training, capsys):
    first, monitor = Monitor(training), Monitor(training)
    first.close()
    assert training.monitor is monitor, "another one has taken its place"
    monitor.close()
    assert training.monitor is None
    training.fit(IMAGES, steps=1)
    assert "1/1" in capsys.readouterr().err
    known = weakref.ref(monitor)
    del first, monitor
    gc.collect()
    assert known() is None


@pytest.mark.nightly
def test_it_is_drawn_while_it_runs(training, monkeypatch):
    monitor, drawn = Monitor(training), []
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    real = module.format_progress_html
    monkeypatch.setattr(module, "format_progress_html", lambda progress: drawn.append(progress) or real(progress))
    Acts(monitor, 2, lambda: time.sleep(1.5))
    training.fit(IMAGES)
    live = [progress for progress in drawn if progress.running and progress.losses]
    assert len(live) >= 1
    assert live[0].state == "running"
    assert 0 < len(live[0].losses) < 4


@pytest.mark.nightly
def test_what_cannot_be_drawn_does_not_end_a_training(training, monkeypatch):
    monitor = Monitor(training)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    real = module.format_progress_html

    def fail_while_running(progress):
        if progress.running and progress.losses:
            raise ValueError("no ink")
        return real(progress)

    monkeypatch.setattr(module, "format_progress_html", fail_while_running)
    Acts(monitor, 1, lambda: time.sleep(1.5))
    assert len(training.fit(IMAGES).losses) == 4
    assert "goes on: ValueError: no ink" in monitor.trouble.text


# ---- what is gathered


def test_drawing_is_paced_by_what_it_costs():
    pace, now = RefreshRate(share=1e-9, every_s=0.01), time.perf_counter()
    with pace.begin_refresh() as due:
        assert due
        sum(range(100_000))
    with pace.begin_refresh() as due:
        assert not due, "it would take more than its share"
    cheap = RefreshRate(share=1.0, every_s=0.05)
    turns = 0
    while time.perf_counter() < now + 0.5:
        with cheap.begin_refresh() as due:
            turns += due
    assert 1 < turns <= 11


def test_the_time_that_is_left_is_that_of_the_steps_after_the_first(monkeypatch):
    clock = iter((0.0, 10.0, 12.0, 13.0, 15.0))
    monkeypatch.setattr("mpi4dl_nb.training.progress.time.perf_counter", lambda: next(clock))
    gathered = ProgressRecorder(PLAN, total=10)
    told = StepResult(0, 0, 4, 1.0, 2.0, None, 0.0)
    gathered.add(told, [])
    assert gathered.get_progress("running", True).left_s is None
    gathered.add(told, [])
    assert gathered.get_progress("running", True).left_s == 8 * 2.0
    gathered.add(EpochResult(0, 2, 8, 2.0, 0.0, 2.0, None), [])
    gathered.add(told, [])
    found = gathered.get_progress("running", True)
    assert found.speeds == (0.4, 2.0, 2.0), "judging between epochs is no time of a step"
    assert found.left_s == 7 * 2.5, "but time it takes"
    assert gathered.get_progress("done", False).left_s is None
