"""Predicted bytes of each rank, against those of the tensors that live in it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.rank_memory import predict_rank_memory
from mpi4dl_nb.engines.predict.rank_tally import build_tally
from mpi4dl_nb.engines.program.instructions import SumGradients
from mpi4dl_nb.engines.train.recipe import prepare, sgd
from tests.predict.measured import measure_live_bytes

ADAM = partial(torch.optim.Adam, lr=1e-3)
CASES = {
    "tiles to the loss, Adam": (
        partial(UNet, num_classes=3),
        Plan(split_size=1, num_spatial_parts=3, slice_method="vertical"),
        ADAM,
        2,
    ),
    "zero bubble": (resnet20_v1, Plan(split_size=3, spatial_size=0, parts=4, schedule="zero_bubble"), sgd, 1),
    "zero bubble, computed again": (
        resnet20_v1,
        Plan(split_size=3, spatial_size=0, parts=4, schedule="zero_bubble", checkpoint_activations=True),
        sgd,
        1,
    ),
    "both directions": (resnet20_v1, Plan(split_size=3, spatial_size=0, bidirectional=True, schedule="gems"), sgd, 1),
    "half precision": (resnet20_v1, Plan(split_size=2, spatial_size=1, precision="bfloat16"), sgd, 1),
    "halos behind the interior": (resnet20_v1, Plan(split_size=1, num_spatial_parts=4, overlap_halos=True), sgd, 1),
    "computed again": (resnet20_v1, Plan(split_size=2, spatial_size=1, checkpoint_activations=True), sgd, 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_each_rank_is_as_measured(name):
    model, plan, optimiser, states = CASES[name]
    recipe = prepare(model(), plan, (4, 3, 64, 64), optimiser=optimiser)
    for measured in measure_live_bytes(recipe):
        memory = predict_rank_memory(measured.program, recipe.graph, plan, states)
        assert memory.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.1)
        assert sum(memory.at_peak.values()) == memory.peak_bytes


class Watched(nn.Module):
    """Reads its trained weights a second time, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = torch.sigmoid(self.wide(x.flip(3))).tanh().mean()
        return self.head(self.wide(x) - mean).mean((2, 3))


def test_operators_without_gradients_are_not_counted_as_trained():
    plan = Plan(split_size=1, spatial_size=0)
    recipe = prepare(Watched(), plan, (2, 3, 64, 64))
    (measured,) = measure_live_bytes(recipe)
    tally = build_tally(measured.program, recipe.graph)
    ops = [op for segment in tally.ways[0].segments.values() for op in segment.ops]
    assert [op.gradients for op in ops if op.kind == "convolution"] == [0, 1, 2]
    assert [op.gradients for op in ops if op.kind == "transcendental"] == [0, 0]
    memory = predict_rank_memory(measured.program, recipe.graph, plan, tally=tally)
    assert memory.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.02)


@pytest.mark.nightly
def test_what_is_held_after_each_step_is_as_measured():
    plan = Plan(split_size=2, spatial_size=1)
    recipe = prepare(resnet20_v1(), plan, (2, 3, 64, 64))
    for measured in measure_live_bytes(recipe):
        memory = predict_rank_memory(measured.program, recipe.graph, plan)
        assert memory.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05)
        kinds = [type(step.instruction) for step in measured.program.steps]
        for index in range(kinds.index(SumGradients) if SumGradients in kinds else len(kinds)):
            assert memory.after[index] == pytest.approx(measured.after[index], abs=0.05 * measured.peak_bytes)


@pytest.mark.nightly
def test_computing_again_keeps_less():
    plan = Plan(split_size=1, spatial_size=0)
    graph = prepare(resnet20_v1(), plan, (2, 3, 64, 64)).graph
    (program,) = compile_plan(graph, plan)
    kept, again = (
        predict_rank_memory(program, graph, each) for each in (plan, replace(plan, checkpoint_activations=True))
    )
    assert again.at_peak["activations"] < 0.5 * kept.at_peak["activations"]
