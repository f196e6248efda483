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
from engines.comm.together import together
from engines.errors import CheckpointError
from engines.training import RankTraining

__all__ = ["Keeper"]


class Keeper:
    """Saves into `folder` after every `every` steps, or after each epoch where that is None; the last `keep` stay.

    `state()` tells where the feed is, `asked()` which signal asks this rank to end, 0 for none. All ranks make one
    together and call it together. Raises CheckpointError, on every rank, where the folder cannot be written to.
    """

    def __init__(
        self, training: RankTraining, folder: Path, state: Callable[[], Any], every: int | None = None,
        keep: int = KEEP, asked: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.training, self.world = training, training.worker.world
        self.folder, self.every, self.keep = folder, every, keep
        self.state, self.asked = state, asked
        self.saved_step = self.step
        together(self.world, partial(check_writable, folder) if self.world.rank == 0 else lambda: None, CheckpointError)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.training.worker.steps - 1

    def after_step(self) -> None:
        """Save if it is time; of a full disk it tells, and training goes on. Raises StoppedError if asked to end."""
        number = max(self.world.gather(self.asked()))
        if number:
            path = self._save()
            raise StoppedError(
                f"Stopped by {signal.Signals(number).name} after {self.step} steps. Saved as {path}: go on from there.",
                number,
            )
        if self.every and self.step % self.every == 0:
            self._try()

    def after_epoch(self) -> None:
        """Save, unless it is done every so many steps."""
        if not self.every:
            self._try()

    def after_all(self) -> None:
        """Save the end of the training, unless that is done. Raises CheckpointError."""
        if self.saved_step != self.step:
            self._save()

    def _save(self) -> Path:
        path = save(self.training, self.folder, self.state(), self.keep)
        self.saved_step = self.step
        return path

    def _try(self) -> None:
        try:
            self._save()
        except CheckpointError as error:
            if self.world.rank == 0:
                print(f"Not saved after {self.step} steps: {error}", file=sys.stderr, flush=True)
