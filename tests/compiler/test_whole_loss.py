"""The loss of a step is that of the whole batch, whatever it divides by: a plain loop in float64 is the measure."""

from __future__ import annotations

import statistics
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpi4dl_nb.engines.bench.memory_limit import make_ranks_in_turn
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.oracle import to_plain_names
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, record_rank_run, verify
from tests.compiler.losses import (
    RATE,
    SIZE,
    WHOLE,
    Loss,
    compute_dice_loss,
    compute_dice_of_images,
    compute_focal_loss,
    make_segmenter,
    make_unbalanced_batch,
    train_plain,
)

float64 = partial(Plan, precision="float64")
PLANS = {
    "parts": float64(split_size=2, spatial_size=0, parts=2),
    "tiles, parts": float64(split_size=1, num_spatial_parts=4, parts=4),
    "replicas": float64(split_size=1, spatial_size=0, data_parallel=2),
    "both ways, tiles": float64(
        split_size=2, spatial_size=2, num_spatial_parts=2, slice_method="vertical", bidirectional=True
    ),
    "both ways, times": float64(split_size=2, spatial_size=0, bidirectional=True, times=2, parts=2, schedule="gems"),
    "shares": float64(
        split_size=2, num_spatial_parts=2, slice_method="horizontal", local_dp=2, accumulate=2, data_parallel=2
    ),
    "1f1b": float64(split_size=2, spatial_size=0, parts=4, schedule="1f1b", checkpoint_activations=True),
    "zero bubble": float64(split_size=2, spatial_size=0, parts=4, schedule="zero_bubble"),
}
SOME = (
    [("parts", name) for name in WHOLE] + [(plan, "wrapped") for plan in PLANS] + [(plan, "masked") for plan in PLANS]
)


def prepare_recipe(plan: Plan, loss: Loss, images: int) -> Recipe:
    optimiser = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
    return prepare(make_segmenter(), plan, (images // plan.batches, 3, *SIZE), loss, optimiser, device="cpu")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "loss"), sorted(set(SOME)))
def test_three_steps_are_those_of_the_whole_batch(name: str, loss: str):
    plan, judge = PLANS[name], WHOLE[loss]
    whole = [make_unbalanced_batch(8, seed) for seed in range(3)]
    recipe = prepare_recipe(plan, judge, 8)
    losses, gradients, weights = train_plain(make_segmenter(), judge, whole)

    def work(world):
        training = RankTraining(world, recipe)
        return record_rank_run(training, [training.cut({"images": x, "labels": y}) for x, y in whole])

    records = run_ranks(plan.ranks, work)
    for step, wanted in enumerate(losses):
        found = {number: loss for record in records for number, loss in record.losses[step].items()}
        assert len(found) == plan.micro_batches
        assert statistics.fmean(found.values()) == pytest.approx(wanted, rel=1e-12)
        for record in records:
            for weight, gradient in record.gradients[step].items():
                torch.testing.assert_close(gradient, gradients[step][weight], rtol=1e-10, atol=1e-13)
    for record in records:
        for weight, value in record.weights.items():
            torch.testing.assert_close(value, weights[weight], rtol=1e-10, atol=1e-13)


def test_tiles_in_turn_in_one_process_as_well():
    plan = float64(split_size=1, num_spatial_parts=4, parts=4)
    recipe, (images, labels) = prepare_recipe(plan, WHOLE["wrapped"], 8), make_unbalanced_batch(8, 0)
    (wanted,), (gradients,), _ = train_plain(make_segmenter(), WHOLE["wrapped"], [(images, labels)])
    trainings, step = make_ranks_in_turn(recipe)
    step({"images": images, "labels": labels})
    losses = [loss for training in trainings for loss in training.report.losses.values()]
    assert statistics.fmean(losses) == pytest.approx(wanted, rel=1e-12)
    for training in trainings:
        for name, gradient in to_plain_names(training.copy_tensors()["gradients"]).items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-13)


def test_bits_are_those_of_separate_means_where_all_labels_count():
    """What is divided by is the same number then, so nothing has changed for those who ignore nothing."""
    plan = Plan(split_size=2, spatial_size=0, parts=4)
    recipe = prepare(make_segmenter().float(), plan, (8, 3, *SIZE), device="cpu")
    labels = torch.randint(3, (8, *SIZE), generator=torch.Generator().manual_seed(0))
    images = make_unbalanced_batch(8, 0)[0].float()

    def work(world):
        training = RankTraining(world, recipe)
        return training.step(training.cut({"images": images, "labels": labels})).losses

    found = run_ranks(2, work)[1]
    model = make_segmenter().float()
    pairs = zip(images.chunk(4), labels.chunk(4), strict=True)
    assert [found[number] for number in range(4)] == [F.cross_entropy(model(x), y).item() for x, y in pairs]


@pytest.mark.parametrize("loss", [F.mse_loss, lambda p, y: (p - y).abs().mean()], ids=["mse", "own mean"])
def test_a_loss_without_such_a_denominator_has_the_program_that_it_had(loss: Loss):
    spec, shape = TensorSpec((4, 3, *SIZE), "float64"), (4, 3, *SIZE)
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 1)).double()
    one = prepare(
        model,
        float64(split_size=1, spatial_size=0),
        (2, 3, *SIZE),
        loss,
        labels=TensorSpec((2, *spec.shape[1:]), "float64"),
    )
    several = prepare(model, float64(split_size=1, spatial_size=0, parts=2), shape, loss, labels=spec)
    assert several.graph.nodes == one.graph.nodes
    assert not several.graph.totals
    assert not several.has_whole_loss


def test_what_is_no_sum_or_mean_stays_a_mean_of_micro_batches():
    plan, (images, labels) = PLANS["parts"], make_unbalanced_batch(8, 0)
    recipe = prepare_recipe(plan, compute_dice_loss, 8)
    assert recipe.graph.whole.unknown
    assert not recipe.has_whole_loss

    def work(world):
        training = RankTraining(world, recipe)
        return training.step(training.cut({"images": images, "labels": labels})).losses

    found, model = run_ranks(2, work)[1], make_segmenter()
    pairs = zip(images.chunk(2), labels.chunk(2), strict=True)
    assert list(found.values()) == pytest.approx([compute_dice_loss(model(x), y).item() for x, y in pairs], rel=1e-12)


@pytest.mark.parametrize("loss", [compute_focal_loss, compute_dice_of_images], ids=["focal", "dice of images"])
def test_means_over_images_are_known_as_such(loss: Loss):
    whole = prepare_recipe(PLANS["parts"], loss, 8).graph.whole
    assert (whole.unknown, whole.totals, whole.scaled) == ("", (), False)


def test_verify_compares_with_the_whole_batch():
    """The model of the oracle sees micro-batch after micro-batch, as its batch norms must; its loss sees all."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.out, self.aux = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            x = self.norm(self.first(x)).relu()
            return {"out": self.out(x), "aux": self.aux(x)}

    def compute_loss(answer, labels):
        terms = [F.cross_entropy(answer[name], labels, ignore_index=2) for name in ("out", "aux")]
        return terms[0] + 0.4 * terms[1]

    plan = float64(split_size=2, num_spatial_parts=2, slice_method="vertical", parts=2)
    torch.manual_seed(0)
    model = Several()
    recipe = prepare(model, plan, (4, 3, *SIZE), compute_loss, labels=TensorSpec((4, *SIZE), "int64"), device="cpu")
    assert recipe.has_whole_loss
    line, *_ = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, compute_loss, seed=0))
    assert line["ok"], line
    assert any(
        len({int((part == 2).sum()) for part in each["labels"].chunk(2)}) == 2 for each in make_batches(recipe, 0)
    )
