"""A training from images to weights, step by step, on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engines.comm.together import together
from engines.comm.world import World
from engines.errors import ImageError
from engines.images.labelled import LabelledImages, in_order
from engines.images.own import OwnPart
from engines.program.worker import Inputs
from engines.training import RankTraining, Recipe

__all__ = ["Told", "images_per_step", "summary", "train"]


@dataclass(frozen=True, slots=True)
class Told:
    """What is told of one step: `right` of `judged` predictions, made before the weights changed."""

    epoch: int
    step: int
    images: int
    seconds: float
    loss: float
    right: int
    judged: int

    @property
    def images_per_s(self) -> float:
        """Reading the images is not counted."""
        return self.images / self.seconds

    @property
    def accuracy(self) -> float | None:
        """The share that is right; None where the model does not tell classes."""
        return self.right / self.judged if self.judged else None


def images_per_step(recipe: Recipe) -> int:
    """The images that all ranks together take in one step."""
    return recipe.step_specs["images"].shape[0]


def train(
    world: World, recipe: Recipe, images: LabelledImages, epochs: int = 1, seed: int = 0, steps: int | None = None
) -> Iterator[Told]:
    """Epochs in the seed's order, the same for every plan, of at most `steps` steps; images left over are left out.

    Each step is told to every rank when it is done. Raises ImageError, on every rank, where an image cannot be
    read or there are too few for one step; LossError where the loss is not a number.
    """
    count = images_per_step(recipe)
    if len(images) < count:
        raise ImageError(
            f"There are {len(images)} images, but a step takes {count}. Lower --batch-size, or add images."
        )
    training = RankTraining(world, recipe)
    own = OwnPart(training, images, recipe.step_specs)
    for epoch in range(epochs):
        order = in_order(len(images), seed, epoch)
        for step, start in enumerate(range(0, len(images) - count + 1, count)[:steps]):
            part = together(world, partial(own.read, order[start : start + count]))
            ranks = world.gather(_step(training, part))
            yield _told(epoch, step, count, ranks)


@dataclass(frozen=True, slots=True)
class _Heard:
    """What one rank knows of a step: the losses of some micro-batches, and how many of its predictions are right."""

    seconds: float
    losses: Mapping[int, float]
    right: int
    judged: int


def _step(training: RankTraining, parts: Inputs) -> _Heard:
    start_s = time.perf_counter()
    losses = training.step(parts).losses
    seconds = time.perf_counter() - start_s
    counts = [_right(training, number, part["labels"]) for number, part in parts.items() if "labels" in part]
    return _Heard(seconds, losses, sum(right for right, _ in counts), sum(judged for _, judged in counts))


def _right(training: RankTraining, micro_batch: int, labels: Tensor) -> tuple[int, int]:
    """Of this rank's predictions for a micro-batch, as the step has left them; what ranks share is counted once."""
    way = training.program.way(micro_batch)
    feed = way.feeds["labels"]
    own = feed.axes is not None or (feed.tile is not None and feed.tile.images is not None)
    if way.prediction is None or not (own or way.seeds_loss):
        return 0, 0
    scores = training.worker.peek(way.prediction, micro_batch)
    if (*scores.shape[:1], *scores.shape[2:]) != labels.shape:
        return 0, 0
    return int((scores.argmax(1) == labels.to(scores.device)).sum()), labels.numel()


def _told(epoch: int, step: int, images: int, ranks: Sequence[_Heard]) -> Told:
    losses = {number: loss for heard in ranks for number, loss in heard.losses.items()}
    right, judged = sum(heard.right for heard in ranks), sum(heard.judged for heard in ranks)
    seconds = max(heard.seconds for heard in ranks)
    return Told(epoch, step, images, seconds, statistics.fmean(losses.values()), right, judged)


def summary(told: Sequence[Told]) -> dict[str, object]:
    """A training as one line: loss and accuracy are those of its last epoch."""
    speeds = [step.images_per_s for step in told]
    last = [step for step in told if step.epoch == told[-1].epoch]
    judged = sum(step.judged for step in last)
    return {
        "epochs": told[-1].epoch + 1,
        "steps": len(told),
        "images_per_step": told[-1].images,
        "images_per_s_mean": round(statistics.fmean(speeds), 4),
        "images_per_s_median": round(statistics.median(speeds), 4),
        "loss": statistics.fmean(step.loss for step in last),
        "accuracy": sum(step.right for step in last) / judged if judged else None,
    }
