"""Signals that ask a training to end: the training stops at the next point where it can be saved."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from engines.comm.collective_errors import run_on_all
from engines.errors import CheckpointError, Mpi4dlError
from engines.train.checkpoint_save import KEEP, save
from engines.train.checkpoint_writer import check_writable
from engines.train.training import RankTraining

__all__ = ["SIGNALS", "CheckpointManager", "Interrupts", "StoppedError", "make_rank_manager"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""`mpiexec` forwards only the last one to the ranks. On the other two it terminates the ranks at once."""


class StoppedError(Mpi4dlError):
    """A training stopped on request by signal `number`; the message says where the training was saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Interrupts:
    """Context in which the first signal is only recorded. Calling the object returns its number, or 0.

    A second signal is not held back: the first one restores the previous handlers. Python delivers signals to the main
    thread only, so that elsewhere nothing is recorded. `obeyed`: on exit, raise the recorded signal again so that the
    process ends, unless it is SIGINT, which concerns this work only.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, obeyed: bool = False) -> None:
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._obeyed = obeyed
        self._number, self._since_s = 0, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> int:
        return self._number

    def is_overdue(self, within_s: float) -> bool:
        """Return whether a signal arrived more than `within_s` seconds ago."""
        return bool(self._number) and time.monotonic() - self._since_s > within_s

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._record_signal) for number in self._signals}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore_handlers()
        if self._obeyed and self._number not in (0, signal.SIGINT):
            if error is not None:
                print(error, file=sys.stderr, flush=True)  # the signal ends the process without a traceback
            signal.raise_signal(self._number)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed from Python

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        # Nothing else happens in the handler: it may run between any two bytecodes of the step.
        self._number, self._since_s = number, time.monotonic()
        self._restore_handlers()  # a second signal ends the process at once


# Save a training periodically while it runs.


class CheckpointManager:
    """Saves a training after every `every` steps, or after each epoch if `every` is None.

    `save()` writes a checkpoint, `step()` returns the number of completed steps, and `asked()` the signal that requests
    the end, or 0. `tell` receives the message of an error after which training continues.
    """

    def __init__(
        self,
        save: Callable[[], Path],
        step: Callable[[], int],
        every: int | None,
        asked: Callable[[], int],
        tell: Callable[[str], object],
    ) -> None:
        self.save, self.step, self.every, self.asked, self.tell = save, step, every, asked, tell
        self.saved_step = step()
        self.path: Path | None = None  # of the last checkpoint

    def save_after_step(self) -> None:
        """Save if a checkpoint is due. Raises StoppedError, after saving, if a signal has requested the end.

        If a periodic checkpoint cannot be written (for example, the disk is full), report the error and continue.
        """
        if number := self.asked():
            path = self.save_now()
            name = signal.Signals(number).name
            raise StoppedError(
                f"Stopped by {name} after {self.step()} steps. Saved as {path}: go on from there.", number
            )
        if self.every and self.step() % self.every == 0:
            self._try()

    def save_after_epoch(self) -> None:
        """Save, unless checkpoints are written by step."""
        if not self.every:
            self._try()

    def save_at_end(self) -> None:
        """Save the final state, unless it is saved already. Raises CheckpointError."""
        if self.saved_step != self.step():
            self.save_now()

    def save_now(self) -> Path:
        """Save unconditionally. Raises CheckpointError."""
        self.path = self.save()
        self.saved_step = self.step()
        return self.path

    def _try(self) -> None:
        try:
            self.save_now()
        except CheckpointError as error:
            self.tell(f"Not saved after {self.step()} steps: {error}")


def make_rank_manager(
    training: RankTraining,
    folder: Path,
    state: Callable[[], Any],
    every: int | None = None,
    keep: int = KEEP,
    asked: Callable[[], int] = lambda: 0,
) -> CheckpointManager:
    """Return a manager for all ranks. Collective, as are the calls of its methods.

    `state()` returns the feed's state, and `asked()` the signal that this rank has received, or 0. Raises
    CheckpointError, on every rank, if the folder is not writable.
    """
    world = training.worker.world
    run_on_all(world, lambda: None if world.rank else check_writable(folder), CheckpointError)
    return CheckpointManager(
        save=lambda: save(training, folder, state(), keep),
        step=lambda: training.worker.steps - 1,
        every=every,
        # A signal may reach some ranks only, or ranks in different steps. All ranks agree on it, because saving is
        # collective: a rank that stopped alone would block the others.
        asked=lambda: max(world.all_gather(asked())),
        tell=partial(print, file=sys.stderr, flush=True) if world.rank == 0 else lambda text: None,
    )
