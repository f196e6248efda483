"""The elements of a schedule: one micro-batch through one stage, forward or backward, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

__all__ = ["ActionKind", "Batch", "PipelineAction", "Schedule", "Slot"]


class ActionKind(Enum):
    """The pass. In schedules with WEIGHTS, BACKWARD computes the gradient of the stage's inputs only."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


@dataclass(frozen=True, slots=True)
class PipelineAction:
    """One micro-batch through one stage in one pass, done by all ranks of the stage together."""

    kind: ActionKind
    direction: int
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Slot:
    """An action and its time interval, half-open, in units of one forward."""

    work: PipelineAction
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Micro-batches that pass one direction before the next batch of that direction begins.

    The numbers are unique over the step.
    """

    direction: int
    micro_batches: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order of time."""

    name: str
    lanes: tuple[tuple[Slot, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.lanes)

    @property
    def length(self) -> int:
        """Units from the first start to the last stop."""
        return max((lane[-1].stop for lane in self.lanes if lane), default=0)

    @property
    def idle_share(self) -> float:
        """The idle fraction of all ranks' time, 0 to 1; 0 if there is no work."""
        return _compute_idle_share(self.lanes, self.length)

    def compute_idle_share(self, rank: int) -> float:
        """Return the idle fraction of one rank's time, 0 to 1."""
        return _compute_idle_share([self.lanes[rank]], self.length)

    def get_actions(self, rank: int) -> tuple[PipelineAction, ...]:
        """Return a rank's actions, first to last."""
        return tuple(slot.work for slot in self.lanes[rank])

    def count_in_flight(self, rank: int) -> int:
        """Return the largest number of forwards that a rank has begun and whose gradients are not all done.

        These are micro-batches if the rank has one stage; with several stages each counts separately.
        """
        kinds = [work.kind for work in self.get_actions(rank)]
        last = ActionKind.WEIGHTS if ActionKind.WEIGHTS in kinds else ActionKind.BACKWARD
        # The running sum of +1 and -1 is what the rank holds after each action.
        steps = {ActionKind.FORWARD: 1, last: -1}
        return max(accumulate((steps.get(kind, 0) for kind in kinds), initial=0))

    def format_table(self) -> str:
        """Return a table with one line per rank and one column per unit of time.

        `F0` is the forward of micro-batch 0, `B0` its backward, `W0` its weights' gradient, `.` idle. Directions other
        than the first are in lower case. `F0/2` also names the stage, if a rank has several.
        """
        rows = [["."] * self.length for _ in self.lanes]
        for row, lane in zip(rows, self.lanes, strict=True):
            for slot in lane:
                row[slot.start : slot.stop] = [self.format_action(slot.work)] * (slot.stop - slot.start)
        width = max((len(cell) for row in rows for cell in row), default=1)
        return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)

    @cached_property
    def is_interleaved(self) -> bool:
        """Whether a rank works on several stages of one direction."""
        places = ({(slot.work.direction, slot.work.stage) for slot in lane} for lane in self.lanes)
        return any(len({direction for direction, _ in found}) < len(found) for found in places)

    def format_action(self, work: PipelineAction) -> str:
        """Return `F0`, `b3` or `W1/2`, as in the table."""
        letter = work.kind.value.lower() if work.direction else work.kind.value
        return f"{letter}{work.micro_batch}" + f"/{work.stage}" * self.is_interleaved


def _compute_idle_share(lanes: Sequence[Sequence[Slot]], length: int) -> float:
    whole = length * len(lanes)
    busy = sum(slot.stop - slot.start for lane in lanes for slot in lane)
    return (whole - busy) / whole if whole else 0.0
