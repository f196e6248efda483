"""The site's saved pages: an exchange of halos and one page of each widget, on a stained tissue, without a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from mpi4dl_nb import (
    MACHINES,
    Cluster,
    Configurator,
    Plan,
    Slicer,
    Stepper,
    TimelineView,
    Training,
    Tuner,
    Workbench,
    crop_picture,
    forecast,
    immunohistochemistry,
    open_image,
    resnet20_v1,
)

TISSUE = open_image(immunohistochemistry())
PLAN = Plan(split_size=2, slice_method="2x2")
STEP_PX = 64  # of the image that ranks compute with
CROP = crop_picture(TISSUE, *((px - STEP_PX) // 2 for px in TISSUE.shape()), STEP_PX, STEP_PX)
MACHINE, BATCH_SHAPE = "DGX A100", (4, 3, 512, 512)  # of predictions


def train_on_tissue(cluster: Cluster) -> tuple[Training, torch.Tensor, torch.Tensor]:
    """Return a training, and a batch of one image: the middle of the tissue."""
    pixels = torch.from_numpy(CROP.read(0, 0, STEP_PX, STEP_PX)).permute(2, 0, 1)[None] / 255
    torch.manual_seed(0)
    return Training(resnet20_v1(num_classes=2), PLAN, cluster, tuple(pixels.shape)), pixels, torch.tensor([1])


def save_slicer(path: Path) -> None:
    """Save the tissue in tiles, with the halos of a network."""
    with closing(Slicer(TISSUE, PLAN, resnet20_v1(num_classes=2))) as slicer:
        slicer.save_page(path, title="Tiles and halos of a tissue")


def save_exchange(path: Path) -> None:
    """Save a step of a small network with wide halos, on four tiles of the tissue's middle."""
    high_px, wide_px, reach_px = 48, 64, 4
    crop = crop_picture(TISSUE, 100, 200, high_px, wide_px)
    pixels = torch.from_numpy(crop.read(0, 0, high_px, wide_px)).permute(2, 0, 1)[None] / 255
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 2 * reach_px + 1, padding=reach_px),
        nn.ReLU(),
        nn.Conv2d(4, 2, 2 * reach_px + 1, padding=reach_px),
    )
    plan = Plan(split_size=1, slice_method="2x2")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(model, plan, cluster, tuple(pixels.shape))
        with closing(Stepper(training, pixels, torch.randint(2, (1, high_px, wide_px)))) as stepper:
            stepper.record_step()
            stepper.save_page(path, title="Halos of a tissue in four tiles, forward and backward")


def save_stepper(path: Path) -> None:
    """Save a training step of five ranks, instruction by instruction."""
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        training, *batch = train_on_tissue(cluster)
        with closing(Stepper(training, *batch)) as stepper:
            stepper.record_step()
            stepper.save_page(path, title="A training step on a tissue in four tiles")


def save_timeline(path: Path) -> None:
    """Save the predicted timeline of a pipeline with four micro-batches."""
    plan = Plan(split_size=3, slice_method="2x2", parts=4, schedule="1f1b")
    timeline = forecast(resnet20_v1(), plan, BATCH_SHAPE, MACHINE).timeline
    with closing(TimelineView(timeline, plan)) as view:
        view.save_page(path, title="A step on six ranks, predicted")


def save_configurator(path: Path) -> None:
    """Save a plan, its options, and what they cost."""
    with closing(Configurator(resnet20_v1(), BATCH_SHAPE, plan=PLAN, machine=MACHINE)) as configurator:
        configurator.save_page(path, title="A plan and its cost")


def save_tuner(path: Path) -> None:
    """Save all plans for four ranks by time and memory."""
    with Cluster(4, backend="loopback") as cluster:
        cluster.machine = replace(MACHINES[MACHINE], ranks=cluster.n)
        with closing(Tuner(resnet20_v1(), BATCH_SHAPE, cluster, progress=False)) as tuner:
            tuner.save_page(path, title="All plans for four ranks")


def save_workbench(path: Path) -> None:
    """Save all views of a step with one selection."""
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        training, *batch = train_on_tissue(cluster)
        training.step(*batch)
        with closing(Workbench(training, CROP)) as workbench:
            workbench.save_page(path, title="Image, network, timeline and memory of a step")


SAVERS: Mapping[str, Callable[[Path], None]] = {
    "slicer": save_slicer,
    "exchange": save_exchange,
    "stepper": save_stepper,
    "timeline": save_timeline,
    "configurator": save_configurator,
    "tuner": save_tuner,
    "workbench": save_workbench,
}


def save_pages(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, save in SAVERS.items():
        save(folder / f"{name}.html")
