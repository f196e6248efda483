"""What a walked step looks like, on figures that no widget is needed for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Training, show_step
from mpi4dl_nb.draw.stepper import format_step_label
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.training.step_debugger import StepDebugger
from tests.draw.legible import find_unreadable, read

PLAN = Plan(split_size=2, spatial_size=1, slice_method="2x2", parts=2, schedule="1f1b", balance=(6, 5))
IMAGES = torch.randn(4, 3, 48, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stepping() -> Iterator[StepDebugger]:
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        torch.manual_seed(0)
        training = Training(resnet20_v1(), PLAN, cluster, (4, 3, 48, 64))
        yield training.stepping(IMAGES, torch.tensor([1, 2, 3, 4]))


def go_to_start(stepping: StepDebugger) -> None:
    stepping.restart()


def go_to_halo(stepping: StepDebugger) -> None:
    stepping.restart()
    stepping.until(layer="blocks.1", kind="halo")


def go_to_moments(stepping: StepDebugger) -> None:
    stepping.restart()
    stepping.until(kind="all-reduce")


def go_to_joint(stepping: StepDebugger) -> None:
    stepping.restart()
    stepping.until(kind="stage", rank=4)


def go_to_return(stepping: StepDebugger) -> None:
    stepping.restart()
    stepping.until(kind="halo", phase="backward")


def go_to_end(stepping: StepDebugger) -> None:
    stepping.finish()


@pytest.mark.nightly
@pytest.mark.parametrize("go", [go_to_start, go_to_halo, go_to_moments, go_to_joint, go_to_return, go_to_end])
def test_all_that_is_written_can_be_read(stepping, go):
    go(stepping)
    figure = show_step(stepping)
    assert find_unreadable(figure) == []
    for rank in stepping.event.ranks:
        assert f"Rank {rank.rank} ({rank.role}) did {format_step_label(rank.did, 'nothing yet')}" in figure.alt


@pytest.mark.nightly
def test_a_halo_is_shown_with_its_values(stepping):
    go_to_halo(stepping)
    view, figure = stepping.view(channel=3), show_step(stepping, channel=3, message=1)
    transfer, landed = view.landed[1]
    text = read(figure)
    assert "message 2 of 12: pixels have moved" in text
    assert f"rank {transfer.source} → rank {transfer.target}" in text
    assert "no values yet" in text
    width = landed.arrived.shape[1]
    middle = float(landed.arrived.flatten()[max(0, (width - 5) // 2)])
    assert f"{middle:.3g}" in text
    assert "striped: borrowed pixels, dotted: padding" in text
    assert f"{middle:.4g}" in figure.alt


def test_before_the_first_instruction_the_images_are_seen(stepping):
    go_to_start(stepping)
    (images,) = stepping.view().groups
    assert [panel.rank for panel in images.panels] == [0, 1, 2, 3]
    assert torch.equal(images.panels[3].seen.pixels.float(), IMAGES[0, 0, 24:, 32:])
    assert stepping.view().panels[4].why == "nothing has come to it yet"


def test_tiles_lie_beside_each_other(stepping):
    go_to_start(stepping)
    left, right = (next(a for a in show_step(stepping).axes if a.get_title() == f"rank {rank}") for rank in (0, 1))
    sides = [axes.get_position(original=True) for axes in (left, right)]
    assert 0 < sides[1].x0 - sides[0].x1 < 0.06  # of the figure: they read as one picture


def test_what_has_no_image_says_why_once(stepping):
    go_to_end(stepping)
    assert "The weights have moved" in read(show_step(stepping))
    go_to_start(stepping)
    stepping.phase()
    stepping.phase()
    stepping.until(kind="all-reduce", phase="update")
    text = read(show_step(stepping))
    assert "ranks 0 to 3: all-reduce: the weights, no image" in text
    assert text.count("no image") == 1


def test_one_value_has_one_scale_on_all_ranks(stepping):
    go_to_halo(stepping)
    figure, view = show_step(stepping), stepping.view()
    images = [image for axes in figure.axes for image in axes.get_images() if "rank" in axes.get_title()]
    assert len(images) == 4
    assert {image.get_clim() for image in images} == {view.groups[0].span}
    assert view.groups[0].span == (
        min(float(p.seen.pixels.min()) for p in view.groups[0].panels),
        max(float(p.seen.pixels.max()) for p in view.groups[0].panels),
    )


def test_the_bars_move_along_the_schedule(stepping):
    go_to_start(stepping)
    times = [[rank.time for rank in stepping.event.ranks]]
    while not stepping.done:
        stepping.micro_batch()
        times.append([rank.time for rank in stepping.event.ranks])
    assert times[0] == [0.0] * 5
    assert all(a <= b for one, other in pairwise(times) for a, b in zip(one, other, strict=True))
    assert times[1][:4] == [1.0] * 4  # the first micro-batch has gone through the tiles
    assert times[-1][:4] == [stepping.schedule.length] * 4


def test_large_pictures_are_sent_as_means(stepping):
    go_to_halo(stepping)
    view = stepping.view(bound_px=8)
    whole = stepping.view()
    for small, full in zip(view.groups[0].panels, whole.groups[0].panels, strict=True):
        assert max(small.seen.pixels.shape) <= 8
        assert max(small.seen.block_px) > 1
        assert float(small.seen.pixels.mean()) == pytest.approx(float(full.seen.pixels.mean()), rel=0.2)
    for small, full in (
        (small.seen, full.seen)
        for bound_px in (3, 5)
        for small, full in zip(stepping.view(bound_px=bound_px).groups[0].panels, whole.groups[0].panels, strict=True)
    ):
        (rows, cols), (height, width) = small.block_px, full.pixels.shape
        last = full.pixels[(height - 1) // rows * rows :, (width - 1) // cols * cols :]
        assert float(small.pixels[-1, -1]) == pytest.approx(float(last.mean()), rel=1e-9)
    assert "means of" in show_step(stepping).alt or whole.groups[0].panels[0].seen.block_px == (1, 1)


@pytest.mark.nightly
def test_many_ranks_are_drawn():
    plan = Plan(split_size=1, spatial_size=1, slice_method="4x4")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
        training = Training(model, plan, cluster, (1, 3, 32, 32))
        stepping = training.stepping(torch.randn(1, 3, 32, 32), torch.zeros(1, 32, 32, dtype=torch.long))
        stepping.until(layer="2", kind="halo")
        assert "Rank 15" in show_step(stepping).alt
