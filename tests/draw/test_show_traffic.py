"""The figure of what plans send has the programs' own numbers."""

from __future__ import annotations

import pytest
import torch
from legible import find_unreadable, read
from torch import nn

from mpi4dl_nb import show_traffic
from mpi4dl_nb.engines.compiler import trace_cache
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.models import resnet_v2
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.program import count_traffic
from mpi4dl_nb.engines.train.recipe import prepare

SHAPE = (1, 3, 64, 80)
PLANS = {
    "before each layer": Plan(split_size=2, num_spatial_parts=4),
    "once for two blocks": Plan(split_size=2, num_spatial_parts=4, halo_d2=True, fused_layers=2),
    "no tiles": Plan(split_size=2, spatial_size=0),
}


@pytest.fixture(scope="module")
def figure():
    return show_traffic(resnet_v2(29), PLANS, SHAPE)


@pytest.mark.nightly
def test_it_tells_what_the_busiest_rank_sends(figure):
    for name, plan in PLANS.items():
        programs = compile_plan(prepare(resnet_v2(29), plan, SHAPE).graph, plan)
        busiest = max(map(count_traffic, programs), key=lambda parts: sum(part.bytes for part in parts.values()))
        said = figure.alt.split(f"{name}: ")[1].split(";")[0]
        for part in busiest.values():
            assert f"{part.messages} messages" in said
        assert str(sum(part.messages for part in busiest.values())) in read(figure)


@pytest.mark.nightly
def test_it_is_legible(figure):
    assert find_unreadable(figure) == []


def test_a_loss_of_other_labels_is_traced_once_for_all_plans(monkeypatch):
    traced = []
    monkeypatch.setattr(trace_cache, "trace", lambda *args: traced.append(args) or trace(*args))
    plans = {"two": Plan(split_size=1, slice_method="1x2"), "four": Plan(split_size=1, slice_method="2x2")}
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1))
    told = show_traffic(model, plans, (2, 3, 16, 16), nn.BCEWithLogitsLoss(), torch.zeros(2, 1, 16, 16)).alt
    assert "two: " in told
    assert "four: " in told
    assert len(traced) == 1


def test_without_a_plan():
    with pytest.raises(PlanError, match="no plan to show"):
        show_traffic(resnet_v2(29), {}, SHAPE)
