"""Train loops of a `fit`: over batches that the notebook sends, or over images that the ranks read."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, TypeGuard

from mpi4dl_nb.engines.errors import ImageError, RankError
from mpi4dl_nb.engines.images.dataset import LabelledImages, check_classes
from mpi4dl_nb.engines.images.loader import LoaderOptions, NotReady
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.recipe import count_step_images
from mpi4dl_nb.engines.train.train_loop import count_left_over, merge_stats
from mpi4dl_nb.engines.train.training_events import Scores, StepResult
from mpi4dl_nb.training.batches import Batch, Batches, CachedBatches, count_images, find_batch_sizes, get_length
from mpi4dl_nb.training.training_handle import TrainingHandle

Evaluate = Callable[[], Scores | None]


def is_images(data: object) -> TypeGuard[LabelledImages]:
    """Return whether ranks can read `data` by themselves, image by image."""
    return all(hasattr(data, name) for name in ("classes", "__len__", "name", "shape", "part", "label", "mask"))


class BatchLoop:
    """Train loop over batches, in epochs of at most `limit` steps. `evaluate` as in `TrainLoop` (engines).

    A batch with fewer images than a step takes is left out (`drop_last`), or trained by a program of its own size. Such
    a batch before any full one is an error: batches of another size than the plan's are then not intended. Raises
    ImageError or PlanError if sizes that are known beforehand do not fit.
    """

    bad: Sequence[str] = ()

    def __init__(
        self, training: TrainingHandle, data: Batches, evaluate: Evaluate, limit: int | None, drop_last: bool
    ) -> None:
        self.training, self.evaluate = training, evaluate
        self.data, self.limit, self.drop_last = data, limit, drop_last
        self.full, self.has_full = count_step_images(training.recipe), False
        self.known = find_batch_sizes(data, self.full)
        self._kept = self._skip_dropped(data) if isinstance(data, Iterator) else None
        self.is_over = False
        self._prepare_sizes()
        self._seek((0, 0))

    def _prepare_sizes(self) -> None:
        """Prepare the ranks for the step sizes that will come."""
        for count in {} if self.drop_last or not self.known else dict.fromkeys(self.known[: self.limit]):
            self.training.make_ready(count)

    # What becomes of batches where a step takes 4 images:
    #
    #     sizes given   4 4 3     the last one is trained by programs for 3 images
    #                   4 4 3     or left out (`drop_last`)
    #                   3 4 4     an error, as it was 3 images for which the training should have been made
    #                   4 5       an error
    #
    # The errors are those of the step itself, as for any batch of a wrong shape.
    def _skip_dropped(self, data: Iterable[Batch]) -> Iterator[Batch]:
        for batch in data:
            count = count_images(batch)
            self.has_full = self.has_full or count == self.full
            if not (self.drop_last and self.has_full and count < self.full):
                yield batch

    @property
    def place(self) -> tuple[int, int]:
        """The current epoch, and the number of its batches that are done."""
        return self.epoch, self.number

    def resume(self, place: tuple[int, int]) -> None:
        """Resume from an earlier or the current position. To go back, the batches must come in the same order again."""
        self._prepare_sizes()  # restarted ranks have lost their programs for smaller steps
        if place != self.place:
            self._seek(place)

    def _seek(self, place: tuple[int, int]) -> None:
        self.epoch, self.number = place
        # An iterator cannot be rewound: it continues where it is.
        data = self.data.iterate_epoch(self.epoch) if isinstance(self.data, CachedBatches) else self.data
        self.batches = self._kept or islice(self._skip_dropped(data), self.number, None)
        self._batch: Batch | None = None  # the current batch, kept for a retry until its step succeeds

    @property
    def steps(self) -> int | None:
        """The number of steps of one epoch; None if unknown."""
        kept = [count for count in self.known or () if count == self.full or not self.drop_last]
        known = len(kept) if self.known else get_length(self.data)
        return min((count for count in (known, self.limit) if count is not None), default=None)

    def count_steps(self, epochs: int) -> int | None:
        """Return the number of steps of `epochs` epochs; None if unknown."""
        return None if self.steps is None else epochs * self.steps

    def step(self) -> StepResult | None:
        """Run one step on the next batch, and count the time until that batch is there as waiting for data."""
        start_s = time.perf_counter()
        if self._batch is None and self.number != self.limit:
            self._batch = next(self.batches, None)
        wait_s = time.perf_counter() - start_s
        if self._batch is None:
            if not self.number and not self.epoch:
                raise ImageError("fit was given no batch. Give it at least one; a generator gives each of them once.")
            if not self.number and self._kept:
                text = f"The batches have ended after {self.epoch} epochs: there are none for another one."
                warnings.warn(text, stacklevel=2)
            self._seek((self.epoch + 1, 0))
            self.is_over = True
            return None
        count = count_images(self._batch)
        smaller = count if self.has_full and 0 < count < self.full else None
        if smaller:
            self.training.make_ready(smaller)
        stats = self.training.take(*self._batch, smaller)
        # Only now is the batch used up: if the step has raised an error, a retry after healing trains it again.
        self.number, self.is_over, self._batch = self.number + 1, False, None
        return merge_stats([replace(rank, epoch=self.epoch, step=self.number - 1, wait_s=wait_s) for rank in stats])

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


# ---- images that the ranks read


class ImageLoop:
    """Train loop in which every rank reads its own part of `images`. `evaluate` as in `TrainLoop` (engines).

    The loop starts at the position `state`, or with the next epoch if `state` is the end of one. After each step,
    `place` and the training's `feed_state` hold the position of the next step.
    """

    def __init__(
        self,
        training: TrainingHandle,
        images: LabelledImages,
        feeding: LoaderOptions,
        state: Mapping[str, Any] | None,
        evaluate: Evaluate,
    ) -> None:
        check_classes(images, training.recipe.graph)
        self.training, self.evaluate, self.bad = training, evaluate, ()
        self.images, self.feeding = images, feeding
        self.left_over = count_left_over(len(images), training.recipe, feeding.steps, feeding.drop_last)
        whole = len(images) // count_step_images(training.recipe) + bool(self.left_over)
        self.steps = min(whole, feeding.steps or whole)
        self.is_over = False
        self._begin(state, anew=True)
        self.done = self.place["step"]  # steps already done of a resumed epoch

    def resume(self, place: Mapping[str, Any]) -> None:
        """Let the ranks read from an earlier position on."""
        self._begin(place, anew=False)

    def _begin(self, place: Mapping[str, Any] | None, anew: bool) -> None:
        training = self.training
        self._known: tuple[str, ...] = tuple(self.bad)
        specs = training.recipe.step_specs
        if self.left_over:
            training.make_ready(self.left_over)
        begin = rank_functions.begin_loop, training.name
        self.place = training.cluster.call(*begin, specs, self.images, self.feeding, place, anew)[0]

    def count_steps(self, epochs: int) -> int:
        """Return the number of steps left in `epochs` epochs, the first of which may have started."""
        return epochs * self.steps - self.done

    def step(self) -> StepResult | None:
        """Run one step on all ranks."""
        training = self.training
        # The steps that the ranks have done and their count here change together, whatever thread steps next.
        with training.cluster.turn:
            with training.explain_failure():
                answers = training.cluster.call(rank_functions.step_loop, training.name, training.steps)
            # Bad images were skipped, so that fewer are left for the last step, which takes programs of another size.
            if isinstance(answers[0].stats, NotReady):
                training.make_ready(answers[0].stats.images)
                return self.step()
            self.bad = (*self._known, *(text for text in answers[0].bad if text not in self._known))
            self.place = training.feed_state = answers[0].state
            stats = [answer.stats for answer in answers if answer.stats is not None]
            self.is_over = not stats
            if self.is_over:
                return None
            training.record_step([answer.report for answer in answers], stats[0].images)
            return merge_stats(stats)

    def close(self) -> None:
        """End the loader workers on the ranks. If ranks have died, their workers have ended too."""
        training = self.training
        with suppress(RankError), training.cluster.turn:
            # An interrupt may have met some ranks before their update and others after it.
            updates = training.cluster.call(rank_functions.end_loop, training.name)
            if set(updates) != {training.steps}:
                warnings.warn(
                    f"The training was stopped while ranks changed their weights: {updates.count(training.steps)} of "
                    f"{len(updates)} have not done so. Load a checkpoint, or make a new Training.",
                    stacklevel=2,
                )


def choose_resume_state(
    state: Mapping[str, Any] | None, images: LabelledImages, seed: int | None
) -> Mapping[str, Any] | None:
    """Return the position to resume from, in an epoch or at the start of the next; None to start from scratch.

    Raises ImageError if an unfinished epoch used other images or another seed.
    """
    if state is None or (state["images"] == len(images) and seed in (None, state["seed"])):
        return state
    if state["step"] == 0:
        return None
    raise ImageError(
        f"The last epoch ended early, at step {state['step']} through {state['images']} images in the order of seed "
        f"{state['seed']}: these are {len(images)} images, seed {seed}. Give it the same, or go_on=False to begin anew."
    )
