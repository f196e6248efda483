"""`verify` on stock networks with weights that are not the stock ones, and own batches: no false alarm."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engines.errors import PlanError, TraceError
from engines.graph.trace_cache import TraceCache
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
