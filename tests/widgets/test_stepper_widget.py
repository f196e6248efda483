"""The stepper without a browser: its controls set, its buttons and keys pressed."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Stepper, Training, show_step
from mpi4dl_nb.engines.errors import PlanError

PLAN = Plan(split_size=2, spatial_size=1, slice_method="1x2", balance=(2, 1))
LAYERS = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        yield cluster


@pytest.fixture
def stepper(cluster) -> Iterator[Stepper]:
    torch.manual_seed(0)
    training = Training(nn.Sequential(*LAYERS), PLAN, cluster, (2, 3, 12, 16))
    found = Stepper(training, torch.randn(2, 3, 12, 16), torch.randint(2, (2, 10, 14)))
    yield found
    found.close()


def list_moved(stepper: Stepper) -> list[bool]:
    return [rank.moved for rank in stepper.stepping.event.ranks]


@pytest.mark.nightly
def test_every_key_does_what_its_name_says(stepper: Stepper):
    def send_key(key: str) -> None:
        stepper.view._handle_event(None, {"key": key}, [])
        assert stepper.trouble.text == stepper.view.trouble == ""

    send_key("n")
    assert stepper.stepping.event.places == (1, 1, 0)
    send_key("l")
    layers = {rank.did.layer for rank in stepper.stepping.event.ranks[:2]}
    assert layers == {"0"}
    send_key("b")
    assert stepper.stepping.event.ranks[0].did.kind == "halo"
    send_key("m")
    assert stepper.stepping.event.ranks[0].next.phase_name == "backward"
    send_key("p")
    assert {rank.did.phase_name for rank in stepper.stepping.event.ranks} == {"backward"}
    send_key("f")
    assert stepper.stepping.done
    assert stepper.stepping.training.steps == 1
    send_key("r")
    assert stepper.stepping.event.places == (0, 0, 0)


def test_one_rank_goes_on_or_the_next(stepper: Stepper):
    stepper._handle_key("n")
    stepper.of.value = 1
    stepper._handle_key("n")
    assert list_moved(stepper) == [False, True, False]
    stepper.of.value = "next"
    stepper._handle_key("n")
    assert list_moved(stepper) == [True, False, False]


@pytest.mark.nightly
def test_the_figure_follows_the_controls(stepper: Stepper):
    stepper.layer.value, stepper.kind.value = "2", "halo"
    stepper._handle_key("b")
    before = stepper.figure.to_png()
    assert "channel 0 of 4, image 0" in stepper.figure.alt
    stepper.channel.value = 3
    stepper.image.value = 1
    assert "channel 3 of 4, image 1" in stepper.figure.alt
    assert stepper.figure.to_png() != before
    assert stepper.message.options[0][0] == "rank 1 → rank 0: rows 0 to 11, columns 8 to 8"
    stepper.message.value = 1
    assert "message 2 of 2" in stepper.figure.alt
    assert stepper.view.alt == stepper.figure.alt


@pytest.mark.nightly
def test_the_gradient_of_what_is_shown(stepper: Stepper):
    stepper.layer.value, stepper.kind.value, stepper.phase.value = "2", "halo", "backward"
    stepper._handle_key("b")
    assert "gradient of relu" in stepper.figure.alt
    assert "gradients were sent back" in stepper.figure.alt
    stepper.show.value = "activation"
    assert "gradient of" not in stepper.figure.alt.partition("message")[0]
    stepper._handle_key("g")
    assert stepper.show.value == "gradient"


def test_what_cannot_be_done_is_reported_and_the_figure_stays(stepper: Stepper):
    stepper.rank.value, stepper.layer.value = 2, "0"
    before = stepper.figure
    stepper._handle_key("b")
    assert "No instruction of the step is of layer='0', rank=2" in stepper.trouble.text
    assert stepper.figure is before
    stepper._handle_key("f")
    stepper._handle_key("n")
    assert "restart" in stepper.trouble.text
    assert stepper.view.trouble == stepper.trouble.text
    stepper._handle_key("r")
    assert stepper.trouble.text == stepper.view.trouble == ""


def test_every_key_of_the_page_is_answered(stepper: Stepper, monkeypatch: pytest.MonkeyPatch):
    sent: list[dict[str, float]] = []
    monkeypatch.setattr(stepper.view, "send", sent.append)
    for asked in (0.25, 0.5):  # the second time there is nothing left to do, and no new frame
        stepper.view._handle_event(None, {"key": "f", "asked": asked}, [])
    assert sent == [{"answered": 0.25}, {"answered": 0.5}]
    for error in (KeyboardInterrupt, RuntimeError):
        monkeypatch.setattr(stepper.stepping, "finish", Mock(side_effect=error))
        with pytest.raises(error):
            stepper.view._handle_event(None, {"key": "f", "asked": 0.75}, [])
        assert sent.pop() == {"answered": 0.75}


def test_other_work_in_a_cell_is_reported(stepper: Stepper, cluster):
    stepper._handle_key("l")
    cluster.call(lambda host: host.world.rank)
    stepper._handle_key("l")
    assert "gave this step up" in stepper.trouble.text
    stepper._handle_key("r")
    assert stepper.trouble.text == ""


def test_the_step_can_be_walked_from_a_cell_as_well(stepper: Stepper):
    stepper.stepping.layer()
    stepper.refresh()
    assert stepper.figure.alt == show_step(stepper.stepping).alt


def test_what_has_run_is_recorded_by_instruction_and_a_restart_begins_a_new_record(stepper: Stepper):
    stepper._handle_key("l")
    numbers = [frame.number for frame in stepper.record.frames]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 1
    assert stepper.view.meta["number"] == numbers[-1]
    stepper.channel.value = 1
    assert [frame.number for frame in stepper.record.frames] == numbers, "another channel is no other instruction"
    assert "channel 1 of" in str(stepper.view.meta["groups"])
    stepper._handle_key("r")
    assert [frame.number for frame in stepper.record.frames] == [0]


def test_no_figure_is_drawn_while_the_ranks_go_on(stepper: Stepper, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mpi4dl_nb.widgets.stepper.draw_step", None)
    for key in "nlnr":
        stepper._handle_key(key)
    assert stepper.trouble.text == ""


def test_a_page_that_comes_later_is_sent_all_frames(stepper: Stepper, monkeypatch: pytest.MonkeyPatch):
    stepper._handle_key("l")
    sent: list[tuple] = []
    monkeypatch.setattr(stepper.view, "send", lambda *message: sent.append(message))
    stepper.view._handle_event(None, {"history": True}, [])
    ((content, buffers),) = sent
    assert [meta["number"] for meta in content["history"]] == [frame.number for frame in stepper.record.frames]
    assert buffers == [frame.values for frame in stepper.record.frames]


def test_every_control_has_a_label(stepper: Stepper):
    rows = [part for part in stepper.children if hasattr(part, "children")]
    assert len(rows) == 2
    for row in rows:
        for control in row.children:
            inner = control.children[0] if hasattr(control, "children") else control
            assert inner.description
    assert [key for key, _, _ in stepper.view.runs] == list("nlmpbfr")
    assert all(name and does for _, name, does in stepper.view.runs)


def test_what_runs_at_once_is_one_frame_that_says_so(stepper: Stepper, monkeypatch: pytest.MonkeyPatch):
    ends = stepper.stepping.order.ends
    stepper._handle_key("n")
    assert [frame.meta["merged"] for frame in stepper.record.frames] == ["", ""]
    stepper._handle_key("f")
    ran = {end - start for start, end in zip((1, 1, 0), ends, strict=True)}
    counts = f"{min(ran)} to {max(ran)}" if len(ran) > 1 else str(max(ran))
    assert f"The last {counts} of them ran at once" in stepper.record.frames[-1].meta["merged"]
    stepper._handle_key("r")
    monkeypatch.setattr("mpi4dl_nb.widgets.stepper.RECORDED", 3)
    stepper._handle_key("p")
    merged = [bool(frame.meta["merged"]) for frame in stepper.record.frames]
    assert merged == [False, True, False, False, False]
    monkeypatch.undo()
    stepper._handle_key("r")
    stepper._handle_key("p")
    assert not any(frame.meta["merged"] for frame in stepper.record.frames)
    assert len(stepper.record.frames) > 5


def test_a_height_that_is_too_low_is_refused(stepper: Stepper):
    with pytest.raises(PlanError, match=r"max_height=20 px is too low for a view\. Give 200 or more"):
        stepper.view.max_height = 20
    stepper.view.max_height = 400
    assert stepper.view.save_view().values["max_height"] == 400
