"""Frames of a debugged step: the values in them are those of the view, and a record stays within its memory."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.draw.step_frame import StepFrame, StepRecord, describe_scene, make_palettes, pack_frame
from mpi4dl_nb.training.step_debugger import StepDebugger
from tests.unpacking import unpack_tables

PLAN = Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(1, 1))
MODEL = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 2, 3)]
SHAPE = 2, 3, 24, 40


@pytest.fixture(scope="module")
def stepping() -> Iterator[StepDebugger]:
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        torch.manual_seed(0)
        training = Training(nn.Sequential(*MODEL), PLAN, cluster, SHAPE)
        yield training.stepping(torch.randn(SHAPE), torch.randint(2, (2, 22, 38)))


def read(frame: StepFrame, place: int) -> np.ndarray:
    values = unpack_tables(frame.values)[place]
    return values["numbers"].reshape(values["high"], values["wide"])


def test_a_frame_has_the_values_of_its_view(stepping: StepDebugger):
    stepping.restart()
    stepping.until(kind="halo", phase="backward")
    view = stepping.view(channel=2)
    frame = pack_frame(view, "step")
    json.dumps(frame.meta, allow_nan=False)  # a page reads no infinite numbers
    for group, packed in zip(view.groups, frame.meta["groups"], strict=True):
        for panel, made in zip(group.panels, packed["panels"], strict=True):
            assert np.array_equal(read(frame, made["values"]), panel.seen.pixels.numpy().astype("f4"))
            assert made["held"][2] - made["held"][0] == panel.extent.held.shape[0]
    assert len(frame.meta["messages"]) == len(view.landed) > 0
    for (transfer, landed), made in zip(view.landed, frame.meta["messages"], strict=True):
        assert (made["source"], made["target"], made["back"]) == (transfer.source, transfer.target, True)
        before, arrived, after = (read(frame, made[name]) for name in ("before", "arrived", "after"))
        assert np.array_equal(after, landed.after.numpy().astype("f4"))
        assert np.allclose(before + arrived, after, atol=1e-6)


def test_pixels_that_are_copied_are_sent_once(stepping: StepDebugger):
    stepping.restart()
    stepping.until(kind="halo", phase="forward")
    for made in pack_frame(stepping.view(), "step").meta["messages"]:
        assert made["after"] == made["arrived"]
        assert made["before"] is None


def test_fills_that_are_infinite_do_not_take_the_scale(stepping: StepDebugger):
    """The window of a maximum is filled with minus infinity beyond the image."""
    stepping.restart()
    stepping.until(kind="halo", layer="3", phase="forward")
    frame = pack_frame(stepping.view(), "step")
    json.dumps(frame.meta, allow_nan=False)


def test_sums_are_listed_with_their_ranks(stepping: StepDebugger):
    stepping.restart()
    stepping.until(kind="all-reduce", phase="forward")
    (told,) = pack_frame(stepping.view(), "step").meta["sums"]
    assert told["group"] == [0, 1, 2, 3]
    assert told["starts"]
    assert told["waits"]


def test_a_sum_has_what_each_rank_held_before_and_the_sum_after(stepping: StepDebugger):
    stepping.restart()
    for phase in ("forward", "backward"):
        stepping.until(kind="all-reduce", phase=phase)
        frame = pack_frame(stepping.view(), "step")
        sums = [told for told in frame.meta["sums"] if told["waits"]]
        assert sums, phase
        for told in sums:
            rows = {side: [read(frame, term[side])[0] for term in told["terms"]] for side in ("before", "after")}
            assert [term["rank"] for term in told["terms"]] == told["group"]
            assert len(rows["before"][0]) == min(2, told["count"])
            for after in rows["after"]:
                assert after == pytest.approx(np.sum(rows["before"], axis=0), rel=1e-5, abs=1e-7)


def test_ranks_are_placed_as_their_tiles_in_the_image(stepping: StepDebugger):
    scene = describe_scene(stepping)
    assert [box["title"] for box in scene["boxes"]] == ["stage 0", "stage 1"]
    assert [(rank["box"], rank["row"], rank["col"]) for rank in scene["ranks"]] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0),
    ]  # fmt: skip
    assert scene["size"] == [24, 40]
    json.dumps(scene)


def test_the_record_of_a_long_step_stays_within_its_memory_and_says_so():
    record = StepRecord(most_bytes=1000)
    kept: set[int] = set()
    for number in range(200):
        kept = (kept | {number}) - set(record.add(StepFrame({"step": "a", "number": number}, bytes(50))))
        assert sum(len(frame.values) for frame in record.frames) <= 1000
        assert {frame.number for frame in record.frames} == kept, "a page forgets what it is told to, and no more"
    assert {0, 197, 198, 199} <= kept
    assert record.note == "180 older frames were dropped, to stay within 1000 bytes"
    record.add(StepFrame({"step": "b", "number": 0}, b""))
    assert (len(record.frames), record.note) == (1, "")


def test_palettes_are_two_of_256_colours():
    assert [len(colours) for colours in unpack_tables(make_palettes())] == [256 * 4, 256 * 4]
