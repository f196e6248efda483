"""`Training.fit`: a training that a notebook drives, watched, saved, and healed where that is wanted."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tqdm.auto import tqdm

from engines.checkpoint.interrupts import SIGNALS, Interrupts, StoppedError
from engines.checkpoint.manager import CheckpointManager
from engines.checkpoint.writer import check_writable
from engines.epoch_log import EpochLog
from engines.errors import RankError
from engines.train_loop import run
from engines.training_events import EpochResult, Recovered, SkippedImage, StepResult, TrainingEvent
from engines.working_folder import make_absolute
from mpi4dl_nb.loops import BatchLoop, ImageLoop
from mpi4dl_nb.recovery import FailureRecovery, FitPosition, is_whole

if TYPE_CHECKING:
    from mpi4dl_nb.training import Training

__all__ = ["CheckpointOptions", "FitCallback", "History", "fit"]

_LAST_S = 0.4  # after an interrupt the step under way has this long to come to its end


@dataclass(frozen=True)
class History:
    """What `fit` saw: the loss of each step, images per second over all of them, and each epoch.

    `left_out` says of each bad image that was left out which one it was, and why. `stopped` is whether a monitor's
    button has ended it early, `saved` the last checkpoint.
    """

    losses: tuple[float, ...]
    images_per_s: float
    epochs: tuple[EpochResult, ...] = ()
    left_out: tuple[str, ...] = ()
    stopped: bool = False
    saved: Path | None = None


class FitCallback(Protocol):
    """Is told how a `fit` goes. The ranks wait meanwhile: what takes time is for another thread."""

    def begin(self, training: Training, total: int | None) -> None:
        """It begins, with so many steps to do."""

    def heard(self, event: TrainingEvent) -> None:
        """What has just happened; of a step, `training.reports` tell more."""

    @property
    def stops(self) -> bool:
        """Whether it is to end now."""

    def end(self, outcome: History | BaseException) -> None:
        """It is over."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints go into `folder` after every `every` steps, or after each epoch; the last `keep` stay."""

    folder: str | PathLike[str] | None
    every: int | None
    keep: int

    def make_checkpoint_manager(self, training: Training, asked: Callable[[], int]) -> CheckpointManager | None:
        """What saves a training; None where there is no folder. Raises CheckpointError if it cannot be written to."""
        if self.folder is None:
            return None
        check_writable(make_absolute(self.folder))
        save = partial(training.save, self.folder, self.keep)
        return CheckpointManager(save, lambda: training.steps, self.every, asked, tqdm.write)


def fit(
    course: BatchLoop | ImageLoop,
    epochs: int,
    log: str | PathLike[str] | None,
    saving: CheckpointOptions,
    watchers: Sequence[FitCallback],
    healing: FailureRecovery | None = None,
) -> History:
    """Go through a course, until its end or until a watcher stops it; the watchers are told all of it.

    An interrupt ends it between two steps, saved if it is saved at all. A step that takes long is given up, and what
    was before it is saved; a second interrupt does that at once. If it is saved, SIGTERM and SIGUSR1 do the same, by
    which batch systems announce that time is over, and then end this process as they would have without a training.
    """
    with ExitStack() as stack:
        asked = stack.enter_context(Interrupts(SIGNALS if saving.folder else (signal.SIGINT,), obeyed=True))
        stack.enter_context(closing(course))
        fitting = _FitRun(course, epochs, watchers, healing, asked)
        stack.enter_context(fitting.notify_callbacks())
        fitting.book = None if log is None else stack.enter_context(EpochLog(log))
        fitting.keeper = saving.make_checkpoint_manager(course.training, fitting.asked)
        fitting.run_to_end()
    if not fitting.losses and not fitting.stopped:
        text = "Nothing was trained: no step was left to do. Call fit() again for the next epoch."
        warnings.warn(text, stacklevel=3)
    return fitting.history


@dataclass
class _FitRun:
    """A fit under way: what it has seen becomes a History."""

    course: BatchLoop | ImageLoop
    epochs: int
    watchers: Sequence[FitCallback]
    healing: FailureRecovery | None
    asked: Interrupts
    book: EpochLog | None = None
    keeper: CheckpointManager | None = None
    losses: list[float] = field(default_factory=list)
    begun: list[StepResult] = field(default_factory=list)
    ended: list[EpochResult] = field(default_factory=list)
    images: int = 0
    logged: int = -1
    stopped: bool = False
    start_s: float = field(default_factory=time.perf_counter)

    def run_to_end(self) -> None:
        """To the end."""
        if self.healing:
            self.healing.record_checkpoint(self._mark, self.keeper.save_now())
        mark = self._mark
        while not self._run_from(mark):
            mark = self.healing.mark

    def _run_from(self, mark: FitPosition) -> bool:
        """Go on from there; whether that came to an end, and not to a failure that is healed now."""
        try:
            for event in self._iterate_events(mark):
                self._handle_event(event)
                self._save_or_stop(event)
                if self.stopped:
                    break
            if self.keeper:
                self.keeper.save_at_end()
            return True
        except RankError as error:
            if self.asked() and self.keeper and self.keeper.path:
                raise StoppedError(f"{error} {self._last}", self.asked()) from error
            if self.healing is None or self.asked():
                raise
            self._handle_event(self.healing.heal(error, self.course, self._mark))
            return False
        except KeyboardInterrupt:
            if not self.asked():
                raise
        self._stop()  # not told together with how the step was given up
        return True

    def _stop(self) -> None:
        """The end was asked for. Raises StoppedError, saved, or KeyboardInterrupt where nothing is to be saved."""
        if self.keeper and is_whole(self.course.training):
            self.keeper.save_after_step()
        if self.keeper and self.keeper.path:
            raise StoppedError(f"Stopped while ranks changed their weights. {self._last}", self.asked())
        raise KeyboardInterrupt

    @property
    def _last(self) -> str:
        return f"The last checkpoint is {self.keeper.path}: go on from there."

    def _iterate_events(self, mark: FitPosition) -> Iterator[TrainingEvent]:
        """All that is left. Only what the ranks do for it is given up when time is up, and no checkpoint."""
        cluster, events = self.course.training.cluster, self._make_events(mark)
        while True:
            with cluster.hurried(lambda: self.asked.is_overdue(_LAST_S)):
                event = next(events, None)
            if event is None:
                return
            yield event

    def _make_events(self, mark: FitPosition) -> Iterator[SkippedImage | StepResult | EpochResult]:
        return run(self.course, self.epochs - mark.epochs, mark.begun, mark.is_over)

    def _handle_event(self, event: TrainingEvent) -> None:
        match event:
            case StepResult():
                self.losses.append(event.loss)
                self.begun.append(event)
                self.images += event.images
            case EpochResult():
                if self.book is not None and event.epoch > self.logged:
                    self.book.add(event.record)
                self.logged = max(self.logged, event.epoch)
                self.ended.append(event)
                self.begun.clear()
            case Recovered():
                mark = self.healing.mark
                del self.losses[mark.steps :], self.ended[mark.epochs :]
                self.begun[:] = mark.begun
        for watcher in self.watchers:
            watcher.heard(event)
        self.stopped = any(watcher.stops for watcher in self.watchers)

    def _save_or_stop(self, event: TrainingEvent) -> None:
        """Save if it is time. Raises StoppedError, saved, or KeyboardInterrupt, if the training is to end."""
        keeper = self.keeper
        if keeper and isinstance(event, StepResult):
            keeper.save_after_step()
        if keeper and isinstance(event, EpochResult):
            keeper.save_after_epoch()
        if self.asked():
            self._stop()
        if self.healing and keeper.saved_step == self.course.training.steps:
            self.healing.record_checkpoint(self._mark, keeper.path)

    @property
    def _mark(self) -> FitPosition:
        course = self.course
        return FitPosition(
            len(self.losses), len(self.ended), tuple(self.begun), course.place, bool(self.begun) and course.is_over
        )

    @contextmanager
    def notify_callbacks(self) -> Iterator[None]:
        """Tell the watchers of the beginning, and whatever happens of the end."""
        outcome: BaseException | None = None
        total = self.course.count_steps(self.epochs)
        for watcher in self.watchers:
            watcher.begin(self.course.training, total)
        try:
            yield
        except BaseException as error:
            outcome = error
            raise
        finally:
            for watcher in self.watchers:
                watcher.end(outcome or self.history)

    @property
    def history(self) -> History:
        """Of all so far."""
        rate = self.images / (time.perf_counter() - self.start_s)
        saved = self.keeper and self.keeper.path
        return History(tuple(self.losses), rate, tuple(self.ended), tuple(self.course.bad), self.stopped, saved)
