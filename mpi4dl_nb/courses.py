"""What a `fit` goes through: batches that the notebook sends, or images that ranks read.

A course can go on from a `place` where it has been. `is_over` where its last step found that the epoch has ended.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from engines.errors import ImageError, PlanError, RankError
from engines.images.feed import Feeding
from engines.images.labelled import LabelledImages
from engines.layer.graph import ModelGraph, TensorSpec
from engines.loss.classes import class_numbers
from engines.metrics import Scores
from engines.report import Told
from engines.train import Heard, RankCourse, told
from engines.training import RankTraining, StepReport

if TYPE_CHECKING:
    from engines.host import Host
    from mpi4dl_nb.training import Training

__all__ = [
    "Batch",
    "BatchCourse",
    "ImageCourse",
    "check_classes",
    "continued",
    "end",
    "held",
    "is_images",
]

Batch = tuple[Any, Any]
Evaluate = Callable[[], Scores | None]


def is_images(data: object) -> bool:
    """Whether ranks can read it by themselves, image by image."""
    return all(hasattr(data, name) for name in ("classes", "__len__", "name", "shape", "part", "label", "mask"))


class BatchCourse:
    """Goes through batches, as often as it is asked to. `evaluate` as in `Course`."""

    bad: Sequence[str] = ()

    def __init__(self, training: Training, data: Iterable[Batch], evaluate: Evaluate) -> None:
        self.training, self.evaluate = training, evaluate
        self.data = list(data) if isinstance(data, Iterator) else data
        self.is_over = False
        self._go_to((0, 0))

    @property
    def place(self) -> tuple[int, int]:
        """The epoch, and how many of its batches are done."""
        return self.epoch, self.number

    def renew(self, place: tuple[int, int]) -> None:
        """Go on from a place it has been at. Further back the batches must come in the same order again."""
        if place != self.place:
            self._go_to(place)

    def _go_to(self, place: tuple[int, int]) -> None:
        self.epoch, self.number = place
        self.batches = islice(self.data, self.number, None)
        self._batch: Batch | None = None  # the one that is worked on

    @property
    def steps(self) -> int | None:
        """Of one epoch, as far as that is known."""
        return len(self.data) if isinstance(self.data, Sized) else None

    def total(self, epochs: int) -> int | None:
        """The steps of so many epochs, as far as that is known."""
        return None if self.steps is None else epochs * self.steps

    def step(self) -> Told | None:
        """One step on the next batch; waiting for it is waiting for data."""
        start_s = time.perf_counter()
        self._batch = next(self.batches, None) if self._batch is None else self._batch
        wait_s = time.perf_counter() - start_s
        if self._batch is None:
            self._go_to((self.epoch + 1, 0))
            self.is_over = True
            return None
        heard = self.training.take(*self._batch)
        self.number, self.is_over, self._batch = self.number + 1, False, None
        return told([replace(rank, epoch=self.epoch, step=self.number - 1, wait_s=wait_s) for rank in heard])

    def close(self) -> None:
        """Nothing is held."""


# ---- images that the ranks read


class ImageCourse:
    """Has every rank read its own part of `images`, step by step. `evaluate` as in `Course`.

    It begins where `state` says. After each step `place`, and the training's `feed_state`, say where the next begins.
    """

    def __init__(
        self,
        training: Training,
        images: LabelledImages,
        feeding: Feeding,
        state: Mapping[str, Any] | None,
        evaluate: Evaluate,
    ) -> None:
        check_classes(images, training.recipe.graph)
        self.training, self.evaluate, self.bad = training, evaluate, ()
        self.images, self.feeding = images, feeding
        whole = len(images) // training.recipe.step_specs["images"].shape[0]
        self.steps = min(whole, feeding.steps or whole)
        self.done = state["step"] if state else 0  # of the epoch that has begun
        self.is_over = False
        self.renew(state)

    def renew(self, place: Mapping[str, Any] | None) -> None:
        """Have the ranks read from there on."""
        training, self.place, self._known = self.training, place, tuple(self.bad)
        specs = training.recipe.step_specs
        self.updates = training.cluster.call(_begin, training.name, specs, self.images, self.feeding, place)[0]

    def total(self, epochs: int) -> int:
        """The steps of so many epochs, of which the first may have begun."""
        return epochs * self.steps - self.done

    def step(self) -> Told | None:
        """One step on all ranks."""
        with self.training.explained():
            answers = self.training.cluster.call(_go_on, self.training.name, self.training.steps)
        self.bad = (*self._known, *(text for text in answers[0].bad if text not in self._known))
        self.place, self.updates = answers[0].state, answers[0].updates
        self.training.feed_state = self.place
        heard = [answer.heard for answer in answers if answer.heard is not None]
        self.is_over = not heard
        if self.is_over:
            return None
        self.training.heard([answer.report for answer in answers])
        return told(heard)

    def close(self) -> None:
        """Have the ranks' workers end. Where ranks have died, theirs have too."""
        with suppress(RankError):
            updates = self.training.cluster.call(end, self.training.name)
            if set(updates) != {self.updates}:
                warnings.warn(
                    f"The training was stopped while ranks changed their weights: {updates.count(self.updates)} of "
                    f"{len(updates)} have not done so. Load a checkpoint, or make a new Training.",
                    stacklevel=2,
                )


def check_classes(images: LabelledImages, graph: ModelGraph) -> None:
    """Raises ImageError where the loss takes the labels for class numbers, and there are more classes than it knows."""
    few = min((numbers.classes for numbers in class_numbers(graph)), default=images.classes)
    if few < images.classes:
        raise ImageError(
            f"The images have {images.classes} classes, but the loss takes numbers of {few}. "
            "Change the model's num_classes."
        )


def continued(state: Mapping[str, Any] | None, images: LabelledImages, seed: int | None) -> Mapping[str, Any] | None:
    """Where a training goes on: in the middle of an epoch, or with the next one; None where it begins anew.

    Raises ImageError where an epoch of other images, or of another seed, has not come to its end.
    """
    if state is None or (state["images"] == len(images) and seed in (None, state["seed"])):
        return state
    if state["step"] == 0:
        return None
    raise ImageError(
        f"The last epoch ended early, at step {state['step']} through {state['images']} images in the order of seed "
        f"{state['seed']}: these are {len(images)} images, seed {seed}. Give it the same, or go_on=False to begin anew."
    )


def held(host: Host, name: str, steps: int | None = None) -> RankTraining:
    """The training of that name on a rank. Raises PlanError where there is none, or where it is not `steps` steps old.

    Ranks that fail while they change their weights may have changed some.
    """
    if name not in host.trainings:
        raise PlanError(
            "The ranks hold this training no more: it was closed, or they were started anew. Call load() with a "
            "checkpoint of it, or make a new one."
        )
    found = host.trainings[name]
    if steps not in (None, found.updates):
        raise PlanError(
            f"The training was stopped while ranks changed their weights: after {steps} steps, rank {host.world.rank} "
            f"has done so {found.updates} times. Load a checkpoint, or make a new Training."
        )
    return found


@dataclass(frozen=True)
class _Answer:
    """What a rank says of a step: `heard` is None where the epoch is over."""

    heard: Heard | None
    report: StepReport | None
    state: Mapping[str, Any]
    bad: tuple[str, ...]
    updates: int


def _begin(
    host: Host,
    name: str,
    specs: Mapping[str, TensorSpec],
    images: LabelledImages,
    feeding: Feeding,
    state: Mapping[str, Any] | None,
) -> int:
    end(host, name)
    course = host.courses[name] = RankCourse(host.world, held(host, name), specs, images, feeding)
    if state is not None:
        course.feed.resume(state)
    return course.updates


def _go_on(host: Host, name: str, steps: int) -> _Answer:
    held(host, name, steps)
    course = host.courses[name]
    heard = course.step()
    return _Answer(heard, course.report, course.feed.state(), tuple(course.feed.bad), course.updates)


def end(host: Host, name: str) -> int:
    """End the workers of a training, if it has any; how often it has changed its weights."""
    if (course := host.courses.pop(name, None)) is not None:
        course.close()
    return course.updates if course else 0
