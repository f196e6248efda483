"""A debugged step over volumes: what is shown of each rank's values and of each message is a plane of the tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from legible import find_unreadable
from torch import nn

from mpi4dl_nb import Cluster, Plan, Stepper, Training, show_step
from mpi4dl_nb.draw.step_frame import describe_scene
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.train.step_events import EmptyPanel, RankPanel

SIZES = (6, 10, 12)
VOLUMES = torch.arange(2 * 6 * 10 * 12, dtype=torch.float32).reshape(1, 2, *SIZES)
LABELS = torch.tensor([1])


def make_net(conv: type[nn.Module], pool: nn.Module) -> nn.Module:
    layers = [conv(2, 2, 3, padding=1), nn.ReLU(), conv(2, 2, 3, 2, 1), conv(2, 2, 3, padding=1)]
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(2, 2))


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    plan = Plan(split_size=1, slice_method="2x1x2")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        yield Training(make_net(nn.Conv3d, nn.AdaptiveAvgPool3d(1)), plan, cluster, (1, 2, *SIZES))


@pytest.mark.parametrize("plane", [0, 2, 3, 5])
def test_the_panels_have_the_plane_of_the_tensor(training, plane):
    with training.stepping(VOLUMES, LABELS) as stepping:
        for _ in range(2):  # the images; the windows of the first layer
            view = stepping.view(channel=1, plane=plane)
            shown = [panel for panel in view.panels if isinstance(panel, RankPanel)]
            assert {panel.rank for panel in shown} >= ({0, 1} if plane < 3 else {2, 3})
            for panel in shown:
                assert panel.extent.depth.at == plane
                inside = panel.extent.held & panel.extent.whole_plane
                values = panel.seen.pixels[inside.to_slices(panel.extent.held)]
                assert torch.equal(values, VOLUMES[0, 1, plane][inside.to_slices(panel.extent.whole_plane)].double())
            for panel in view.panels:
                if isinstance(panel, EmptyPanel):
                    assert f"not plane {plane}" in panel.why
            stepping.until(kind="halo")


def test_a_message_shows_its_plane_that_is_nearest(training):
    with training.stepping(VOLUMES, LABELS) as stepping:
        stepping.until(kind="halo")
        view = stepping.view(plane=1)
        assert len(view.landed) == 12
        for transfer, landed in view.landed:
            planes = transfer.move.tile[0]
            assert transfer.plane.depth.at == min(max(1, planes.start), planes.stop - 1)
            rows, cols = transfer.plane.tile
            sent = VOLUMES[0, 0, transfer.plane.depth.at, rows.start : rows.stop, cols.start : cols.stop]
            assert torch.equal(landed.arrived, sent.double())


def test_a_smaller_value_shows_the_plane_at_the_same_place(training):
    with training.stepping(VOLUMES, LABELS) as stepping:
        for _ in range(3):  # the last layer reads half as many planes
            stepping.until(kind="halo")
        planes = {panel.extent.depth.at for panel in stepping.view(plane=4).panels if isinstance(panel, RankPanel)}
        assert planes == {2}


def test_figures_say_which_plane_is_drawn(training):
    with training.stepping(VOLUMES, LABELS) as stepping:
        stepping.until(kind="halo")
        figure = show_step(stepping)
        assert "channel 0 of 2, image 0, plane 3" in figure.alt
        assert "pixels have moved, plane 2 shown" in figure.alt
        assert "3 × 10 × 1 px, 240 bytes with all channels" in figure.alt
        assert find_unreadable(figure) == []
        assert describe_scene(stepping)["size"] == [20, 12]
        for plane in (-1, 6, 1.5):
            with pytest.raises(PlanError, match=f"plane={plane} is none of the 6 planes: use 0 to 5"):
                show_step(stepping, plane=plane)


def test_the_widget_has_a_slider_through_the_planes(training):
    stepper = Stepper(training, VOLUMES, LABELS)
    assert (stepper.plane.value, stepper.plane._box.max) == (3, 5)
    stepper.plane.value = 1
    assert "plane 1" in " ".join(stepper.view.meta["groups"][0]["title"])
    assert [panel["rank"] for panel in stepper.view.meta["groups"][0]["panels"]] == [0, 1]
    assert set(stepper.view.meta["empty"]) == {2, 3}
    stepper.record_step()
    assert stepper.stepping.done
    stepper.close()


def test_what_has_no_planes_is_refused():
    plan = Plan(split_size=1, slice_method="2")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(make_net(nn.Conv1d, nn.AdaptiveAvgPool1d(1)), plan, cluster, (1, 2, 20))
        with training.stepping(torch.rand(1, 2, 20), LABELS) as stepping, pytest.raises(PlanError, match="no rows"):
            show_step(stepping)
        with pytest.raises(PlanError, match="The values of signals"):
            Stepper(training, torch.rand(1, 2, 20), LABELS)


def test_a_picture_has_no_plane():
    plan = Plan(split_size=1, slice_method="1x2")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(make_net(nn.Conv2d, nn.AdaptiveAvgPool2d(1)), plan, cluster, (1, 2, 8, 8))
        with (
            training.stepping(torch.rand(1, 2, 8, 8), LABELS) as stepping,
            pytest.raises(PlanError, match="of volumes"),
        ):
            show_step(stepping, plane=0)
