"""`Training.fit`: the course of a training that a notebook drives, on images that ranks read or on batches it sends."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm.auto import tqdm

from engines.checkpoint.interrupts import Interrupts
from engines.checkpoint.keeper import Keeper
from engines.checkpoint.writer import check_writable
from engines.errors import ImageError, PlanError, RankError
from engines.images.feed import Feeding
from engines.images.labelled import LabelledImages
from engines.layer.graph import ModelGraph, TensorSpec
from engines.log import EpochLog
from engines.metrics import Scores
from engines.report import Epoch, LeftOut, Told
from engines.train import Heard, RankCourse, run, told
from engines.training import RankTraining, StepReport

if TYPE_CHECKING:
    from engines.host import Host
    from mpi4dl_nb.training import Training

__all__ = [
    "Bar",
    "Batch",
    "BatchCourse",
    "History",
    "ImageCourse",
    "Saving",
    "Watcher",
    "check_classes",
    "continued",
    "end",
    "fit",
    "held",
    "is_images",
]

Batch = tuple[Any, Any]
Evaluate = Callable[[], Scores | None]


@dataclass(frozen=True)
class History:
    """What `fit` saw: the loss of each step, images per second over all of them, and each epoch.

    `left_out` says of each bad image that was left out which one it was, and why. `stopped` is whether a monitor's
    button has ended it early, `saved` the last checkpoint.
    """

    losses: tuple[float, ...]
    images_per_s: float
    epochs: tuple[Epoch, ...] = ()
    left_out: tuple[str, ...] = ()
    stopped: bool = False
    saved: Path | None = None


class Watcher(Protocol):
    """Is told how a `fit` goes. The ranks wait meanwhile: what takes time is for another thread."""

    def begin(self, training: Training, total: int | None) -> None:
        """It begins, with so many steps to do."""

    def heard(self, event: LeftOut | Told | Epoch) -> None:
        """What has just happened; of a step, `training.reports` tell more."""

    @property
    def stops(self) -> bool:
        """Whether it is to end now."""

    def end(self, outcome: History | BaseException) -> None:
        """It is over."""


def is_images(data: object) -> bool:
    """Whether ranks can read it by themselves, image by image."""
    return all(hasattr(data, name) for name in ("classes", "__len__", "name", "shape", "part", "label", "mask"))


@dataclass(frozen=True)
class Saving:
    """Checkpoints go into `folder` after every `every` steps, or after each epoch; the last `keep` stay."""

    folder: str | PathLike[str] | None
    every: int | None
    keep: int

    def keeper(self, training: Training, asked: Callable[[], int]) -> Keeper | None:
        """What saves a training; None where there is no folder. Raises CheckpointError if it cannot be written to."""
        if self.folder is None:
            return None
        check_writable(Path(self.folder).absolute())
        save = partial(training.save, self.folder, self.keep)
        return Keeper(save, lambda: training.steps, self.every, asked, tqdm.write)


def fit(
    course: BatchCourse | ImageCourse,
    epochs: int,
    log: str | PathLike[str] | None,
    saving: Saving,
    watchers: Sequence[Watcher],
) -> History:
    """Go through a course, until its end or until a watcher stops it; the watchers are told all of it.

    An interrupt ends it between two steps, saved if it is saved at all; a second one at once.
    """
    seen = _Seen()
    interrupts = Interrupts((signal.SIGINT,))
    with (
        closing(course),
        _watched(watchers, course.training, course.total(epochs), seen),
        nullcontext() if log is None else EpochLog(log) as book,
        interrupts as asked,
    ):
        keeper = saving.keeper(course.training, asked)
        for event in run(course, epochs):
            seen.add(event)
            if book is not None and isinstance(event, Epoch):
                book.add(event.record)
            for watcher in watchers:
                watcher.heard(event)
            _look_after(event, keeper, asked)
            if seen.stop(watchers):
                break
        if keeper:
            keeper.after_all()
            seen.saved = keeper.path
        seen.left_out = course.bad
    return seen.history


@dataclass
class _Seen:
    """What becomes a History."""

    losses: list[float] = field(default_factory=list)
    ended: list[Epoch] = field(default_factory=list)
    left_out: Sequence[str] = ()
    images: int = 0
    start_s: float = field(default_factory=time.perf_counter)
    stopped: bool = False
    saved: Path | None = None

    def add(self, event: LeftOut | Told | Epoch) -> None:
        if isinstance(event, Told):
            self.losses.append(event.loss)
            self.images += event.images
        if isinstance(event, Epoch):
            self.ended.append(event)

    def stop(self, watchers: Sequence[Watcher]) -> bool:
        self.stopped = any(watcher.stops for watcher in watchers)
        return self.stopped

    @property
    def history(self) -> History:
        rate = self.images / (time.perf_counter() - self.start_s)
        return History(tuple(self.losses), rate, tuple(self.ended), tuple(self.left_out), self.stopped, self.saved)


@contextmanager
def _watched(watchers: Sequence[Watcher], training: Training, total: int | None, seen: _Seen) -> Iterator[None]:
    """Tell the watchers of the beginning, and whatever happens of the end."""
    outcome: BaseException | None = None
    for watcher in watchers:
        watcher.begin(training, total)
    try:
        yield
    except BaseException as error:
        outcome = error
        raise
    finally:
        for watcher in watchers:
            watcher.end(outcome or seen.history)


def _look_after(event: LeftOut | Told | Epoch, keeper: Keeper | None, asked: Callable[[], int]) -> None:
    """Save if it is time. Raises StoppedError, saved, or KeyboardInterrupt, if the training is to end."""
    if keeper and (isinstance(event, Told) or asked()):
        keeper.after_step()
    if keeper and isinstance(event, Epoch):
        keeper.after_epoch()
    if asked():
        raise KeyboardInterrupt


class Bar:
    """A bar that shows loss and images per second, and a line for each epoch; not `shown`, it tells of bad images."""

    stops = False

    def __init__(self, shown: bool) -> None:
        self.shown, self.images = shown, 0

    def begin(self, training: Training, total: int | None) -> None:
        """An empty bar."""
        self.bar, self.start_s = tqdm(total=total, unit="step", disable=not self.shown), time.perf_counter()

    def heard(self, event: LeftOut | Told | Epoch) -> None:
        """One step more, or a line."""
        match event:
            case LeftOut():
                tqdm.write(f"Left out from now on: {event.text}")
            case Told():
                self.images += event.images
                rate = self.images / (time.perf_counter() - self.start_s)
                self.bar.set_postfix_str(f"loss {event.loss:.4f}, {rate:.2f} images/s")
                self.bar.update()
            case Epoch() if self.shown:
                tqdm.write(str(event))

    def end(self, outcome: History | BaseException) -> None:
        """It stays as it is."""
        self.bar.close()


# ---- batches that the notebook sends


class BatchCourse:
    """Goes through batches, as often as it is asked to. `evaluate` as in `Course`."""

    bad: Sequence[str] = ()

    def __init__(self, training: Training, data: Iterable[Batch], evaluate: Evaluate) -> None:
        self.training, self.evaluate = training, evaluate
        self.data = list(data) if isinstance(data, Iterator) else data
        self.epoch = self.number = 0
        self.batches = iter(self.data)

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
        batch = next(self.batches, None)
        wait_s = time.perf_counter() - start_s
        if batch is None:
            self.epoch, self.number, self.batches = self.epoch + 1, 0, iter(self.data)
            return None
        heard = self.training.take(*batch)
        self.number += 1
        return told([replace(rank, epoch=self.epoch, step=self.number - 1, wait_s=wait_s) for rank in heard])

    def close(self) -> None:
        """Nothing is held."""


# ---- images that the ranks read


class ImageCourse:
    """Has every rank read its own part of `images`, step by step. `evaluate` as in `Course`.

    It begins where `state` says. After each step the training's `feed_state` says where the next one begins.
    """

    def __init__(
        self,
        training: Training,
        images: LabelledImages,
        feeding: Feeding,
        state: Mapping[str, Any] | None,
        evaluate: Evaluate,
    ) -> None:
        specs = training.recipe.step_specs
        check_classes(images, training.recipe.graph)
        self.training, self.evaluate, self.bad = training, evaluate, ()
        whole = len(images) // specs["images"].shape[0]
        self.steps = min(whole, feeding.steps or whole)
        self.done = state["step"] if state else 0  # of the epoch that has begun
        self.updates = training.cluster.call(_begin, training.name, specs, images, feeding, state)[0]

    def total(self, epochs: int) -> int:
        """The steps of so many epochs, of which the first may have begun."""
        return epochs * self.steps - self.done

    def step(self) -> Told | None:
        """One step on all ranks."""
        answers = self.training.cluster.call(_go_on, self.training.name)
        self.bad, self.training.feed_state, self.updates = answers[0].bad, answers[0].state, answers[0].updates
        heard = [answer.heard for answer in answers if answer.heard is not None]
        if not heard:
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
    """What ranks would fail over. Raises ImageError."""
    answers = graph.specs[graph.prediction].shape
    if len(answers) > 1 and 1 < answers[1] < images.classes:
        raise ImageError(
            f"The images have {images.classes} classes, but the model answers for {answers[1]}. "
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


def held(host: Host, name: str) -> RankTraining:
    """The training of that name on a rank. Raises PlanError where there is none."""
    if name not in host.trainings:
        raise PlanError("The ranks hold this training no more: it was closed, or they were restarted. Make a new one.")
    return host.trainings[name]


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


def _go_on(host: Host, name: str) -> _Answer:
    course = host.courses[name]
    heard = course.step()
    return _Answer(heard, course.report, course.feed.state(), tuple(course.feed.bad), course.updates)


def end(host: Host, name: str) -> int:
    """End the workers of a training, if it has any; how often it has changed its weights."""
    if (course := host.courses.pop(name, None)) is not None:
        course.close()
    return course.updates if course else 0
