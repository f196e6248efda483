"""`verify` on stock networks with weights that are not the stock ones, and own batches: no false alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.program import exchange_runner, kernels
from mpi4dl_nb.engines.program.update import GradientBucket, OptimiserStep
from mpi4dl_nb.engines.train.verify import VerifyResult
from tests.models.networks import NETWORKS, make_images, train_a_little

PLAN = Plan(split_size=2, slice_method="1x2")
PARTS = Plan(split_size=1, parts=2, spatial_size=0)

OFTEN = ("a segmenter", "shifted windows by roll and slice assignment")
"""Those of every run; the others take minutes."""


@contextmanager
def make_training(name: str, plan: Plan = PLAN) -> Iterator[Training]:
    """Make a training of a network with weights as of a trained one."""
    build, size = NETWORKS[name]
    torch.manual_seed(0)
    model = build()
    train_a_little(model, seed=1)
    optimiser = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        yield Training(model, plan, cluster, (2, 3, *size), optimiser=optimiser)


def verify_network(training: Training, name: str) -> VerifyResult:
    """Compare a training with one process, in two steps with batches of its own."""
    random = torch.Generator().manual_seed(4)
    shape, classes = training.recipe.graph.inputs["labels"].shape, 1 if name == "MONAI Critic" else 3
    images = [make_images(NETWORKS[name][1], seed) for seed in (2, 3)]
    return training.verify([(x, torch.randint(classes, shape, generator=random)) for x in images])


@pytest.mark.filterwarnings("ignore")  # those of the networks' own packages
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.nightly) for name in NETWORKS]
)
def test_no_false_alarm(name: str):
    with make_training(name) as training:
        proof = verify_network(training, name)
    assert proof["ok"], f"{proof}"
    whole = training.traces.with_batch(4).get_graph(PARTS).whole
    assert whole
    assert not whole.mixes


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("put", [scale_halos, scale_sums, scale_norms, scale_steps])
def test_a_fault_is_found(put: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    put(monkeypatch)
    with make_training("a segmenter", Plan(split_size=1, slice_method="1x2")) as training:
        proof = verify_network(training, "a segmenter")
    assert not proof["ok"]
    assert "This is a fault, not rounding" in proof["why"]
