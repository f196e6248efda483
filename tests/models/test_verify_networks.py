"""`verify` on stock networks with weights that are not the stock ones, and own batches: no false alarm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engines.errors import PlanError, TraceError
from engines.graph.trace_cache import TraceCache
from engines.program import exchange_runner
from engines.program.update import GradientBucket, OptimiserStep
from engines.spatial import kernels
from engines.train.verify import VerifyResult
from mpi4dl_nb import Cluster, Plan, Training
from tests.models.networks import NETWORKS, make_images, train_a_little

PLANS = Plan(split_size=2, slice_method="1x2"), Plan(split_size=2, spatial_size=0), Plan(split_size=1, spatial_size=0)
"""The first one that a network can have: many of transformers cannot be cut into tiles."""

OFTEN = ("our ResNet-20 v1", "a segmenter", "transformers ViT")
"""Those of every run; the others take minutes."""


def make_network(name: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a network with weights as of a trained one, and two batches of its own."""
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    train_a_little(model, seed=1)
    images = [make_images(size, seed) for seed in (2, 3)]
    specs = TraceCache(model, images[0].shape, nn.CrossEntropyLoss()).get_graph(PLANS[2]).inputs
    classes = 1 if name == "MONAI Critic" else 3
    random = torch.Generator().manual_seed(4)
    return model, [(x, torch.randint(classes, specs["labels"].shape, generator=random)) for x in images]


def verify_network(name: str, plans: tuple[Plan, ...] = PLANS) -> VerifyResult:
    """Compare a network on ranks with one process, under the first plan that it can have."""
    model, data = make_network(name)
    optimiser = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    for plan in plans:
        with Cluster(plan.ranks, backend="loopback") as cluster:
            try:
                training = Training(model, plan, cluster, data[0][0].shape, optimiser=optimiser)
            except (PlanError, TraceError):
                if plan == plans[-1]:
                    raise
                continue
            return training.verify(data)
    raise AssertionError(name)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in NETWORKS]
)
def test_no_false_alarm(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the networks' own packages
        proof = verify_network(name)
        model, data = make_network(name)
        several = TraceCache(model, data[0][0].shape, nn.CrossEntropyLoss()).get_graph(
            Plan(split_size=1, parts=2, spatial_size=0)
        )
    assert proof["ok"], f"{proof}"
    assert several.whole
    assert not several.whole.mixes


OFF = 1 + 1e-6


def scale_halos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels that other ranks have sent arrive wrong."""
    plain = exchange_runner.copy_to_device
    monkeypatch.setattr(
        exchange_runner, "copy_to_device", lambda tensors, *where: [each * OFF for each in plain(tensors, *where)]
    )


def scale_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of gradients over ranks are wrong."""
    plain = GradientBucket.finish

    def finish(self: GradientBucket) -> None:
        plain(self)
        for weight in self.weights:
            weight.grad = None if weight.grad is None else weight.grad * OFF

    monkeypatch.setattr(GradientBucket, "finish", finish)


def scale_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm normalises by another deviation."""
    plain = kernels.get_kernel("tile.moments")

    def compute_moments(*given: Any) -> Tensor:
        return plain(*given) * OFF

    monkeypatch.setitem(kernels._KERNELS, "tile.moments", compute_moments)


def scale_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimiser of a rank takes another step."""
    plain = OptimiserStep.step

    def step(self: OptimiserStep, stats: Tensor) -> None:
        for weight in self.weights.values():
            if weight.grad is not None:
                weight.grad = weight.grad * OFF
        plain(self, stats)

    monkeypatch.setattr(OptimiserStep, "step", step)


@pytest.mark.parametrize("put", [scale_halos, scale_sums, scale_norms, scale_steps])
def test_a_fault_is_found(put: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch)
    proof = verify_network("a segmenter", (Plan(split_size=1, slice_method="1x2"),))
    assert not proof["ok"]
    assert "This is a fault, not rounding" in proof["why"]
