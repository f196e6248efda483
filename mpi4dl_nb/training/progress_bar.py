"""What a training and its last step display in a notebook."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from engines.formatting import format_bytes
from engines.graph.whole_loss import describe_step_loss
from engines.plan import Plan
from engines.program.timeline import Timeline
from engines.train.training_events import EpochResult, Recovered, SkippedImage, StepResult, TrainingEvent
from mpi4dl_nb.draw.timeline import show_timeline

if TYPE_CHECKING:
    from mpi4dl_nb.training.fit_run import History
    from mpi4dl_nb.training.training import Training

__all__ = ["ProgressBar", "StepTimeline", "describe_training"]


@dataclass(frozen=True)
class StepTimeline(Timeline):
    """Events of a step that was run under a plan; a notebook displays them as a chart."""

    plan: Plan

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.ranks)} ranks: {len(self.events)} events in {self.seconds * 1e3:.4g} ms>"

    def _repr_html_(self) -> str:
        return show_timeline(self, self.plan)._repr_html_()


def describe_training(training: Training) -> dict[str, object]:
    """Return the model and the plan of a training, its progress, and the memory of the ranks."""
    found = {
        "Model": type(training.model).__name__,
        "Images of a step": " × ".join(map(str, training.recipe.step_specs["images"].shape)),
        "Plan": training.plan.summary,
        "Loss of a step": describe_step_loss(training.recipe.graph, training.plan),
        "Cluster": f"{training.cluster.n} ranks, {training.cluster.state}",
        "Steps": training.steps,
    }
    losses = {number: loss for report in training.reports for number, loss in report.losses.items()}
    if losses:
        found["Last loss"] = f"{statistics.fmean(losses.values()):.6g}"
        held = [report.memory_bytes for report in training.reports]
        one = training.cluster.is_one_process
        found["Memory"] = f"{format_bytes(held[0])}, all ranks" if one else ", ".join(map(format_bytes, held))
    return found


# The progress bar of `fit`.


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
