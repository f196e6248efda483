"""Saves a training as it goes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engines.checkpoint.interrupts import StoppedError
from engines.checkpoint.save import KEEP, save
from engines.checkpoint.writer import check_writable
from engines.comm.collective_errors import run_on_all
from engines.errors import CheckpointError
from engines.training import RankTraining

__all__ = ["CheckpointManager", "make_rank_manager"]


class CheckpointManager:
    """Has a training saved after every `every` steps, or after each epoch where that is None.

    `save()` saves it, `step()` tells how many steps are done, `asked()` which signal asks it to end, 0 for none.
    `tell` is given what went wrong where training goes on all the same.
    """

    def __init__(
        self, save: Callable[[], Path], step: Callable[[], int], every: int | None, asked: Callable[[], int],
        tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.save, self.step, self.every, self.asked, self.tell = save, step, every, asked, tell
        self.saved_step = step()
        self.path: Path | None = None  # of the last one

    def save_after_step(self) -> None:
        """Save if it is time; of a full disk it tells, and training goes on. Raises StoppedError if asked to end."""
        if number := self.asked():
            path = self.save_now()
            name = signal.Signals(number).name
            raise StoppedError(
                f"Stopped by {name} after {self.step()} steps. Saved as {path}: go on from there.", number
            )
        if self.every and self.step() % self.every == 0:
            self._try()

    def save_after_epoch(self) -> None:
        """Save, unless it is done every so many steps."""
        if not self.every:
            self._try()

    def save_at_end(self) -> None:
        """Save the end of the training, unless that is done. Raises CheckpointError."""
        if self.saved_step != self.step():
            self.save_now()

    def save_now(self) -> Path:
        """Save, whatever the time. Raises CheckpointError."""
        self.path = self.save()
        self.saved_step = self.step()
        return self.path

    def _try(self) -> None:
        try:
            self.save_now()
        except CheckpointError as error:
            self.tell(f"Not saved after {self.step()} steps: {error}")


def make_rank_manager(
    training: RankTraining, folder: Path, state: Callable[[], Any], every: int | None = None, keep: int = KEEP,
    asked: Callable[[], int] = lambda: 0,
) -> CheckpointManager:  # fmt: skip
    """One that all ranks make together and call together; `state()` tells where the feed is, `asked()` of this rank.

    Raises CheckpointError, on every rank, where the folder cannot be written to.
    """
    world = training.worker.world
    run_on_all(world, lambda: None if world.rank else check_writable(folder), CheckpointError)
    return CheckpointManager(
        save=lambda: save(training, folder, state(), keep),
        step=lambda: training.worker.steps - 1,
        every=every,
        asked=lambda: max(world.all_gather(asked())),
        tell=partial(print, file=sys.stderr, flush=True) if world.rank == 0 else lambda text: None,
    )
