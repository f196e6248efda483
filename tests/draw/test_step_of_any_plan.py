"""A step of every kind of parallelism is seen by instruction: what ranks show is what one process computes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Configurator, Plan, Training, Workbench, show_slicing
from mpi4dl_nb.draw.step_frame import describe_scene, pack_frame
from mpi4dl_nb.draw.stepper import describe_step, show_step
from mpi4dl_nb.engines.train.step_events import StepView

SHAPE = 4, 3, 8, 8
PLANS = {
    "pixels between stages": Plan(split_size=4, spatial_size=0, parts=2, precision="float64"),
    "numbers between stages": Plan(split_size=2, spatial_size=0, balance=(2, 2), data_parallel=2, precision="float64"),
    "both directions": Plan(split_size=4, spatial_size=0, bidirectional=True, parts=2, precision="float64"),
    "tiles, then shared images": Plan(
        split_size=2, spatial_size=1, slice_method="1x2", balance=(1, 3), local_dp=2, precision="float64"
    ),
    "shared images": Plan(split_size=2, spatial_size=0, balance=(2, 2), local_dp=2, precision="float64"),
    "shared numbers": Plan(split_size=2, spatial_size=0, balance=(3, 1), local_dp=2, precision="float64"),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    seen = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*seen, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 120), nn.ReLU(), nn.Linear(120, 3))


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    with Cluster(4, backend="loopback") as cluster:
        yield cluster


def compute_outputs(images: Tensor) -> dict[str, Tensor]:
    """Return what one process computes: the output of each module, by its name."""
    model, found = make_model().double(), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.detach()}))
    model(images.double())
    return found


def count_checked(view: StepView, whole: dict[str, Tensor], batch: int) -> int:
    """Compare all panels of outputs of modules with one process, and return how many these were."""
    checked = 0
    for panel in view.panels:
        did = view.event.ranks[panel.rank].did
        if panel.seen is None or did is None or did.work is None or ".window" in panel.extent.name:
            continue
        if panel.extent.module not in whole:
            continue
        first = did.work.micro_batch * batch
        expected = whole[panel.extent.module][first : first + batch]
        tile = panel.extent.plane.tile
        if panel.extent.axes:
            expected = expected[view.image, min(view.channel, expected.shape[1] - 1)]
        else:
            expected = expected.reshape(len(expected), -1)
        expected = expected[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]
        if panel.seen.block_px == (1, 1):
            assert torch.allclose(panel.seen.pixels, expected, rtol=1e-12, atol=1e-12), panel.extent
            checked += 1
    return checked


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", PLANS)
def test_what_ranks_show_is_what_one_process_computes(four: Cluster, kind: str):
    plan = PLANS[kind]
    images = torch.randn(SHAPE[0] * plan.batches, *SHAPE[1:])
    training = Training(make_model(), plan, four, SHAPE)
    whole, checked, moved = compute_outputs(images), 0, set()
    with training.stepping(images, torch.zeros(len(images), dtype=torch.long)) as stepping:
        json.dumps(describe_scene(stepping))
        batch = SHAPE[0] // plan.parts
        while not stepping.done:
            event = stepping.instruction()
            for image in range(batch):
                view = stepping.view(image=image, channel=1, show="activation")
                checked += count_checked(view, whole, batch)
            frame = pack_frame(stepping.view(image=batch - 1), "step")
            json.dumps(frame.meta, allow_nan=False)
            moved |= {str(transfer) for transfer in event.transfers}
            for transfer, landed in stepping.view().landed:
                if transfer.back and landed.before is not None:
                    assert torch.allclose(landed.before + landed.arrived, landed.after)
            if event.transfers:
                assert describe_step(view, 0)
                assert show_step(stepping).alt
    assert checked > 20
    assert moved


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", PLANS)
def test_every_other_view_of_it_is_drawn(four: Cluster, kind: str):
    training, image = Training(make_model(), PLANS[kind], four, SHAPE), torch.rand(SHAPE[1:])
    batch = SHAPE[0] * training.plan.batches
    training.step(torch.randn(batch, *SHAPE[1:]), torch.zeros(batch, dtype=torch.long))
    workbench = Workbench(training, image)
    for rank in range(4):
        workbench.selection.rank = rank
        assert workbench.figure.alt
        assert workbench.timeline.figure.alt
        assert "fullest" in workbench.memory.alt
    configurator = Configurator(make_model(), SHAPE, four, training.plan)
    assert configurator.wait()
    assert configurator.figure.alt
    for widget in (workbench, configurator):
        widget.close()


class TokenNorm(nn.Module):
    """A batch norm of tokens, between two segments of each rank, so that the tokens are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.norm(x.flatten(2)).reshape(x.shape)).mean((2, 3))


def test_tokens_are_shown_as_the_pixels_that_they_are(four: Cluster):
    torch.manual_seed(0)
    model, images = TokenNorm(), torch.randn(SHAPE)
    expected = model.double().first(images.double()).detach()
    plan = Plan(split_size=1, spatial_size=1, slice_method="2x2", precision="float64")
    training, shown = Training(model, plan, four, SHAPE), 0
    with training.stepping(images, torch.zeros(len(images), dtype=torch.long)) as stepping:
        while not stepping.done:
            stepping.instruction()
            for panel in stepping.view(image=1, channel=2, show="activation").panels:
                if panel.seen is not None and panel.extent.split_shape:
                    tile = panel.extent.plane.tile
                    pixels = expected[1, 2, tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]
                    assert torch.allclose(panel.seen.pixels, pixels, rtol=1e-12, atol=1e-12)
                    shown += 1
            assert show_step(stepping).alt
            if shown == 4:  # all ranks have made their tokens
                tokens = stepping.tensor("flatten")
                assert torch.allclose(tokens, expected.flatten(2), rtol=1e-12, atol=1e-12)
    assert shown >= 4


def test_ranks_that_share_images_have_one_tile():
    figure = show_slicing(torch.rand(3, 8, 8), PLANS["shared images"])
    assert "in 1x1 tile on each of 2 ranks, which share the images" in figure.alt
