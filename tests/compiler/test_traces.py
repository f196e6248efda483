"""A trace takes seconds: plans that need the same one share it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler import trace_cache
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import ImageError, PlanError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.sizes import Sizes
from mpi4dl_nb.engines.train import recipe
from mpi4dl_nb.engines.train.recipe import Task
from mpi4dl_nb.planning.plan_cache import PlanCache


@pytest.fixture
def counted(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of images that were traced."""
    found, trace = [], trace_cache.trace

    def count_trace(model, loss, images, *rest):
        found.append(images.shape)
        return trace(model, loss, images, *rest)

    monkeypatch.setattr(trace_cache, "trace", count_trace)
    return found


@pytest.mark.nightly
def test_plans_with_micro_batches_of_one_shape_and_precision_share_a_trace(counted):
    known = TraceCache(resnet20_v1(), (4, 3, 32, 32), nn.CrossEntropyLoss())
    assert not known.has_graph(Plan())
    graph = known.get_graph(Plan())
    assert known.get_graph(Plan(split_size=3, spatial_size=2)) is graph
    several = known.get_graph(Plan(split_size=3, spatial_size=2, bidirectional=True))
    assert several is known.get_graph(Plan(data_parallel=4))
    assert known.has_graph(Plan(data_parallel=2))
    assert [shape[0] for shape in counted] == [4, 8]  # with twice the images it shows whether the model mixes them
    assert known.get_graph(Plan(parts=2)).inputs["images"].shape == (2, 3, 32, 32)
    assert known.get_graph(Plan(precision="float64")).inputs["images"].dtype == "float64"
    assert known.get_graph(Plan(local_dp=4)) is graph
    assert [shape[0] for shape in counted[2:]] == [2, 4]


def test_what_does_not_fit_is_said_before_anything_is_traced(counted):
    known = TraceCache(resnet20_v1(), (4, 3, 32, 32), nn.CrossEntropyLoss())
    with pytest.raises(PlanError, match="parts=3"):
        known.has_graph(Plan(parts=3))
    with pytest.raises(PlanError, match="local_dp=3"):
        known.get_graph(Plan(local_dp=3))
    with pytest.raises(ImageError, match="four positive whole numbers"):
        TraceCache(resnet20_v1(), (4, 3), nn.CrossEntropyLoss())
    assert counted == []


def make_head() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.25), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))


def get_batch_norm_modes(graph: ModelGraph) -> list[bool]:
    return [node.arguments["training"] for node in graph.nodes if node.operator == "aten.batch_norm.default"]


def test_a_changed_model_is_traced_anew():
    model = make_head()
    sizes, plan, shape = Sizes(model), Plan(split_size=1, spatial_size=0), (2, 3, 8, 8)
    plans = PlanCache(Task.of(model, shape))
    first, compiled = sizes.graph(plan, shape), plans.get_compiled(plan)
    assert sizes.graph(plan, shape) is first
    model[0].requires_grad_(False)
    frozen = sizes.graph(plan, shape)
    assert first.trainable - frozen.trainable == {"model.0.weight", "model.0.bias"}
    assert not plans.has_compiled(plan)
    assert plans.get_compiled(plan).graph.trainable == frozen.trainable
    model[1].eval()
    assert get_batch_norm_modes(frozen) == [True]
    assert get_batch_norm_modes(sizes.graph(plan, shape)) == [False]
    model[2].p = 0.5
    changed = sizes.graph(plan, shape)
    model[2].p = 0.25
    assert sizes.graph(plan, shape) is not changed
    model.train().requires_grad_()
    assert sizes.graph(plan, shape) is first
    assert plans.get_compiled(plan) is compiled


def test_a_training_is_compiled_once_in_the_notebook(monkeypatch):
    compiled, compile_plan = [], recipe.compile_plan
    monkeypatch.setattr(recipe, "compile_plan", lambda graph, plan: compiled.append(plan) or compile_plan(graph, plan))
    with Cluster(2, backend="loopback") as cluster:
        training = Training(make_head(), Plan(split_size=1, slice_method="1x2"), cluster, (4, 3, 8, 8))
        training.step(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
        with training.stepping(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)) as stepping:
            stepping.finish()
        assert compiled == [training.plan]


def test_traces_of_a_training_keep_the_modes_in_which_it_was_made():
    model, plan = make_head(), Plan(split_size=1, spatial_size=0)
    with Cluster(1, backend="loopback") as cluster:
        training = Training(model, plan, cluster, (4, 3, 8, 8))
        model.eval()
        smaller = training.traces.with_batch(2).get_graph(plan)
    assert get_batch_norm_modes(smaller) == [True]
    assert not any(module.training for module in model.modules())
