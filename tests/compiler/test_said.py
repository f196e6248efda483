"""What the loss of a step is, is said when a training is made, and in its description."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler.whole_loss import ImageWeights, compute_mean_loss
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.inference.evaluation import HeldOutSet, RankEvaluation, evaluate_on_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.train_replicas import with_global_loss
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.training.training_handle import describe_training
from tests.compiler.losses import SIZE, WHOLE, compute_dice_loss, make_segmenter, make_unbalanced_batch

SEVERAL = Plan(split_size=2, spatial_size=0, parts=2, precision="float64")


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, backend="loopback") as started:
        yield started


def test_a_mean_of_micro_batches_is_warned_of_and_described(cluster):
    with pytest.warns(UserWarning, match=r"mean of the losses of its 2 micro-batches \(parts=2\)") as caught:
        training = Training(make_segmenter(), SEVERAL, cluster, (8, 3, *SIZE), loss=compute_dice_loss)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "div in" in str(caught[0].message)
    assert (
        describe_training(training)["Loss of a step"]
        == "mean of the losses of 2 micro-batches, each computed by itself"
    )
    assert "mean of the losses of 2 micro-batches" in repr(training)
    assert training.verify()["ok"]
    training.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss", WHOLE)
def test_of_the_loss_of_the_whole_batch_nobody_is_warned(cluster, loss: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training = Training(make_segmenter(), SEVERAL, cluster, (8, 3, *SIZE), loss=WHOLE[loss])
    assert describe_training(training)["Loss of a step"] == "of the whole batch"
    training.close()


def compute_terms_of_same_denominator(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels) + 0.4 * F.cross_entropy(2 * scores, labels)


def trace_segmenter(judge, count: int):
    specs = TensorSpec((count, 3, *SIZE), "float64"), TensorSpec((count, *SIZE), "int64")
    return trace(make_segmenter(), judge, *specs)


@pytest.mark.parametrize(
    "judge",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(torch.tensor([1.0, 10.0, 0.1]).double()),
        compute_terms_of_same_denominator,
    ],
    ids=["ignored", "weights", "two terms"],
)
def test_images_are_weighted_by_what_their_losses_divide_by(judge):
    (images, labels), model = make_unbalanced_batch(8, 0), make_segmenter()
    weights = ImageWeights.of(lambda count: trace_segmenter(judge, count))
    owned = {f"loss.{name}": b for name, b in judge.named_buffers()} if isinstance(judge, nn.Module) else {}
    pairs = list(zip(model(images).split(1), labels.split(1), strict=True))
    found = compute_mean_loss(
        [judge(p, y).item() for p, y in pairs], [weights.compute_weight(y, owned) for _, y in pairs]
    )
    assert found == pytest.approx(judge(model(images), labels).item(), rel=1e-12)


@pytest.mark.nightly
def test_images_without_such_a_weight_count_alike():
    for judge in (compute_dice_loss, WHOLE["masked"], WHOLE["wrapped"].double(), F.mse_loss):
        weights = ImageWeights.of(
            lambda count, judge=judge: (
                trace_segmenter(judge, count) if judge is not F.mse_loss else trace_squares(count)
            )
        )
        assert weights.compute_weight(torch.zeros(1, *SIZE, dtype=torch.int64), {}) == 1.0
    assert compute_mean_loss([1.0, 4.0], [1.0, 1.0]) == 2.5


def trace_squares(count: int):
    spec = TensorSpec((count, 3, *SIZE), "float64")
    return trace(nn.Conv2d(3, 3, 1).double(), F.mse_loss, spec, spec)


class Masked(SyntheticImages):
    """Pictures with masks, of which the first has no label at all and the others have some."""

    def mask(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        whole = torch.full(SIZE, -100)
        whole[:index, : 2 * index] = index % 3
        return whole[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]


def test_the_held_out_loss_is_that_of_all_images_at_once():
    model, images = make_segmenter(), Masked(5, SIZE, 3, seed=3)
    recipe = prepare(model, Plan(split_size=1, spatial_size=0, precision="float64"), (2, 3, *SIZE), device="cpu")
    held_out = HeldOutSet(model, nn.CrossEntropyLoss(), recipe, images)

    def work(world):
        training = RankTraining(world, recipe)
        evaluation = RankEvaluation(world, training, held_out.forward, recipe.step_specs["labels"], images)
        return evaluate_on_ranks(world, training, held_out, evaluation)

    (scores,) = run_ranks(1, work)
    whole = Tile.whole(*SIZE)
    pixels = torch.stack([images.part(index, whole) for index in range(5)]).double()
    labels = torch.stack([images.mask(index, whole) for index in range(5)])
    assert scores.loss == pytest.approx(F.cross_entropy(model(pixels), labels).item(), rel=1e-12)


def test_replicas_that_wait_for_each_other_have_the_loss_of_all():
    one, two = Plan(split_size=1, spatial_size=0), Plan(split_size=1, spatial_size=0, data_parallel=2)
    graph = prepare(make_segmenter(), one, (2, 3, *SIZE)).graph
    assert with_global_loss(graph, one) is graph
    assert [total.source for total in with_global_loss(graph, two).totals] == ["cross_entropy_loss.counted"]
    with pytest.raises(PlanError, match="cannot be joined"):
        with_global_loss(prepare(make_segmenter(), one, (2, 3, *SIZE), compute_dice_loss).graph, two)
