"""The loop of `Training.fit`: run the steps, notify callbacks, save checkpoints and recover from failures."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Protocol

from tqdm.auto import tqdm

from mpi4dl_nb.engines.checks import is_integer
from mpi4dl_nb.engines.errors import PlanError, RankError, make_absolute
from mpi4dl_nb.engines.formatting import format_names
from mpi4dl_nb.engines.train.checkpoint_files import check_writable
from mpi4dl_nb.engines.train.checkpoint_owner import describe_others
from mpi4dl_nb.engines.train.checkpoint_save import CheckpointManager
from mpi4dl_nb.engines.train.history import History
from mpi4dl_nb.engines.train.interrupts import SIGNALS, Interrupts, StoppedError
from mpi4dl_nb.engines.train.train_loop import run
from mpi4dl_nb.engines.train.training_events import EpochLog, EpochResult, StepResult, TrainingEvent
from mpi4dl_nb.training.loops import BatchLoop, ImageLoop
from mpi4dl_nb.training.recovery import FailureRecovery, FitPosition
from mpi4dl_nb.training.training_handle import TrainingHandle

_LAST_S = 0.4  # time that the current step may still take after an interrupt


class FitCallback(Protocol):
    """Callback of `fit`. The ranks are idle during its calls, so slow work belongs in another thread."""

    def begin(self, training: TrainingHandle, total: int | None) -> None:
        """Called before the first step, with the number of steps to do (None: unknown)."""

    def handle_event(self, event: TrainingEvent) -> None:
        """Called after each event; after a step, `training.reports` holds the reports of the ranks."""

    @property
    def stops(self) -> bool:
        """Whether the training should stop now."""

    def end(self, outcome: History | BaseException) -> None:
        """Called at the end, with the history or the exception that ended the training."""


def check_callback(monitor: FitCallback | None) -> None:
    """Raise PlanError, before any step, if a monitor lacks what `fit` calls."""
    missing = [name for name in ("begin", "handle_event", "stops", "end") if not hasattr(monitor, name)]
    if monitor is not None and missing:
        raise PlanError(
            f"monitor is a {type(monitor).__name__} without {format_names(missing)}. `fit` calls its "
            "begin(training, total), handle_event(event) and end(outcome), and reads stops: whether to stop now."
        )


@dataclass(frozen=True)
class CheckpointOptions:
    """Where and when to save: into `folder` after every `every` steps (None: each epoch), keeping the last `keep`."""

    folder: str | PathLike[str] | None
    every: int | None
    keep: int

    def __post_init__(self) -> None:
        for name, count, of in (("save_every", self.every, "steps, or None"), ("keep", self.keep, "checkpoints")):
            if not (count is None and name == "save_every") and not (is_integer(count) and count >= 1):
                raise PlanError(f"{name}={count!r} must be a whole number of {of}, 1 or more.")


def fit(
    loop: BatchLoop | ImageLoop,
    epochs: int,
    log: str | PathLike[str] | None,
    saving: CheckpointOptions,
    watchers: Sequence[FitCallback],
    healing: FailureRecovery | None = None,
) -> History:
    """Run a train loop until its end or until a callback stops it, and notify the callbacks of every event.

    An interrupt ends the training between two steps, and it is saved if there is a checkpoint folder. A step that takes
    too long is abandoned, and the state before it is saved; a second interrupt does that at once. With a checkpoint
    folder, SIGTERM and SIGUSR1, by which batch systems announce the end of a job, do the same and then end this process
    as they would have without a training.
    """
    # Entered in this order and left in the reverse one: the callbacks hear of the end, then the ranks stop reading
    # images, and only then a signal has its usual effect again.
    with ExitStack() as stack:
        asked = stack.enter_context(Interrupts(SIGNALS if saving.folder else (signal.SIGINT,), obeyed=True))
        stack.enter_context(closing(loop))
        fitting = _FitRun(loop, epochs, watchers, healing, asked)
        stack.enter_context(fitting.notify_callbacks())
        fitting.book = None if log is None else stack.enter_context(closing(EpochLog(log)))
        if saving.folder is not None:
            training, tell, folder = loop.training, tqdm.write, make_absolute(saving.folder)
            check_writable(folder)  # an error now, and not after the first epoch
            if others := describe_others(folder, training.identity):
                warnings.warn(others, stacklevel=3)
            save = partial(training.save, saving.folder, saving.keep)
            fitting.keeper = CheckpointManager(save, lambda: training.steps, saving.every, asked, tell)
        fitting.run_to_end()
    if not fitting.losses and not fitting.stopped:
        text = "Nothing was trained: no step was left to do. Call fit() again for the next epoch."
        warnings.warn(text, stacklevel=3)
    return fitting.history


@dataclass
class _FitRun:
    """State of a running fit, from which its History is made."""

    loop: BatchLoop | ImageLoop
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
        """Run until the training ends or stops, resuming after each failure that was recovered."""
        # A first checkpoint is written before step 1, so that there is always one to go back to. With a checkpoint
        # after every second step, and a rank that dies in step 4:
        #
        #     step      1   2   3   4 (dies)
        #     saved   0       2
        #     again             3   4   5 ...
        if self.healing and self.keeper:
            self.healing.record_checkpoint(self._mark, self.keeper.save_now())
        mark: FitPosition | None = self._mark
        while mark is not None:
            mark = self._run_from(mark)

    def _run_from(self, mark: FitPosition) -> FitPosition | None:
        """Run from a position. Return None at the end of the training, after a recovered failure where to go on."""
        try:
            for event in self._iterate_events(mark):
                self._handle_event(event)
                self._save_or_stop(event)
                if self.stopped:
                    break
            if self.keeper:
                self.keeper.save_at_end()
            return None
        except RankError as error:
            # A batch system that ends the job often kills the ranks, too: their death is no failure to recover from.
            self._check_stopped(error)
            if self.healing is None or self.asked():
                raise
            recovered, mark = self.healing.heal(error, self.loop, self._mark), self.healing.mark
            # The steps after the checkpoint will be repeated: drop their records, or they would appear twice.
            del self.losses[mark.steps :], self.ended[mark.epochs :]
            self.begun[:] = mark.begun
            self._handle_event(recovered)
            return mark
        except KeyboardInterrupt:
            if not self.asked():
                raise
        try:
            self._stop()  # outside of the `except`: the exception must not chain to the one that abandoned the step
        except RankError as error:
            self._check_stopped(error)
            raise
        return None

    def _check_stopped(self, error: RankError) -> None:
        """Raise StoppedError, with the last checkpoint, if the end of the training was requested before this error."""
        if self.asked() and self._last:
            raise StoppedError(f"{error} {_describe_last(self._last)}", self.asked()) from error

    def _stop(self) -> None:
        """End the training on request. Raises StoppedError if it was saved, else KeyboardInterrupt."""
        # An abandoned step may have ended in the middle of the update, on some ranks: such weights must not be saved.
        if self.keeper and self.loop.training.is_whole():
            self.keeper.save_after_step()
        if self._last:
            text = f"Stopped while ranks changed their weights. {_describe_last(self._last)}"
            raise StoppedError(text, self.asked())
        raise KeyboardInterrupt

    @property
    def _last(self) -> Path | None:
        """The last checkpoint."""
        return self.keeper.path if self.keeper else None

    def _iterate_events(self, mark: FitPosition) -> Iterator[TrainingEvent]:
        """Iterate over the remaining events. An overdue interrupt abandons calls to the ranks, but no checkpoint."""
        cluster = self.loop.training.cluster
        events = run(self.loop, self.epochs - mark.epochs, mark.begun, mark.is_over)
        while True:
            # Only drawing the next event may be abandoned. The consumer saves checkpoints outside of this block, where
            # a late interrupt must not cut a half-written one off.
            with cluster.limit_calls(lambda: self.asked.is_overdue(_LAST_S)):
                event = next(events, None)
            if event is None:
                return
            yield event

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
        for watcher in self.watchers:
            watcher.handle_event(event)
        self.stopped = any(watcher.stops for watcher in self.watchers)

    def _save_or_stop(self, event: TrainingEvent) -> None:
        """Save if it is time. Raises StoppedError if an end was requested and it was saved, else KeyboardInterrupt."""
        keeper = self.keeper
        if keeper and isinstance(event, StepResult):
            keeper.save_after_step()
        if keeper and isinstance(event, EpochResult):
            keeper.save_after_epoch()
        if self.asked():
            self._stop()
        if self.healing and keeper and keeper.path and keeper.saved_step == self.loop.training.steps:
            self.healing.record_checkpoint(self._mark, keeper.path)

    @property
    def _mark(self) -> FitPosition:
        loop = self.loop
        is_over = bool(self.begun) and loop.is_over
        return FitPosition(len(self.losses), len(self.ended), tuple(self.begun), loop.place, is_over)

    @contextmanager
    def notify_callbacks(self) -> Iterator[None]:
        """Notify the callbacks of the beginning and, however the training ends, of its end.

        The error that ended the training is raised even if the `end` of a callback fails, whose error is a note of it.
        """
        total = self.loop.count_steps(self.epochs)
        for watcher in self.watchers:
            watcher.begin(self.loop.training, total)
        try:
            yield
        except BaseException as error:
            for failure in self._end_callbacks(error):
                error.add_note(f"A callback of fit failed at the end, too: {type(failure).__name__}: {failure}")
            raise
        if failures := self._end_callbacks(self.history):
            raise failures[0]

    def _end_callbacks(self, outcome: History | BaseException) -> list[Exception]:
        """Notify all callbacks of the end, and return the errors of those that fail."""
        failures = []
        for watcher in self.watchers:
            try:
                watcher.end(outcome)
            except Exception as failure:
                failures.append(failure)
        return failures

    @property
    def history(self) -> History:
        """The history up to now."""
        # Steps that were done again after a failure count twice, as their time does.
        rate = self.images / (time.perf_counter() - self.start_s)
        return History(tuple(self.losses), rate, tuple(self.ended), tuple(self.loop.bad), self.stopped, self._last)


def _describe_last(path: Path) -> str:
    return f"The last checkpoint is {path}: go on from there."
