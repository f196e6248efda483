"""A loss that is not a number is told with its micro-batch, its rank and the cause that was found."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import LossError
from mpi4dl_nb.engines.plan import Plan
from tests.compiler.losses import compute_balanced_loss, compute_dice_loss, make_segmenter, make_unbalanced_batch

PLANS = {
    "tiles": Plan(split_size=1, num_spatial_parts=4),
    "parts": Plan(split_size=2, spatial_size=0, parts=2),
    "replicas": Plan(split_size=1, spatial_size=0, data_parallel=2),
}


def compute_mixed_loss(scores, labels):
    """No mean over the batch, but with one in it that may be over nothing."""
    return compute_dice_loss(scores, labels) * F.cross_entropy(scores, labels)


def train_until_failure(plan: Plan, images, labels, loss=None, lr: float = 0.1, steps: int = 1) -> LossError:
    """The error of a training that fails within so many steps; the failing one must have changed no weight."""
    with Cluster(plan.ranks, backend="loopback") as cluster:
        shape = (len(images) // plan.batches, *images.shape[1:])
        optimiser = partial(torch.optim.SGD, lr=lr)
        training = Training(make_segmenter().float(), plan, cluster, shape, loss=loss, optimiser=optimiser)
        for _ in range(steps):
            before = copy.deepcopy(training.state_dict())
            try:
                training.step(images, labels)
            except LossError as error:
                after = training.state_dict()
                assert all(torch.equal(after[name].nan_to_num(), before[name].nan_to_num()) for name in before)
                return error
    pytest.fail(f"{steps} steps had losses that are numbers")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiles", "The loss is nan.*Found on ranks 0, 1, 2, 3: No label of the batch counts: all are -100"),
        ("parts", r"Rank 1: The loss of micro-batch 0 \(of 2\) is nan.*Found on rank 1: No label counts"),
        ("replicas", r"micro-batch \d \(of 2\) is nan.*Found on ranks? [01, ]+: No label counts"),
    ],
)
def test_a_batch_without_a_label_that_counts(name: str, said: str):
    images, labels = make_unbalanced_batch(4, 0)
    error = train_until_failure(PLANS[name], images.float(), torch.full_like(labels, -100))
    assert re.search(said, str(error))
    assert "learning rate" not in str(error)


def test_a_micro_batch_without_labels_does_no_harm_to_a_mean():
    images, labels = make_unbalanced_batch(4, 0)
    labels[:2] = -100
    with Cluster(2, backend="loopback") as cluster:
        training = Training(make_segmenter().float(), PLANS["parts"], cluster, images.shape)
        wanted = F.cross_entropy(make_segmenter().float()(images.float()), labels).item()
        assert training.step(images.float(), labels) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:The loss of a step is the mean")
@pytest.mark.parametrize(("name", "rank"), [("parts", 1), ("replicas", 0)])
def test_but_to_a_loss_that_is_computed_for_each(name: str, rank: int):
    images, labels = make_unbalanced_batch(4, 0)
    labels[:2] = -100
    error = train_until_failure(PLANS[name], images.float(), labels, compute_mixed_loss)
    assert f"Found on rank {rank}: No label of micro-batch 0 of 2 counts" in str(error)
    assert error.rank == rank


@pytest.mark.parametrize(("name", "rank"), [("tiles", 3), ("parts", 0), ("replicas", 1)])
def test_a_pixel_that_is_no_number_is_found_where_it_is_read(name: str, rank: int):
    images, labels = make_unbalanced_batch(4, 0)
    images[3, 0, -1, -1] = float("nan")
    text = str(train_until_failure(PLANS[name], images.float(), labels))
    which = "the batch" if name == "tiles" else "micro-batch 1 of 2"
    assert f"Found on rank {rank}: 1 value of the images of {which} is not finite." in text
    assert "learning rate" not in text


def test_a_tile_without_labels_is_not_to_blame():
    """Its neighbours have some: the mean is over these."""
    images, labels = make_unbalanced_batch(4, 0)
    labels[:, :4, :4] = -100
    images[3, 0, -1, -1] = float("inf")
    text = str(train_until_failure(PLANS["tiles"], images.float(), labels))
    assert "of the images of the batch is not finite" in text, text
    assert "No label" not in text


def test_weights_that_are_lost_are_named():
    images, labels = make_unbalanced_batch(4, 0)
    text = str(train_until_failure(PLANS["parts"], images.float(), labels, lr=float("inf"), steps=2))
    assert "Weights are not finite themselves after 1 updates" in text
    assert "4.weight" in text or "0.weight" in text


@pytest.mark.parametrize(("name", "which"), [("tiles", "the batch"), ("parts", "micro-batch 0 of 2")])
def test_a_loss_that_ignores_no_label_counts_them_all(name: str, which: str):
    """`one_hot` takes every label for a class: the search for the cause goes on to the images."""

    def compute_squares(scores, labels):
        return (scores - F.one_hot(labels, scores.shape[1]).movedim(-1, 1)).square().mean()

    images, labels = make_unbalanced_batch(4, 0)
    images[0, 0, 0, 0] = torch.nan
    text = str(train_until_failure(PLANS[name], images.float(), labels.clamp(min=0), compute_squares))
    assert f"Found on rank 0: 1 value of the images of {which} is not finite." in text


def test_a_loss_that_grows_is_reported_with_its_numbers():
    images, labels = make_unbalanced_batch(4, 0)
    text = str(
        train_until_failure(PLANS["tiles"], images.float(), labels, lambda p, y: p.square().square().mean(), 60.0, 12)
    )
    assert "The losses before it grow: " in text
    assert "Lower the learning rate" in text


def test_a_loss_without_a_value_is_reported_as_that():
    images, labels = make_unbalanced_batch(4, 0)
    text = str(train_until_failure(PLANS["tiles"], images.float(), labels, lambda p, y: (p * 0).mean().log()))
    assert "The model's answers are finite: the loss itself has no value for them" in text


@pytest.mark.nightly
def test_a_count_of_0_that_is_kept_from_0_is_not_to_blame():
    images, labels = make_unbalanced_batch(4, 0)
    images[0, 0, 0, 0] = torch.nan
    error = train_until_failure(PLANS["parts"], images.float(), torch.zeros_like(labels), compute_balanced_loss)
    assert "1 value of the images of micro-batch 0 of 2 is not finite" in str(error)
    assert "No label counts" not in str(error)
