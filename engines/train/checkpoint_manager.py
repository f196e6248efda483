"""Save a training periodically while it runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engines.comm.world import run_on_all
from engines.errors import CheckpointError
from engines.train.checkpoint_save import KEEP, save
from engines.train.checkpoint_writer import check_writable
from engines.train.interrupts import StoppedError
from engines.train.training import RankTraining

__all__ = ["CheckpointManager", "make_rank_manager"]


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
