"""What a `fit` has done: its result, and its state while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi4dl_nb.engines.formatting import FactTable, format_number
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.step_report import StepReport
from mpi4dl_nb.engines.train.training_events import EpochResult, StepResult


@dataclass(frozen=True, repr=False)
class History(FactTable):
    """Result of `fit`: the loss of each step, images per second over all steps, and the results of each epoch.

    `left_out` names each skipped bad image, with the reason. `stopped` is true if a monitor's button ended the training
    early. `saved` is the path of the last checkpoint.
    """

    losses: tuple[float, ...]
    images_per_s: float
    epochs: tuple[EpochResult, ...] = ()
    left_out: tuple[str, ...] = ()
    stopped: bool = False
    saved: Path | None = None

    @property
    def facts(self) -> dict[str, object]:
        return {
            "steps": f"{len(self.losses)} in {len(self.epochs)} whole epochs",
            "loss": f"{self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else None,
            "images a second": format_number(self.images_per_s),
            "bad images left out": len(self.left_out) or None,
            "ended": "by the monitor's button" if self.stopped else None,
            "last checkpoint": self.saved,
        }


@dataclass(frozen=True)
class Progress:
    """Snapshot of a `fit`: the results of all steps so far, and the `reports` of the ranks on the last one.

    `speeds` are images per second of each step, including the wait for images. `ends` holds the number of steps after
    which each of `epochs` ended. `one_process`: all ranks are threads of one process and share its memory.
    """

    plan: Plan
    state: str = "not begun"
    running: bool = False
    total: int | None = None
    losses: Sequence[float] = ()
    speeds: Sequence[float] = ()
    last: StepResult | None = None
    epochs: Sequence[EpochResult] = ()
    ends: Sequence[int] = ()
    reports: Sequence[StepReport] = ()
    seconds: float = 0.0
    left_s: float | None = None
    left_out: int = 0
    one_process: bool = False
