"""What a rank reports on a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpi4dl_nb.engines.formatting import FactTable, format_bytes
from mpi4dl_nb.engines.program.timeline import Timeline, TimelineEvent


@dataclass(frozen=True, slots=True, repr=False)
class StepReport(FactTable):
    """The report of one rank on one training step: the `losses` of its micro-batches, and the events of its timeline.

    `memory_bytes` is the memory in use at the end of the step: the tensors on a GPU, otherwise the whole process.
    `clock` identifies the clock of the events.
    """

    losses: Mapping[int, float]
    events: tuple[TimelineEvent, ...]
    memory_bytes: int = 0
    clock: str = ""

    @property
    def facts(self) -> dict[str, object]:
        return {
            "losses by micro-batch": ", ".join(f"{loss:.4g}" for loss in self.losses.values()) or "none on this rank",
            "events": len(self.events),
            "memory": format_bytes(self.memory_bytes),
        }


def build_timeline(reports: Sequence[StepReport]) -> Timeline:
    """Return the timeline of the reports of all ranks. Raises PlanError as `Timeline.of` does."""
    return Timeline.of((report.events for report in reports), (report.clock for report in reports))
