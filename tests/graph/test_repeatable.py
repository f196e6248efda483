"""A forward or a loss that does something else in each call: refused, as a trace has what it did in one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.plan import Plan

SHAPE = (4, 3, 8, 8)
ONE = Plan(split_size=1, spatial_size=0, precision="float64")
COUNTS: dict[str, Any] = {"global": 0, "list": []}


class Does(nn.Module):
    """A classifier whose images a function changes first; `kept` is its own list, dict and generators."""

    def __init__(self, change: Callable[[Does, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.change, self.kept, self.table = change, [], {}
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.change(self, x))


def count_in_a_list(m: Does, x: Tensor) -> Tensor:
    m.kept.append(1)
    return x / len(m.kept)


def count_in_a_dict(m: Does, x: Tensor) -> Tensor:
    m.table["runs"] = m.table.get("runs", 0) + 1
    return x * m.table["runs"]


def count_in_a_global(m: Does, x: Tensor) -> Tensor:
    COUNTS["global"] += 1
    return x * min(1.0, COUNTS["global"] / 1e6)


def toggle_relu(m: Does, x: Tensor) -> Tensor:
    m.kept.append(1)
    return x.relu() if len(m.kept) % 2 else x


def add_noise(m: Does, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.randn(*x.shape))  # noqa: NPY002 (as users write it)


def add_noise_of_a_generator(m: Does, x: Tensor) -> Tensor:
    return x + torch.from_numpy(m.numpy.standard_normal(x.shape))


def scale_by_a_generator(m: Does, x: Tensor) -> Tensor:
    return x * m.python.random()


CHANGING: dict[Callable[[Does, Tensor], Tensor], str] = {
    count_in_a_list: "computes something else in each call",
    count_in_a_dict: "computes something else in each call",
    count_in_a_global: "computes something else in each call",
    toggle_relu: "computes something else in each call",
    add_noise: "draws random numbers by numpy.random",
    add_noise_of_a_generator: "computes something else in each call",
    scale_by_a_generator: "computes something else in each call",
}


def trace_model(change: Callable[[Does, Tensor], Tensor]) -> None:
    TraceCache(Does(change).double(), SHAPE, nn.CrossEntropyLoss()).get_graph(ONE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGING)
def test_a_forward_that_changes_from_call_to_call_is_refused(change: Callable[[Does, Tensor], Tensor]):
    with pytest.raises(TraceError, match=f"The model {CHANGING[change]}") as caught:
        trace_model(change)
    if change is not add_noise:
        assert f'"{__file__}", line {change.__code__.co_firstlineno}'[:-2] in str(caught.value)


def make_annealed_loss() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def compute_loss(p: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(p, y) * 0.5**calls

    return compute_loss


def scale_randomly(p: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(p, y) * random.random()


class Averages(nn.Module):
    """A loss with a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []

    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        self.kept.append(1)
        return functional.cross_entropy(p, y) / len(self.kept)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (make_annealed_loss(), "The loss computes something else in each call"),
        (Averages(), "The loss computes something else in each call"),
        (scale_randomly, "The loss draws random numbers by Python's random"),
    ],
)
def test_so_is_a_loss(loss: Callable[[Tensor, Tensor], Tensor], text: str):
    with pytest.raises(TraceError, match=text):
        TraceCache(Does(lambda m, x: x).double(), SHAPE, loss).get_graph(ONE)


# ---- what may be kept


def keep_a_table(m: Does, x: Tensor) -> Tensor:
    """Positions, computed once for each shape."""
    if x.shape not in m.table:
        m.table[x.shape] = torch.arange(x.shape[3], dtype=x.dtype) / 7
    return x + m.table[x.shape]


@functools.lru_cache
def compute_scale(size: int) -> float:
    return 1 / size


def keep_a_number(m: Does, x: Tensor) -> Tensor:
    return x * compute_scale(x.shape[3])


def log_features(m: Does, x: Tensor) -> Tensor:
    m.kept.append(x.detach())
    COUNTS["list"].append(x)
    return x * 2


def log_numbers(m: Does, x: Tensor) -> Tensor:
    m.table[len(m.table)] = x.mean().item()
    return x * 2


def draw_by_torch(m: Does, x: Tensor) -> Tensor:
    return functional.dropout(x, 0.5) + torch.rand_like(x)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of torch.export, for what the model keeps
@pytest.mark.parametrize("change", [keep_a_table, keep_a_number, log_features, log_numbers, draw_by_torch])
def test_caches_logs_and_torchs_chance_are_none_of_these(change: Callable[[Does, Tensor], Tensor]):
    trace_model(change)


@functools.lru_cache
def make_window(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.float64) * 2


def test_a_loss_may_keep_tensors_outside():
    def compute_loss(p: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(p * make_window(p.shape[1]), y)

    TraceCache(Does(lambda m, x: x).double(), SHAPE, compute_loss).get_graph(ONE)
