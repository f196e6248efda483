"""What a training and its last step display in a notebook."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.loss.loss_description import describe_step_loss
from engines.plan import Plan
from engines.program.timeline import Timeline
from mpi4dl_nb.draw.figure import format_bytes
from mpi4dl_nb.draw.timeline import show_timeline

if TYPE_CHECKING:
    from mpi4dl_nb.training import Training

__all__ = ["StepTimeline", "describe_training"]


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
