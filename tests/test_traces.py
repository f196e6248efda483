"""A trace takes seconds: plans that need the same one share it."""

from __future__ import annotations

import pytest
from torch import nn

from engines.errors import ImageError, PlanError
from engines.graph import trace_cache
from engines.graph.trace_cache import TraceCache
from engines.models import resnet20_v1
from engines.plan import Plan


@pytest.fixture
def counted(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of images that were traced."""
    found, trace = [], trace_cache.trace

    def counting(model, loss, images, *rest):
        found.append(images.shape)
        return trace(model, loss, images, *rest)

    monkeypatch.setattr(trace_cache, "trace", counting)
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
    assert counted == [(4, 3, 32, 32)]
    assert known.get_graph(Plan(parts=2)).inputs["images"].shape == (2, 3, 32, 32)
    assert known.get_graph(Plan(precision="float64")).inputs["images"].dtype == "float64"
    assert known.get_graph(Plan(local_dp=4)).share.inputs["images"].shape == (1, 3, 32, 32)
    assert [shape[0] for shape in counted] == [4, 2, 4, 1]  # the whole of what is shared was traced before


def test_what_does_not_fit_is_said_before_anything_is_traced(counted):
    known = TraceCache(resnet20_v1(), (4, 3, 32, 32), nn.CrossEntropyLoss())
    with pytest.raises(PlanError, match="parts=3"):
        known.has_graph(Plan(parts=3))
    with pytest.raises(PlanError, match="local_dp=3"):
        known.get_graph(Plan(local_dp=3))
    with pytest.raises(ImageError, match="four positive whole numbers"):
        TraceCache(resnet20_v1(), (4, 3, 32), nn.CrossEntropyLoss())
    assert counted == []
