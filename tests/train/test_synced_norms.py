"""`nn.SyncBatchNorm` has the statistics of the whole batch of a step, as one process with batch norm, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from tests.train.test_verify import SGD

REPLICAS = {
    "replicas": Plan(split_size=1, spatial_size=0, data_parallel=2, precision="float64"),
    "tiles": Plan(split_size=1, slice_method="1x2", data_parallel=2, precision="float64"),
    "stages and shares": Plan(split_size=2, slice_method="1x2", local_dp=2, data_parallel=2, precision="float64"),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3),
    )  # fmt: skip


def train_plain(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], loss: Loss = nn.functional.cross_entropy
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process; return the losses and the state."""
    model = copy.deepcopy(model).double()
    optimiser, losses = SGD(model.parameters()), []
    for images, labels in batches:
        optimiser.zero_grad()
        value = loss(model(images), labels)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_normalise_by_the_whole_batch(name: str):
    """Losses, weights, running statistics and counters: those of one process with batch norm on the whole batch."""
    # Two images in each share of a replica: PyTorch normalises no single row, which a trace of a share would be.
    scales = torch.tensor([1.0, 5.0, 0.2, 2.0, 3.0, 0.5, 1.5, 4.0]).double().view(8, 1, 1, 1)
    labels = torch.tensor([0, 2, 1, 1, 2, 0, 1, 2])
    batches = [(torch.randn(8, 3, 12, 14).double() * scales + scales, labels) for _ in range(2)]
    losses, state = train_plain(make_net(), batches)
    model, plan = nn.SyncBatchNorm.convert_sync_batchnorm(make_net()), REPLICAS[name]
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(model.double(), plan, cluster, (4, 3, 12, 14), optimiser=SGD)
        assert [training.step(*batch) for batch in batches] == pytest.approx(losses, rel=1e-12)
        found = training.state_dict()
    for key, wanted in state.items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-10, atol=1e-12, msg=key)


def test_verify_takes_other_norms_by_micro_batch_and_these_at_once():
    model, plan = make_net(), REPLICAS["tiles"]
    model[1] = nn.SyncBatchNorm(4)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        proof = Training(model, plan, cluster, (2, 3, 12, 14)).verify()
    assert proof["ok"], proof


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": 2, "data_parallel": 2}, "parts=2 computes its micro-batches one after another"),
        ({"accumulate": 2}, "accumulate=2 computes its micro-batches one after another"),
        ({"bidirectional": True}, "bidirectional=True computes its micro-batches one after another"),
        ({"spatial_size": 1, "num_spatial_parts": 2, "slice_method": "vertical", "sync_batchnorm": False}, "each tile"),
    ],
)
def test_micro_batches_one_after_another_are_refused(options: dict[str, Any], said: str):
    plan = Plan(**{"split_size": 2, "spatial_size": 0} | options)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_net())
    with (
        Cluster(plan.ranks, backend="loopback") as cluster,
        pytest.raises(PlanError, match=rf"1 is an nn\.SyncBatchNorm.* of the whole batch.*{said}"),
    ):
        Training(model, plan, cluster, (4, 3, 12, 14))


class Shared(nn.Module):
    """One norm that is called twice."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 3), norm, nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.norm(self.stem(images)))).mean((2, 3)))


def test_a_norm_that_is_called_twice():
    plan = REPLICAS["replicas"]
    with Cluster(plan.ranks, backend="loopback") as cluster:
        for norm in (nn.SyncBatchNorm(4), nn.BatchNorm2d(4)):
            training = Training(Shared(norm), plan, cluster, (2, 3, 12, 14))
            assert training.recipe.compares_whole == isinstance(norm, nn.SyncBatchNorm)
            assert training.verify()["ok"]


def test_evaluation_mode_asks_for_no_statistics():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(make_net()).eval()
    plan = Plan(split_size=2, spatial_size=0, parts=2)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        assert Training(model, plan, cluster, (4, 3, 12, 14)).recipe.graph.synced == frozenset()
