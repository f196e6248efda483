"""What several tests of predictions ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engines.graph.model_graph import ModelGraph
from engines.plan import Plan
from engines.train.training import trace_model
from tests.zoo import Skips


@pytest.fixture(scope="module")
def graph_of() -> Callable[[Plan], ModelGraph]:
    """The micro-batches of four small images, each traced once."""
    model, graphs = Skips(), {}

    def graph(plan: Plan) -> ModelGraph:
        key = plan.parts, plan.local_dp
        if key not in graphs:
            graphs[key] = trace_model(model, plan, (4, 3, 24, 24), torch.nn.CrossEntropyLoss())
        return graphs[key]

    return graph
