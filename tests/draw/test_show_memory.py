"""The picture of a plan's memory: ranks, the moment of the peak, and layers, with the account's own numbers."""

from __future__ import annotations

import pytest
from legible import find_unreadable, read
from torch import nn

from mpi4dl_nb import Cluster, Training, show_memory
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import format_bytes
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.predict.rank_memory import predict_plan_memory

SHAPE = (4, 3, 64, 64)
PLANS = [
    Plan(),
    Plan(split_size=1, spatial_size=0),
    Plan(split_size=4, spatial_size=0, parts=4, schedule="1f1b", data_parallel=1000),
    Plan(split_size=3, slice_method="4x4", bidirectional=True, data_parallel=2, parts=2),
]


@pytest.fixture(scope="module")
def traces() -> TraceCache:
    return TraceCache(resnet20_v1(), SHAPE, nn.CrossEntropyLoss())


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.summary)
def test_it_is_legible_and_its_numbers_are_those_of_the_account(plan, traces):
    figure, found = show_memory(plan, traces.get_graph(plan)), predict_plan_memory(traces.get_graph(plan), plan)
    assert find_unreadable(figure) == []
    moment = found.find_peak(found.fullest)
    assert f"The fullest rank holds {format_bytes(found.peak_bytes)}" in read(figure)
    assert moment.words in figure.alt
    assert f"{format_bytes(moment.bytes)} in instruction {moment.step + 1}" in read(figure)
    for name, kinds in moment.get_largest_layers(3):
        assert f"{name}: {format_bytes(sum(kinds.values()))}" in figure.alt
        assert name in read(figure)


@pytest.mark.nightly
def test_the_limit_is_a_line_and_a_word(traces):
    plan = Plan(split_size=1, spatial_size=0)
    one = predict_plan_memory(traces.get_graph(plan), plan).peak_bytes
    for room, said in ((2 * one, "it fits"), (one - 1, "it does not fit")):
        figure = show_memory(plan, traces.get_graph(plan), machine=Machine("small", "made up", {}, memory_bytes=room))
        assert f"of the {format_bytes(room)} that it may use: {said}." in figure.alt
        assert f"a rank may use {format_bytes(room)}" in read(figure)
        assert find_unreadable(figure) == []
    far = show_memory(plan, resnet20_v1(), SHAPE, "Summit")
    assert "of the 16.0 GB that it may use: it fits." in far.alt


def test_another_rank_can_be_looked_at(traces):
    plan = Plan(split_size=4, spatial_size=0, parts=4, schedule="1f1b", data_parallel=2)
    graph = traces.get_graph(plan)
    assert "Rank 7 through its step" in read(show_memory(plan, graph, rank=7))  # as rank 3 of the other replica
    with pytest.raises(PlanError, match=r"rank=8 is none of the plan's 8 ranks\. Use 0 to 7"):
        show_memory(plan, graph, rank=8)
    with pytest.raises(PlanError, match="needs the image_shape"):
        show_memory(plan, resnet20_v1())


@pytest.mark.nightly
def test_a_training_shows_its_own():
    plan = Plan(split_size=2, slice_method="1x2")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(resnet20_v1(), plan, cluster, SHAPE)
        assert training.memory(rank=2).alt == show_memory(plan, training.recipe.graph, rank=2).alt
        assert "may use" not in training.memory().alt
        cluster.machine = MACHINES["Summit"]
        assert "of the 16.0 GB that it may use" in training.memory().alt
