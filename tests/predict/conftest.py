"""What several tests of predictions ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from tests.zoo import Skips


@pytest.fixture(scope="module")
def graph_of() -> Callable[[Plan], ModelGraph]:
    """The micro-batches of four small images, each traced once."""
    return TraceCache(Skips(), (4, 3, 24, 24), torch.nn.CrossEntropyLoss()).get_graph
