"""The progress bar of `fit`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from engines.training_events import EpochResult, Recovered, SkippedImage, StepResult, TrainingEvent

if TYPE_CHECKING:
    from mpi4dl_nb.fit_run import History
    from mpi4dl_nb.training import Training

__all__ = ["ProgressBar"]


class ProgressBar:
    """Callback that shows loss and images per second, and a line per epoch; not `shown`, only bad images."""

    stops = False

    def __init__(self, shown: bool) -> None:
        self.shown, self.images = shown, 0

    def begin(self, training: Training, total: int | None) -> None:
        """Show an empty bar."""
        self.bar, self.start_s = tqdm(total=total, unit="step", disable=not self.shown), time.perf_counter()

    def heard(self, event: TrainingEvent) -> None:
        """Advance the bar by a step, or print a line."""
        match event:
            case SkippedImage():
                tqdm.write(f"Left out from now on: {event.text}")
            case StepResult():
                self.images += event.images
                rate = self.images / (time.perf_counter() - self.start_s)
                self.bar.set_postfix_str(f"loss {event.loss:.4f}, {rate:.2f} images/s")
                self.bar.update()
            case Recovered():
                tqdm.write(event.text)
                self.bar.n = event.steps
                self.bar.refresh()
            case EpochResult() if self.shown:
                tqdm.write(str(event))

    def end(self, outcome: History | BaseException) -> None:
        """Close the bar, which stays visible."""
        self.bar.close()
