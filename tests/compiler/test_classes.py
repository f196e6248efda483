"""Labels are class numbers only where the traced loss takes them so: as in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler.labels import LabelSpec, find_label_specs
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.graph.output_meaning import find_output_meaning
from mpi4dl_nb.engines.images.dataset import Subset, SyntheticImages, check_classes, check_label_shape
from mpi4dl_nb.engines.images.examples import ExampleImages
from mpi4dl_nb.engines.images.shard_reader import ShardReader
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.verify import make_batches
from tests.compiler.losses import SIZE, Loss

PLAN = Plan(split_size=1, num_spatial_parts=4)


def make_segmenter(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, classes, 1))


def make_classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))


class Hidden(nn.Module):
    """A loss with an `ignore_index` that no attribute of it tells."""

    def forward(self, scores, labels):
        return nn.CrossEntropyLoss(ignore_index=255)(scores, labels) + 0.1 * scores.square().mean()


def draw_numbers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


VOID = torch.where(draw_numbers(0, 4, 2, *SIZE) == 3, 255, draw_numbers(0, 3, 2, *SIZE))
TAKEN = {
    "one logit for each pixel": (
        make_segmenter(1),
        lambda p, y: F.binary_cross_entropy_with_logits(p[:, 0], y.to(p.dtype)),
        draw_numbers(0, 2, 2, *SIZE),
    ),
    "one logit for each image": (
        make_classifier(),
        lambda p, y: F.binary_cross_entropy_with_logits(p[:, 0], y.to(p.dtype)),
        torch.tensor([0, 1]),
    ),
    "counts": (make_classifier(), lambda p, y: F.poisson_nll_loss(p[:, 0], y), torch.tensor([5, 17])),
    "negative amounts": (make_classifier(), lambda p, y: F.mse_loss(p[:, 0], y.to(p.dtype)), torch.tensor([-5, 17])),
    "ignored in a function": (make_segmenter(3), lambda p, y: F.cross_entropy(p, y, ignore_index=255), VOID),
    "ignored in a module": (make_segmenter(3), Hidden(), VOID),
    "masked by hand": (
        make_segmenter(3),
        lambda p, y: (F.cross_entropy(p, y.clamp(max=2), reduction="none") * (y != 255)).mean(),
        VOID,
    ),
    "more channels than classes": (
        make_segmenter(5),
        lambda p, y: F.cross_entropy(p[:, :3], y),
        draw_numbers(0, 3, 2, *SIZE),
    ),
}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(4, backend="loopback") as started:
        yield started


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TAKEN)
def test_whatever_plain_pytorch_takes_is_trained(cluster, name: str):
    model, loss, labels = TAKEN[name]
    images = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(1))
    training = Training(model, PLAN, cluster, images.shape, loss=loss)
    assert training.step(images, labels) == pytest.approx(loss(model(images), labels).item(), rel=1e-5)
    training.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("loss", "label", "said"),
    [
        (
            nn.CrossEntropyLoss(),
            3,
            r"A label is 3, but the loss takes numbers of 3 classes \(0 to 2\) and ignores -100",
        ),
        (Hidden(), -100, r"A label is -100, but the loss takes numbers of 3 classes \(0 to 2\) and ignores 255"),
        (lambda p, y: F.cross_entropy(p[:, :2], y), 2, r"A label is 2, but the loss takes numbers of 2 classes"),
        (lambda p, y: (F.one_hot(y, 3).movedim(-1, 1) * p).mean(), 3, r"A label is 3, .* 3 classes \(0 to 2\)\. "),
        (lambda p, y: F.nll_loss(p.log_softmax(1), y), -1, "A label is -1"),
    ],
    ids=["usual", "hidden", "fewer than channels", "one-hot", "log-probabilities"],
)
def test_a_class_that_the_loss_does_not_know_is_reported_before_a_rank_sees_it(
    cluster, loss: Loss, label: int, said: str
):
    training = Training(make_segmenter(3), PLAN, cluster, (2, 3, *SIZE), loss=loss)
    labels = torch.ones(2, *SIZE, dtype=torch.int64)
    labels[1, 2, 3] = label
    with pytest.raises(ValueError, match=said):
        training.step(torch.zeros(2, 3, *SIZE), labels)
    training.close()


class FiveClasses:
    classes = 5


@pytest.mark.parametrize("name", TAKEN)
def test_images_with_more_classes_are_refused_only_by_a_loss_of_classes(name: str):
    model, loss, _ = TAKEN[name]
    graph = prepare(model, PLAN, (2, 3, *SIZE), loss).graph
    known = {"ignored in a function": LabelSpec(3, 255), "ignored in a module": LabelSpec(3, 255)}
    known["more channels than classes"] = LabelSpec(3, -100)
    assert find_label_specs(graph) == ((known[name],) if name in known else ())
    if "one logit" in name:
        with pytest.raises(ValueError, match="have 5 classes, but the binary cross-entropy takes labels from 0 to 1"):
            check_classes(FiveClasses(), graph)
    elif name in known:
        with pytest.raises(ValueError, match="have 5 classes, but the loss takes numbers of 3"):
            check_classes(FiveClasses(), graph)
    else:
        check_classes(FiveClasses(), graph)


def test_classes_of_images_and_of_masks_are_compared_each_with_its_loss():
    """Of three classes of images beside masks of two, a classifier of two would train on an index out of range."""
    images = ExampleImages([], ["a", "b", "c"], SIZE, mask_classes=2)
    of_pixels = prepare(make_segmenter(2), PLAN, (2, 3, *SIZE), nn.CrossEntropyLoss()).graph
    of_images = nn.Sequential(make_segmenter(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for found in (images, Subset(images, ())):
        check_classes(found, of_pixels)
        with pytest.raises(ImageError, match="have 3 classes, but the loss takes numbers of 2"):
            check_classes(found, prepare(of_images, PLAN, (2, 3, *SIZE), nn.CrossEntropyLoss()).graph)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, *SIZE)], ids=["of images", "of pixels"])
def test_one_hot_labels_are_not_filled_with_class_numbers(shape: tuple[int, ...]):
    model = make_segmenter(3)
    if len(shape) == 2:
        model = nn.Sequential(model, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    made = prepare(model, PLAN, (2, 3, *SIZE), nn.BCEWithLogitsLoss(), labels=torch.zeros(shape))
    with pytest.raises(ImageError, match=r"labels of shape .* one class number per image or pixel"):
        check_classes(SyntheticImages(4, SIZE, 2), made.graph)
    with pytest.raises(ImageError, match=r"labels of shape .* one class number per image or pixel"):
        ShardReader(lambda inputs: {0: inputs}, SyntheticImages(4, SIZE, 3), made.step_specs)


def test_predictions_of_amounts_are_neither_right_nor_wrong():
    meanings = {
        name: find_output_meaning(prepare(model, PLAN, (2, 3, *SIZE), loss).graph).name
        for name, (model, loss, _) in TAKEN.items()
    }
    assert meanings == {
        "one logit for each pixel": "LABELS",
        "one logit for each image": "LABELS",
        "counts": "AMOUNTS",
        "negative amounts": "AMOUNTS",
        "ignored in a function": "CLASSES",
        "ignored in a module": "CLASSES",
        "masked by hand": "CLASSES",
        "more channels than classes": "UNKNOWN",
    }


def test_random_labels_are_those_that_the_loss_takes():
    drawn = {
        name: {
            *make_batches(prepare(model, PLAN, (2, 3, *SIZE), loss), seed=0, steps=1)[0]["labels"].flatten().tolist()
        }
        for name, (model, loss, _) in TAKEN.items()
    }
    assert drawn["one logit for each pixel"] == {0, 1}
    assert drawn["more channels than classes"] == {0, 1, 2}


def test_soft_labels_are_no_class_numbers():
    spec = TensorSpec((2, 3, *SIZE), "float32")
    graph = prepare(make_segmenter(3), PLAN, (2, 3, *SIZE), nn.CrossEntropyLoss(), labels=spec).graph
    assert find_label_specs(graph) == ()


def test_a_single_number_is_no_label_of_images():
    with pytest.raises(ImageError, match=r"labels of shape \(\), but images of files have one class number per image"):
        check_label_shape(())
