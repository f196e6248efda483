"""The quality of predictions, counted class by class, so that the counts of ranks, steps and images add up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

__all__ = ["Counts", "Scores", "count_predictions", "sum_counts"]


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts per class: how many predictions are `right`, were `predicted`, and how many labels are `true`.

    They count images, or pixels if `pixels` is set.

    >>> both = Counts((2, 1), (3, 2), (3, 2)) + Counts((1, 0), (1, 0), (1, 0))
    >>> both.right, round(both.accuracy, 3), both.dice
    ((3, 1), 0.667, 0.5)
    """

    right: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()
    true: tuple[int, ...] = ()
    pixels: bool = False

    def __add__(self, other: Counts) -> Counts:
        if not self.true or not other.true:
            return self if self.true else other
        pairs = ((self.right, other.right), (self.predicted, other.predicted), (self.true, other.true))
        return Counts(*(tuple(map(sum, zip(*pair, strict=True))) for pair in pairs), self.pixels)

    @property
    def accuracy(self) -> float | None:
        """The fraction of correct predictions; None if nothing was counted."""
        return sum(self.right) / judged if (judged := sum(self.true)) else None

    @property
    def dice(self) -> float | None:
        """2 right / (predicted + true), averaged over the classes that occur; of two classes, that of the second alone.

        (Dice, 1945, "Measures of the amount of ecologic association between species".) None if no class occurs.
        """
        first = 1 if len(self.true) == 2 else 0
        sums = zip(self.right[first:], self.predicted[first:], self.true[first:], strict=True)
        each = [2 * right / (predicted + true) for right, predicted, true in sums if predicted + true]
        return statistics.fmean(each) if each else None


@dataclass(frozen=True, slots=True)
class Scores:
    """The loss and the counts on held-out images. `bad` says which images were left out, and why.

    The loss is the mean over images, each weighted by the denominator of its own loss: labels that are not ignored,
    class weights. For a loss of this form it equals the loss of all images in one batch. For any other loss it is the
    plain mean.
    """

    loss: float
    counts: Counts
    bad: tuple[str, ...] = ()


def sum_counts(counts: Iterable[Counts]) -> Counts:
    """Return the sum of all counts."""
    return reduce(Counts.__add__, counts, Counts())


def count_predictions(scores: Tensor, labels: Tensor) -> Counts:
    """Count (N, C, ...) scores against labels (N, ...) or (N, 1, ...), integers or not.

    A single score (C = 1) predicts class 1 if it is above 0. Labels that are no class are not counted, and nothing is
    counted if the shapes do not match.
    """
    if scores.dim() < 2:
        return Counts()
    shape = (*scores.shape[:1], *scores.shape[2:])
    if labels.shape == (shape[0], 1, *shape[1:]):
        labels = labels[:, 0]
    if labels.shape != shape:
        return Counts()
    classes = max(scores.shape[1], 2)
    guess = scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()
    truth = labels.to(guess)
    judged = (truth >= 0) & (truth < classes)
    guess, truth = guess[judged], truth[judged]
    # Three histograms over the classes: right, predicted, true.
    each = (guess[guess == truth], guess, truth)
    found = (tuple(torch.bincount(numbers, minlength=classes).tolist()) for numbers in each)
    return Counts(*found, labels.dim() > 1)
