"""A training from images to weights, step by step, on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from engines.comm.world import World
from engines.images.dataset import LabelledImages
from engines.images.ignored_label import find_ignored_label
from engines.images.loader import LoaderOptions, NotReady, RankLoader
from engines.images.shard_reader import ShardReader
from engines.last_step import compute_smallest_step
from engines.layer.graph import TensorSpec
from engines.loss.label_spec import has_accuracy
from engines.metrics import Counts, Scores, count_predictions, sum_counts
from engines.program.worker import Inputs
from engines.status_board import get_status_board
from engines.training import RankTraining, Recipe, StepReport
from engines.training_events import EpochResult, SkippedImage, StepResult

__all__ = [
    "CollectiveTrainLoop",
    "RankStepStats",
    "RankTrainLoop",
    "TrainLoop",
    "collect_stats",
    "merge_stats",
    "run",
    "run_step",
]


# ---- one rank


@dataclass(frozen=True, slots=True)
class RankStepStats:
    """What one rank knows of a step: the losses of some micro-batches, and what its predictions are worth."""

    images: int
    seconds: float
    losses: Mapping[int, float]
    counts: Counts
    epoch: int = 0
    step: int = 0
    wait_s: float = 0.0


class RankTrainLoop:
    """One rank on its way through images; `specs` are those of a step. A failure ends the workers of its feed.

    After a step, `training` and `feed.state()` are what a checkpoint needs; before the first, `feed.resume(state)`
    goes on from there. `report` is of the last step. Smaller steps at the end of an epoch need a training that was made
    ready for them (`RankTraining.add_size`). Raises ImageError where there are too few images for one step.
    """

    def __init__(
        self,
        world: World,
        training: RankTraining,
        specs: Mapping[str, TensorSpec],
        images: LabelledImages,
        feeding: LoaderOptions,
    ) -> None:
        self.world, self.training, self.images = world, training, specs["images"].shape[0]
        unit, sizes = compute_smallest_step(training.recipe.plan), training.sizes
        own = ShardReader(training, images, specs, find_ignored_label(training.graph))
        self.feed = RankLoader(world, own, self.images, feeding, unit, sizes.__contains__)
        self.report: StepReport | None = None

    def step(self) -> RankStepStats | NotReady | None:
        """One training step; None where the epoch is over, and the next one is begun. Collective.

        Unready, and nothing done, where the next step is a smaller one for which the training is not ready.
        Raises ImageError, on every rank, where an image cannot be read; LossError where the loss is not a number.
        """
        try:
            get_status_board().report(b"reads the images of the next step")
            served = self.feed.load_next()
            if served is None or isinstance(served, NotReady):
                return served
            self.report, heard = run_step(self.training, served.parts, served.images)
            self.feed.advance()
        except BaseException:
            self.close()
            raise
        return replace(heard, epoch=served.place.epoch, step=served.place.step, wait_s=served.wait_s)

    @property
    def updates(self) -> int:
        """How often this rank has changed its weights."""
        return self.training.updates

    def close(self) -> None:
        """End the workers."""
        self.feed.close()

    def __enter__(self) -> RankTrainLoop:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def run_step(training: RankTraining, parts: Inputs, images: int) -> tuple[StepReport, RankStepStats]:
    """One training step on this rank's parts of the inputs."""
    start_s = time.perf_counter()
    training.step(parts, images)
    return collect_stats(training, parts, images, time.perf_counter() - start_s)


def collect_stats(
    training: RankTraining, parts: Inputs, images: int, seconds: float
) -> tuple[StepReport, RankStepStats]:
    """What this rank tells of a step that is done, and what it knows of it."""
    judged = parts.items() if has_accuracy(training.graph) else ()
    counts = sum_counts(
        _count_micro_batch(training, number, part["labels"]) for number, part in judged if "labels" in part
    )
    return training.report, RankStepStats(images, seconds, training.report.losses, counts)


def _count_micro_batch(training: RankTraining, micro_batch: int, labels: Tensor) -> Counts:
    """Of this rank's predictions for a micro-batch, as the step has left them; what ranks share is counted once."""
    way = training.program.get_direction_program(micro_batch)
    feed = way.input_shards["labels"]
    own = feed.axes is not None or (feed.tile is not None and feed.tile.images is not None)
    if way.prediction is None or not (own or way.seeds_loss):
        return Counts()
    scores = training.worker.peek(way.prediction, micro_batch).detach()
    return count_predictions(scores, labels.to(scores.device))


def merge_stats(ranks: Sequence[RankStepStats]) -> StepResult:
    """A step, from what all ranks know of it."""
    losses = {number: loss for heard in ranks for number, loss in heard.losses.items()}
    seconds, wait_s = max(heard.seconds for heard in ranks), max(heard.wait_s for heard in ranks)
    first, counts = ranks[0], sum_counts(heard.counts for heard in ranks)
    loss = statistics.fmean(losses.values())
    return StepResult(first.epoch, first.step, first.images, seconds, loss, counts, wait_s)


# ---- all ranks


class TrainLoop(Protocol):
    """A training as whoever drives it sees it: from a rank, or from a notebook."""

    @property
    def bad(self) -> Sequence[str]:
        """Of each image that was left out so far, which one it is and why."""

    def step(self) -> StepResult | None:
        """The next step; None where the epoch is over."""

    def evaluate(self) -> Scores | None:
        """How good the model is now on images that it is not trained on; None where there are none."""


class CollectiveTrainLoop:
    """The course of all ranks, seen from one of them; every rank does the same. `evaluate` as in `Course`.

    `smaller` makes the recipe of a step of fewer images, where an epoch ends with one.
    """

    def __init__(
        self,
        course: RankTrainLoop,
        evaluate: Callable[[], Scores | None] = lambda: None,
        smaller: Callable[[int], Recipe] | None = None,
    ) -> None:
        self.course, self.evaluate, self.smaller = course, evaluate, smaller

    @property
    def bad(self) -> Sequence[str]:
        """As every rank knows."""
        return self.course.feed.bad

    def step(self) -> StepResult | None:
        """Told to every rank."""
        heard = self.course.step()
        if isinstance(heard, NotReady) and self.smaller:
            self.course.training.add_size(self.smaller(heard.images))
            return self.step()
        return None if heard is None else merge_stats(self.course.world.all_gather(heard))


def run(
    course: TrainLoop, epochs: int = 1, begun: Sequence[StepResult] = (), is_over: bool = False
) -> Iterator[SkippedImage | StepResult | EpochResult]:
    """Each step when it is done, before it the bad images that it left out, and each epoch behind its steps.

    An epoch that has begun already counts as one; `begun` are its steps that are to be told with it, and `is_over`
    where these are all. Whoever goes through this may save the training between two of
    them, or leave.
    """
    said, judged = len(course.bad), set[str]()
    for number in range(epochs):
        steps = list(begun) if number == 0 else []
        more = number > 0 or not is_over
        while more:
            step = course.step()
            yield from map(SkippedImage, course.bad[said:])
            said = len(course.bad)
            more = step is not None
            if step is not None:
                steps.append(step)
                yield step
        if steps:
            held_out = course.evaluate()
            new = [text for text in held_out.bad if text not in judged] if held_out else []
            judged.update(new)
            yield from map(SkippedImage, new)
            yield EpochResult.of(steps, said, held_out)
