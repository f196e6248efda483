"""A name that does not exist is refused with the names near it, wherever a user gives one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from PIL import Image

from mpi4dl_nb import (
    Cluster,
    ImageError,
    Plan,
    PlanError,
    Sizes,
    Training,
    capabilities,
    compute_bubble_share,
    find_halo_points,
    folder_images,
    forecast,
    largest_image,
    resnet20_v1,
    scaling,
    show_slicing,
)
from mpi4dl_nb.draw.halo_points import find_point
from mpi4dl_nb.engines.compiler.receptive import ReceptiveFields
from mpi4dl_nb.engines.train.asynchrony import Asynchrony
from mpi4dl_nb.training.step_debugger import StepDebugger

PLAN, SHAPE = Plan(split_size=1, slice_method="1x2"), (1, 3, 32, 32)
MODEL = Sizes(resnet20_v1())


def make_graph():
    return MODEL.graph(PLAN, SHAPE)


ASKED: dict[str, tuple[Callable[[], object], str]] = {
    "schedule of a plan": (lambda: Plan(schedule="1f1"), "1f1b"),
    "slice method": (lambda: Plan(slice_method="vertcal"), "vertical"),
    "precision": (lambda: Plan(precision="float46"), "float64"),
    "schedule of a formula": (lambda: compute_bubble_share("zerobubble", 2, 4), "zero_bubble"),
    "machine of a forecast": (lambda: forecast(MODEL, PLAN, SHAPE, "Sumit"), "Summit"),
    "machine of a limit": (lambda: largest_image(MODEL, PLAN, "Lasen"), "Lassen"),
    "how of a scaling": (lambda: scaling(MODEL, "Summit", PLAN, SHAPE, how="week"), "weak"),
    "backend": (lambda: Cluster(2, backend="lopback"), "loopback"),
    "layer of a figure": (
        lambda: show_slicing(torch.rand(3, 32, 32), PLAN, make_graph(), layer="blocks.00"),
        "blocks.0",
    ),
    "layer of halo points": (lambda: find_point(find_halo_points(make_graph(), PLAN), "block.1"), "blocks.1"),
    "value of a receptive field": (lambda: ReceptiveFields(make_graph()).get_size_px("conv2"), "conv2d"),
    "mode of replicas": (lambda: Asynchrony(mode="synchronus", replicas=2, steps=1), "synchronous"),
    "kind of parallelism": (
        lambda: (
            capabilities(MODEL, "Summit", 1, (32,), 1, asked=[Plan(split_size=1, spatial_size=0)])
            .by_size[32]
            .get_verdict("spacial")
        ),
        "spatial",
    ),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_near_name_is_proposed(what: str):
    ask, near = ASKED[what]
    with pytest.raises(PlanError, match=f"Did you mean '{near}'"):
        ask()


def test_a_near_name_of_an_option_of_images_is_proposed(tmp_path):
    (tmp_path / "tumour").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "tumour" / "a.png")
    with pytest.raises(ImageError, match="Did you mean 'scale'"):
        folder_images(tmp_path, (8, 8), fit="scales")


def test_a_rank_outside_a_stage_is_refused():
    (point, *_) = find_halo_points(make_graph(), PLAN)
    for ask in (point.compute_widths, point.get_receives, point.get_window):
        with pytest.raises(PlanError, match=r"rank=2 is none of the ranks of stage 0\. Use one of 0, 1\."):
            ask(2)


@pytest.fixture(scope="module")
def debugger() -> Iterator[StepDebugger]:
    with Cluster(2, backend="loopback") as cluster:
        training = Training(resnet20_v1(), PLAN, cluster, (2, 3, 32, 32))
        with training.stepping(torch.randn(2, 3, 32, 32), torch.tensor([3, 7])) as made:
            yield made


STEPS: dict[str, tuple[Callable[[StepDebugger], object], str]] = {
    "layer": (lambda step: step.until(layer="blocks.00"), "blocks.0"),
    "kind": (lambda step: step.until(kind="halos"), "halo"),
    "phase": (lambda step: step.until(phase="back"), "backward"),
    "unit": (lambda step: step.go("layers"), "layer"),
    "value": (lambda step: step.tensor("image"), "images"),
    "module": (lambda step: step.tensor("block.1"), "blocks.1"),
    "view": (lambda step: step.view(show="gradients"), "gradient"),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_debugged_step_proposes_near_names(debugger: StepDebugger, what: str):
    ask, near = STEPS[what]
    with pytest.raises(PlanError, match=f"Did you mean '{near}"):
        ask(debugger)


def test_names_that_exist_but_never_together_are_said_so(debugger: StepDebugger):
    with pytest.raises(
        PlanError, match=r"No instruction .* layer='blocks.0', rank=7\. .* ranks 0 to 1 and micro-batches"
    ):
        debugger.until(layer="blocks.0", rank=7)
