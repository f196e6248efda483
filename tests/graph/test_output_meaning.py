"""What the channels of an output mean follows from the traced loss; where it does not tell, nothing is guessed."""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.output_meaning import (
    OutputMeaning,
    choose_kind,
    choose_meaning,
    compute_classes,
    compute_probabilities,
    find_output_meaning,
)
from mpi4dl_nb.engines.images.dataset import to_network_input
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from tests.compiler.losses import SIZE, Loss

MAPS = torch.zeros(2, 3, *SIZE)
NUMBERS = torch.zeros(2, *SIZE, dtype=torch.int64)
CLASSES, LABELS, SHARES, AMOUNTS, UNKNOWN = OutputMeaning


def make_segmenter(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1), *more)


def compute_dice(shares: Tensor, labels: Tensor) -> Tensor:
    return 1 - 2 * (shares * labels).sum() / (shares + labels).sum()


def compute_focal_loss(p: Tensor, y: Tensor) -> Tensor:
    return ((p.sigmoid() - y) ** 2 * F.binary_cross_entropy_with_logits(p, y, reduction="none")).mean()


class TwoHeads(nn.Module):
    """The model itself takes the sigmoid of its first output, for the second one, which alone the loss reads so."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.one(x)
        return first, self.other(x) * first.sigmoid()


of_pixels = make_segmenter()
LOSSES: dict[str, tuple[nn.Module, Loss, Tensor, OutputMeaning]] = {
    "cross-entropy": (of_pixels, nn.CrossEntropyLoss(), NUMBERS, CLASSES),
    "soft labels": (of_pixels, nn.CrossEntropyLoss(label_smoothing=0.1), MAPS, CLASSES),
    "log-softmax in the model": (make_segmenter(nn.LogSoftmax(1)), nn.NLLLoss(), NUMBERS, CLASSES),
    "log-softmax in the loss": (of_pixels, lambda p, y: F.nll_loss(p.log_softmax(1), y), NUMBERS, CLASSES),
    "Dice of softmax": (of_pixels, lambda p, y: compute_dice(p.softmax(1), y), MAPS, CLASSES),
    "divergence": (of_pixels, lambda p, y: F.kl_div(p.log_softmax(1), y), MAPS, CLASSES),
    "by hand": (
        of_pixels,
        lambda p, y: (p.logsumexp(1) - p.gather(1, y[:, None])[:, 0]).mean(),
        NUMBERS,
        CLASSES,
    ),
    "pixels in rows": (
        of_pixels,
        lambda p, y: F.cross_entropy(p.permute(0, 2, 3, 1).reshape(-1, 3), y.reshape(-1)),
        NUMBERS,
        CLASSES,
    ),
    "with a penalty": (
        of_pixels,
        lambda p, y: F.cross_entropy(p, y) + 0.1 * p.square().mean(),
        NUMBERS,
        CLASSES,
    ),
    "binary cross-entropy": (of_pixels, nn.BCEWithLogitsLoss(), MAPS, LABELS),
    "channels last": (
        of_pixels,
        lambda p, y: F.binary_cross_entropy_with_logits(p.movedim(1, -1), y.movedim(1, -1)),
        MAPS,
        LABELS,
    ),
    "soft margin": (of_pixels, nn.MultiLabelSoftMarginLoss(), MAPS, LABELS),
    "plus and minus one": (of_pixels, nn.SoftMarginLoss(), MAPS, LABELS),
    "Dice of sigmoid": (of_pixels, lambda p, y: compute_dice(p.sigmoid(), y), MAPS, LABELS),
    "Dice and binary": (
        of_pixels,
        lambda p, y: F.binary_cross_entropy_with_logits(p, y) + compute_dice(p.sigmoid(), y),
        MAPS,
        LABELS,
    ),
    "focal": (of_pixels, compute_focal_loss, MAPS, LABELS),
    "label by label": (
        of_pixels,
        lambda p, y: sum(F.binary_cross_entropy_with_logits(p[:, k], y[:, k]) for k in range(3)),
        MAPS,
        LABELS,
    ),
    "sigmoid in the model": (make_segmenter(nn.Sigmoid()), nn.BCELoss(), MAPS, SHARES),
    "kept from 0 and 1": (
        make_segmenter(nn.Sigmoid()),
        lambda p, y: F.binary_cross_entropy(p.clamp(1e-6, 1 - 1e-6), y),
        MAPS,
        SHARES,
    ),
    "squares": (of_pixels, nn.MSELoss(), MAPS, AMOUNTS),
    "absolute": (of_pixels, nn.HuberLoss(), MAPS, AMOUNTS),
    "squares by hand": (of_pixels, lambda p, y: ((y - p) ** 2).mean(), MAPS, AMOUNTS),
    "Dice of a model's own sigmoid": (make_segmenter(nn.Sigmoid()), compute_dice, MAPS, UNKNOWN),
    "over rows": (of_pixels, lambda p, y: F.nll_loss(p.log_softmax(2), y), NUMBERS, UNKNOWN),
    "two tasks": (
        of_pixels,
        lambda p, y: F.cross_entropy(p[:, :2], y) + F.binary_cross_entropy_with_logits(p[:, 2], y.to(p.dtype)),
        NUMBERS,
        UNKNOWN,
    ),
    "two of three labels": (
        of_pixels,
        lambda p, y: F.binary_cross_entropy_with_logits(p[:, :2], y[:, :2]),
        MAPS,
        UNKNOWN,
    ),
    "with a temperature": (of_pixels, lambda p, y: F.cross_entropy(p / 2, y), NUMBERS, UNKNOWN),
    "clamped scores": (of_pixels, lambda p, y: F.cross_entropy(p.clamp(0, 1), y), NUMBERS, UNKNOWN),
    "nothing": (of_pixels, lambda p, y: (p * 0).sum(), NUMBERS, UNKNOWN),
    "another output": (TwoHeads(), lambda p, y: F.cross_entropy(p[1], y), NUMBERS, UNKNOWN),
    "both outputs": (
        TwoHeads(),
        lambda p, y: F.cross_entropy(p[0], y) + F.binary_cross_entropy_with_logits(p[1][:, 0], y.to(p[1].dtype)),
        NUMBERS,
        CLASSES,
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_says_what_channels_are(name: str):
    model, loss, labels, expected = LOSSES[name]
    plan = Plan(split_size=1, spatial_size=0, parts=2)  # its loss is rewritten for micro-batches
    recipe = prepare(model, plan, (2, 3, *SIZE), loss, labels=labels)
    assert find_output_meaning(recipe.graph) is expected


def test_probabilities_and_classes_are_those_of_torch():
    scores = torch.randn(2, 3, 4, 5)
    assert torch.equal(compute_classes(scores, CLASSES)[:, 0], scores.argmax(1))
    assert torch.equal(compute_probabilities(scores, CLASSES), scores.softmax(1))
    assert torch.equal(compute_classes(scores, LABELS), (scores.sigmoid() > 0.5).long())
    assert torch.equal(compute_probabilities(scores, LABELS), scores.sigmoid())
    assert torch.equal(compute_classes(scores.sigmoid(), SHARES), (scores.sigmoid() > 0.5).long())
    assert torch.equal(compute_probabilities(scores.sigmoid(), SHARES), scores.sigmoid())


@pytest.mark.parametrize(
    ("activation", "kind", "said"),
    [
        ("auto", "classes", r"Say activation='sigmoid' \(--activation sigmoid; a map for each label\), 'softmax'"),
        ("auto", None, "cannot be seen in the loss"),
        ("auto", "probabilities", "Which probabilities"),
        (None, "classes", "are amounts, .* Ask for kind='scores'"),
        ("sigmod", "scores", "did you mean 'sigmoid'|sigmoid"),
        (3, "scores", "activation=3 is unknown"),
    ],
)
def test_what_is_not_known_is_asked_for(activation: object, kind: str | None, said: str):
    with pytest.raises(PlanError, match=said):
        choose_kind(kind, choose_meaning(activation))


def test_what_needs_no_meaning_does_not_ask():
    assert choose_kind("scores", choose_meaning("auto")) == "scores"
    assert choose_kind(None, choose_meaning(None)) == "scores"
    assert choose_kind(None, choose_meaning("sigmoid")) == "classes"


PIXELS = np.random.default_rng(0).integers(0, 256, (20, 26, 3), np.uint8)
ACTIVATE = {
    "binary cross-entropy": torch.sigmoid,
    "cross-entropy": lambda scores: scores.softmax(0),
    "sigmoid in the model": lambda scores: scores,
}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(2, backend="loopback") as started:
        yield started


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ACTIVATE)
def test_a_picture_is_predicted_as_the_loss_says(name: str, cluster: Cluster, tmp_path):
    model, loss, labels, _ = LOSSES[name]
    plan = Plan(split_size=1, spatial_size=1, num_spatial_parts=2, slice_method="1x2", precision="float64")
    training = Training(model, plan, cluster, (2, 3, *SIZE), loss=loss, labels=labels)
    asked = {"memory_mb": 10**5, "progress": False}
    with torch.no_grad():
        scores = model.double().eval()(to_network_input(PIXELS)[None].double())[0]
    model.float()
    shares = ACTIVATE[name](scores).numpy()
    found = training.predict(PIXELS, kind="probabilities", **asked)
    assert np.array_equal(found, np.rint(shares.transpose(1, 2, 0) * 255).astype(np.uint8))
    classes = shares.argmax(0) if name == "cross-entropy" else (shares > 0.5).transpose(1, 2, 0)
    found = training.predict(PIXELS, **asked)
    assert len(np.unique(classes)) > 1
    assert np.array_equal(found, classes)
    path = training.predict(PIXELS, to=tmp_path / "out.tif", **asked)
    assert np.array_equal(tifffile.imread(path), classes)
    training.close()


@pytest.mark.nightly
def test_several_labels_of_an_image_are_a_tensor_of_zeros_and_ones(cluster: Cluster):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    training = Training(
        model,
        Plan(split_size=1, spatial_size=0, data_parallel=2),
        cluster,
        (2, 3, *SIZE),
        loss=nn.BCEWithLogitsLoss(),
        labels=torch.zeros(2, 5),
    )
    with torch.no_grad():
        scores = model.eval()(to_network_input(PIXELS)[None])[0]
    found = training.predict(PIXELS, memory_mb=10**5, progress=False)
    assert found.tolist() == (scores > 0).long().tolist()
    assert training.predict(PIXELS, memory_mb=10**5, progress=False, activation="softmax") == int(scores.argmax())
    with pytest.raises(PlanError, match=r"activation= has no effect for a batch"):
        training.predict(torch.zeros(2, 3, *SIZE), activation="softmax")
    training.close()


def test_labels_are_counted_in_a_step(cluster: Cluster):
    """The accuracy of a step is that of its labels, each by itself."""
    model, loss, _, _ = LOSSES["binary cross-entropy"]
    plan = Plan(split_size=1, spatial_size=1, num_spatial_parts=2, slice_method="1x2")
    training = Training(model, plan, cluster, (2, 3, *SIZE), loss=loss, labels=MAPS)
    images, labels = torch.randn(2, 3, *SIZE), torch.randint(2, MAPS.shape).float()
    with torch.no_grad():
        right = int(((model(images) > 0) == (labels > 0)).sum())
    history = training.fit([(images, labels)], progress=False)
    assert history.epochs[-1].counts.accuracy == pytest.approx(right / labels.numel())
    training.close()
