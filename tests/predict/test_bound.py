"""Bounds are none of the truth's, but on its right side: a search that trusts them finds what a full one finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.errors import PlanError
from engines.graph.trace_cache import TraceCache
from engines.models import resnet20_v1
from engines.plan import Plan
from engines.predict import search as searching
from engines.predict.cost import CostModel
from engines.predict.forecast import forecast
from engines.predict.lower_bound import BoundCalculator
from engines.predict.machines import get_machine
from engines.predict.search import generate_plans, search
from tests.predict.test_folding import APART
from tests.zoo import Skips

DEVICES = replace(APART, node_ranks=6)
CASES = {
    "own devices": (Skips, (2, 3, 32, 32), DEVICES, 6, 0.6),
    "two levels": (Skips, (4, 3, 32, 32), replace(DEVICES, sums="two_level", instruction_s=1e-6), 8, 0.6),
    "shared cores": (Skips, (4, 3, 32, 32), replace(DEVICES, node_ranks=None, between=None, cores=2), 4, 1.0),
    "a real model": (resnet20_v1, (2, 3, 32, 32), DEVICES, 3, 0.9),
    "hosts that start kernels": (resnet20_v1, (2, 3, 512, 512), get_machine("Lassen"), 3, 1.1),
}


@pytest.fixture(scope="module")
def traces():
    return {
        (model, shape): TraceCache(model(), shape, torch.nn.CrossEntropyLoss()) for model, shape, *_ in CASES.values()
    }


@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_faster_or_smaller_than_its_bound_and_the_best_are_found(name, traces, monkeypatch):
    model, shape, asked, ranks, most = CASES[name]
    graph_of = traces[model, shape].get_graph
    everything = search(ranks, shape[0], graph_of, asked)
    bounds = BoundCalculator(graph_of, CostModel(asked), 1)
    lean = [replace(plan, checkpoint_activations=True) for plan in generate_plans(ranks, shape[0])]
    for found in (*everything.fitting, *search(ranks, shape[0], graph_of, asked, asked=lean).fitting):
        bound = bounds.compute_bound(found.plan)
        assert bound.seconds <= found.seconds
        assert bound.peak_bytes <= found.peak_bytes
        assert bound.images == found.images
    simulated = []
    monkeypatch.setattr(searching, "forecast", lambda *args: simulated.append(1) or forecast(*args))
    few = search(ranks, shape[0], graph_of, asked, best=4)
    assert [each.images_per_s for each in few.fitting[:4]] == [each.images_per_s for each in everything.fitting[:4]]
    assert len(simulated) < most * len(everything.fitting)
    assert {bound.plan for bound in few.bounded} | {each.plan for each in few.fitting} >= {
        each.plan for each in everything.fitting
    }


def test_where_memory_is_short_the_best_of_what_fits_is_found(traces):
    model, shape, asked, ranks, _ = CASES["own devices"]
    graph_of, seen = traces[model, shape].get_graph, []
    lean = [replace(plan, checkpoint_activations=True) for plan in generate_plans(ranks, shape[0])]
    sizes = sorted(each.peak_bytes for each in search(ranks, shape[0], graph_of, asked, asked=lean).fitting)
    rank_bytes = sizes[len(sizes) // 4]
    whole = search(ranks, shape[0], graph_of, asked, rank_bytes)
    few = search(ranks, shape[0], graph_of, asked, rank_bytes, best=3, seen=lambda *counts: seen.append(counts))
    assert [each.images_per_s for each in few.fitting[:3]] == [each.images_per_s for each in whole.fitting[:3]]
    assert seen[-1] == (len(list(generate_plans(ranks, shape[0]))),) * 2
    with pytest.raises(PlanError, match="No plan for 6 ranks fits: the smallest needs"):
        search(ranks, shape[0], graph_of, asked, 10, best=3)


def test_what_cannot_be_cut_is_refused_with_its_reason_and_never_compiled(traces, monkeypatch):
    model, shape, devices, *_ = CASES["own devices"]
    monkeypatch.setattr(searching, "forecast", forecast)
    asked = [Plan(split_size=9, spatial_size=0), Plan(split_size=1, spatial_size=0, data_parallel=9)]
    found = search(9, shape[0], traces[model, shape].get_graph, devices, asked=asked, best=1)
    assert [plan for plan, _ in found.refused] == asked[:1]
    assert "the model has only 5 layers" in found.refused[0][1]
