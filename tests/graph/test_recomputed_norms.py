"""Norms that `torch.utils.checkpoint` computes again in backward update their statistics again, as in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.trace_cache import TraceCache
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.plan import Plan
from tests.train.test_synced_norms import train_plain
from tests.train.test_verify import SGD

SHAPE = (2, 3, 12, 14)
TILES = Plan(split_size=2, slice_method="1x2", precision="float64")


class Recomputed(nn.Module):
    """`how`: once, nested, two calls of the same norm, or one of the two calls alone is recomputed."""

    def __init__(self, how: str, reentrant: bool = True, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.how, self.reentrant = how, reentrant
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        if self.how == "nested":
            kind = {"use_reentrant": self.reentrant}
            x = checkpoint(lambda y: checkpoint(self.body, y, **kind), x, **kind)
        elif self.how == "uneven":
            x = self.body(checkpoint(self.body, x, use_reentrant=self.reentrant))
        else:
            for _ in range(2 if self.how == "twice" else 1):
                x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "passes"),
    [
        (Recomputed("once"), 2),
        (Recomputed("once", reentrant=False), 2),
        (Recomputed("nested"), 3),
        (Recomputed("nested", reentrant=False), 2),
        (Recomputed("twice", reentrant=False, momentum=None), 4),
    ],
    ids=["reentrant", "non-reentrant", "nested", "nested non-reentrant", "twice"],
)
def test_statistics_are_those_of_plain_pytorch(model: Recomputed, passes: int):
    batches = [(torch.randn(SHAPE).double(), torch.tensor([0, 2])) for _ in range(2)]
    losses, state = train_plain(model, batches)
    plan = Plan(split_size=1, slice_method="1x2", precision="float64")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(model.double(), plan, cluster, SHAPE, optimiser=SGD)
        assert [training.step(*batch) for batch in batches] == pytest.approx(losses, rel=1e-12)
        found = training.state_dict()
    assert found["body.1.num_batches_tracked"] == passes * len(batches)
    for name, wanted in state.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_micro_batches_are_counted_again_after_all_of_them(reentrant: bool):
    plan = Plan(split_size=2, spatial_size=0, parts=2, precision="float64")
    with Cluster(plan.ranks, backend="loopback") as cluster:
        loss = nn.CrossEntropyLoss(ignore_index=1)
        proof = Training(Recomputed("once", reentrant), plan, cluster, (4, *SHAPE[1:]), loss=loss).verify()
    assert proof["ok"], proof


def test_a_norm_of_which_only_some_calls_are_recomputed_is_refused():
    with pytest.raises(TraceError, match=r"body\.1\.num_batches_tracked 2 times in forward, and 1 times"):
        TraceCache(Recomputed("uneven"), SHAPE, nn.CrossEntropyLoss()).get_graph(TILES)


def test_evaluation_mode_recomputes_no_statistics():
    graph = TraceCache(Recomputed("once").eval(), SHAPE, nn.CrossEntropyLoss()).get_graph(TILES)
    assert not graph.recomputed
