"""The workbench: one selection, which every view shows and sets."""

from __future__ import annotations

import pytest
import torch

from mpi4dl_nb import Cluster, Plan, PlanError, Training, UNet3d, Workbench, resnet20_v1, save_page

PLAN = Plan(split_size=2, spatial_size=2, num_spatial_parts=(4, 2), slice_method=("square", "vertical"))


@pytest.fixture(scope="module")
def workbench():
    torch.manual_seed(0)
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        training = Training(resnet20_v1(), PLAN, cluster, (1, 3, 64, 64))
        made = Workbench(training, torch.rand(3, 64, 64))
        assert made.timeline is None
        training.step(torch.rand(1, 3, 64, 64), torch.tensor([3]))
        made.refresh()
        yield made


def test_a_bar_of_the_timeline_lights_up_its_tile_and_memory(workbench):
    events = workbench.timeline.timeline.events
    layers = workbench.timeline.timeline.layers
    number = next(n for n, each in enumerate(events) if each.rank == 5 and each.kind == "halo")
    workbench.timeline.selected = number
    assert workbench.selection.rank == 5
    assert workbench.selection.event == number
    point = workbench.slicer.point
    assert point.ranks.ranks[workbench.slicer.tile.value] == 5
    assert any(layers[events[number].name].startswith(node.module) for node in point.readers)
    assert "Rank 5 is fullest" in workbench.memory.alt


def test_a_tile_leads_to_its_rank(workbench):
    workbench.slicer.layer.value = 0
    workbench.slicer.tile.value = 2
    assert workbench.selection.rank == workbench.timeline.rank == 2
    assert workbench.selection.layer == workbench.slicer.point.name
    assert "Rank 2 is fullest" in workbench.memory.alt


def test_code_selects_too(workbench):
    workbench.selection.rank = 4
    assert workbench.slicer.point.stage == 1
    assert workbench.slicer.tile.value == 0
    assert workbench.timeline.rank == 4
    workbench.selection.layer = "blocks.1"
    assert workbench.slicer.point.name.startswith("blocks.1")
    assert workbench.selection.rank == workbench.timeline.rank == 0


def test_a_newer_step_is_taken_over(workbench):
    before = workbench.timeline.timeline
    workbench.training.step(torch.rand(1, 3, 64, 64), torch.tensor([3]))
    workbench.refresh()
    assert workbench.timeline.timeline.events != before.events
    assert workbench.timeline in workbench.children


@pytest.mark.parametrize("name", ["rank", "event"])
def test_what_is_not_there_is_refused_before_it_is_selected(workbench, name):
    before = getattr(workbench.selection, name)
    with pytest.raises(PlanError, match=f"{name}=99999 does not exist: there are [0-9]+ {name}s"):
        setattr(workbench.selection, name, 99999)
    assert getattr(workbench.selection, name) == before
    workbench.refresh()
    workbench.selection.rank = 0
    assert workbench.slicer.tile.value == 0


def test_a_volume_is_shown_with_its_step(tmp_path):
    plan, sizes = Plan(split_size=2, num_spatial_parts=4, slice_method="2x1x2"), (8, 12, 16)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(UNet3d(width=4, depth=1), plan, cluster, (1, 1, *sizes))
        training.step(torch.rand(1, 1, *sizes), torch.randint(2, (1, *sizes)))
        workbench = Workbench(training, torch.rand(1, *sizes))
        workbench.selection.rank = 3
        assert workbench.slicer.tile.value == workbench.timeline.rank == 3
        events = workbench.timeline.timeline.events
        workbench.timeline.selected = next(n for n, event in enumerate(events) if event.rank == 2)
        assert workbench.slicer.tile.value == workbench.selection.rank == 2
        assert "Rank 2 is fullest" in workbench.memory.alt
        assert "2x1x2 tiles on ranks 0 to 3" in workbench.figure.alt
        save_page(workbench, tmp_path / "volume.html")
        workbench.close()


@pytest.mark.nightly
def test_another_plan_that_was_loaded_is_taken_over(tmp_path):
    torch.manual_seed(0)
    before, after = Plan(split_size=1, slice_method="1x2"), Plan(split_size=2, spatial_size=0)
    with Cluster(2, backend="loopback") as cluster:
        training = Training(resnet20_v1(), before, cluster, (1, 3, 32, 32))
        training.step(torch.rand(1, 3, 32, 32), torch.tensor([3]))
        workbench = Workbench(training, torch.rand(3, 32, 32))
        workbench.selection.rank = 1
        workbench.slicer.layer.value = 1
        training.load(training.save(tmp_path), after)
        workbench.refresh()
        assert workbench.slicer.plan == after
        assert (workbench.selection.rank, workbench.timeline) == (-1, None)
        training.step(torch.rand(1, 3, 32, 32), torch.tensor([3]))
        workbench.refresh()
        assert workbench.timeline.plan == after
        workbench.selection.rank = 0
        assert workbench.timeline.rank == 0
    assert workbench.children == (workbench.slicer, workbench.timeline, workbench.memory)
    assert workbench.memory.layout.grid_column == "1 / -1"
