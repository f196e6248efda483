"""The figure of what plans send has the programs' own numbers."""

from __future__ import annotations

import pytest
from legible import read, unreadable

from engines.errors import PlanError
from engines.models import resnet_v2
from engines.plan import Plan
from engines.program.compile import compile_plan
from engines.program.program import count_traffic
from engines.train.recipe import prepare
from mpi4dl_nb import show_traffic

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
    assert unreadable(figure) == []


def test_without_a_plan():
    with pytest.raises(PlanError, match="no plan to show"):
        show_traffic(resnet_v2(29), {}, SHAPE)
