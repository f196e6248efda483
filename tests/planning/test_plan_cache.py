"""The cache of compiled plans: the same programs and forecasts as without it, for any size of the images."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from mpi4dl_nb import show_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import count_load, forecast, with_time
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.train.recipe import Task
from mpi4dl_nb.planning.plan_cache import PlanCache

SHAPE = (2, 3, 32, 32)
PLAN = Plan(split_size=2, slice_method="2x2", data_parallel=2)


@pytest.fixture(scope="module")
def plans() -> PlanCache:
    return PlanCache(Task.of(resnet20_v1(), SHAPE))


def test_programs_loads_and_forecast_are_those_without_a_cache(plans):
    found, graph = plans.predict_costs(PLAN, MACHINES["Summit"]), plans.traces.get_graph(PLAN)
    programs = compile_plan(graph, PLAN)
    assert [each.steps for each in found.programs] == [each.steps for each in programs]
    expected = forecast(graph, PLAN, MACHINES["Summit"])
    assert found.forecast == expected
    assert list(found.loads) == with_time([count_load(each, graph, PLAN) for each in programs], expected)


def test_the_state_of_the_optimiser_is_part_of_the_memory(plans):
    adam, graph = PlanCache(replace(plans.task, optimiser=torch.optim.Adam)), plans.traces.get_graph(PLAN)
    programs = compile_plan(graph, PLAN)
    expected = [count_load(each, graph, PLAN, optimiser_states=2) for each in programs]
    for cache in (adam, adam.with_shape((2, 3, 64, 32)).with_shape(SHAPE)):
        assert list(cache.predict_costs(PLAN).loads) == expected
    assert adam.with_shape((2, 3, 64, 32)).task.optimiser is torch.optim.Adam
    assert all(
        more.peak_bytes > less.peak_bytes for more, less in zip(expected, plans.predict_costs(PLAN).loads, strict=True)
    )
    for model in (graph, plans.traces.model):
        shown = show_ranks(PLAN, model, SHAPE, optimiser=torch.optim.Adam)
        assert format_bytes(expected[0].peak_bytes) in shown.alt


def test_work_that_is_no_longer_asked_for_ends(plans):
    plan, asked = Plan(split_size=3), iter([True, True, True, False])
    assert plans.get_compiled(plan, lambda: next(asked)) is None
    assert list(asked) == []
    assert not plans.has_compiled(plan)
    assert plans.predict_costs(plan, None, lambda: False) is None
    assert plans.get_compiled(plan).plan == plan
    assert plans.has_compiled(plan)


def test_another_size_is_traced_anew_and_known_later(plans):
    other = plans.with_shape((2, 3, 64, 32))
    assert other.get_compiled(PLAN).graph.inputs["images"].shape == (2, 3, 64, 32)
    assert plans.with_shape([2, 3, 64, 32]) is other
    assert other.with_shape(SHAPE) is plans
    with pytest.raises(ImageError, match="four positive whole numbers"):
        plans.with_shape((2, 3, 0, 32))


def test_labels_follow_the_images():
    traces = TraceCache(nn.Conv2d(3, 2, 1), (4, 3, 32, 48), nn.CrossEntropyLoss(), TensorSpec((4, 32, 48), "int64"))
    assert traces.with_shape((2, 3, 64, 96)).labels == TensorSpec((2, 64, 96), "int64")
    kept = TraceCache(nn.Conv2d(3, 2, 1), (4, 3, 32, 48), nn.MSELoss(), torch.zeros(4, 7))
    assert kept.with_shape((8, 3, 64, 96)).labels.shape == (8, 7)
    assert traces.with_shape((2, 3, 64, 96)).get_graph(Plan(split_size=1)).inputs["labels"].shape == (2, 64, 96)


def test_programs_of_a_cached_plan_travel_to_ranks(plans):
    found = plans.get_compiled(PLAN)
    assert pickle.loads(pickle.dumps(found.programs[0])).steps == found.programs[0].steps
