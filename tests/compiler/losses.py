"""Losses as people write them, and what a plain loop in float64 does with a whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]

CLASSES, SIZE, RATE = 3, (8, 8), 0.05


def compute_masked_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """A mean over valid pixels, with a denominator that is kept from 0."""
    valid = labels != -100
    each = F.cross_entropy(scores, torch.where(valid, labels, 0), reduction="none")
    return (each * valid).sum() / valid.sum().clamp(min=1)


def compute_deeply_supervised_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Two terms, each with a denominator of its own."""
    weight = torch.ones(CLASSES, dtype=scores.dtype) * 2
    return F.cross_entropy(scores, labels) + 0.4 * F.cross_entropy(2 * scores, labels.clamp(max=1), weight)


def compute_balanced_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Binary, with a weight that follows from how many labels of the batch are positive."""
    truth = labels.clamp(0, 1).to(scores.dtype)
    weight = (truth.numel() - truth.sum()) / truth.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(scores[:, 0], truth, pos_weight=weight)


def compute_flattened_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Pixels in rows, as many libraries have them."""
    return F.cross_entropy(scores.permute(0, 2, 3, 1).reshape(-1, CLASSES), labels.reshape(-1))


def compute_sum_and_mean(scores: Tensor, labels: Tensor) -> Tensor:
    return 0.01 * F.cross_entropy(scores, labels, reduction="sum") + scores.square().mean()


def compute_loss_per_image(scores: Tensor, labels: Tensor) -> Tensor:
    """A sum divided by the size of the batch, which the trace knows as a number only."""
    return F.cross_entropy(scores, labels, reduction="sum") / len(labels)


def compute_dice_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Over the whole batch: a quotient of two sums that both depend on the model."""
    shares, hot = scores.softmax(1), F.one_hot(labels.clamp(min=0), CLASSES).permute(0, 3, 1, 2).to(scores.dtype)
    dims = (0, 2, 3)
    return 1 - (2 * (shares * hot).sum(dims) / (shares.sum(dims) + hot.sum(dims) + 1e-6)).mean()


def compute_dice_of_images(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean over images of each one's own quotient."""
    shares, hot = scores.softmax(1), F.one_hot(labels.clamp(min=0), CLASSES).permute(0, 3, 1, 2).to(scores.dtype)
    return 1 - (2 * (shares * hot).sum((2, 3)) / (shares.sum((2, 3)) + hot.sum((2, 3)) + 1e-6)).mean()


def compute_focal_loss(scores: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(scores, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


class Wrapped(nn.Module):
    """`ignore_index` and class weights inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(torch.tensor([1.0, 10.0, 0.1]), ignore_index=-100, label_smoothing=0.1)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.inner(scores, labels) + 0.1 * scores.square().mean()


WHOLE: dict[str, Loss] = {
    "ignored": nn.CrossEntropyLoss(),
    "wrapped": Wrapped(),
    "log-probabilities": lambda scores, labels: F.nll_loss(scores.log_softmax(1), labels),
    "masked": compute_masked_loss,
    "deeply supervised": compute_deeply_supervised_loss,
    "balanced": compute_balanced_loss,
    "flattened": compute_flattened_loss,
    "sum and mean": compute_sum_and_mean,
    "per image": compute_loss_per_image,
    "weights of a closure": lambda scores, labels: F.cross_entropy(
        scores, labels, torch.tensor([1.0, 10.0, 0.1], dtype=scores.dtype)
    ),
}
"""Of these the mean over micro-batches is not the loss of the batch, or only if it is traced well."""


def make_segmenter() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, CLASSES, 1),
    )
    return nn.Sequential(*layers).double()


def make_unbalanced_batch(images: int, seed: int) -> Batch:
    """The first half of the images has one valid label, the rest different numbers of them."""
    random = torch.Generator().manual_seed(seed)
    pixels = torch.randn(images, 3, *SIZE, generator=random, dtype=torch.float64)
    labels = torch.randint(CLASSES, (images, *SIZE), generator=random)
    labels[: images // 2] = -100
    labels[0, 0, 0] = 1
    labels[-1, :3] = -100
    return pixels, labels


def train_plain(
    model: nn.Module, loss: Loss, batches: Sequence[Batch]
) -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, gradients and final weights of plain SGD in one process, each batch at once."""
    model = copy.deepcopy(model)
    loss = copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, gradients = [], []
    for images, labels in batches:
        optimiser.zero_grad()
        value = loss(model(images), labels)
        value.backward()
        losses.append(value.item())
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
        optimiser.step()
    return losses, gradients, {name: weight.detach() for name, weight in model.named_parameters()}
