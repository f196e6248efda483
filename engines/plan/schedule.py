"""The elements of a schedule, and what distinguishes one from another: a new schedule is a new entry of `SCHEDULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate

from mpi4dl_nb.engines.checks import check_choice
from mpi4dl_nb.engines.errors import PlanError


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
        return len(self.lanes)

    @property
    def length(self) -> int:
        """Units from the first start to the last stop."""
        return max((lane[-1].stop for lane in self.lanes if lane), default=0)

    @property
    def idle_share(self) -> float:
        """The idle fraction of all ranks' time, 0 to 1; 0 if there is no work."""
        return self.compute_idle_share(*range(self.ranks))

    def compute_idle_share(self, *ranks: int) -> float:
        """Return the idle fraction of the time of some ranks, 0 to 1."""
        whole = self.length * len(ranks)
        busy = sum(slot.stop - slot.start for rank in ranks for slot in self.lanes[rank])
        return (whole - busy) / whole if whole else 0.0

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
        return any(len({direction for direction, _ in stages}) < len(stages) for stages in places)

    def format_action(self, work: PipelineAction) -> str:
        """Return `F0`, `b3` or `W1/2`, as in the table."""
        letter = work.kind.value.lower() if work.direction else work.kind.value
        return f"{letter}{work.micro_batch}" + f"/{work.stage}" * self.is_interleaved


# What distinguishes the pipeline schedules: one rule each.


_FUSED = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}
_SPLIT = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 1, ActionKind.WEIGHTS: 1}


def _count_one_bubble(p: int, m: int, v: int, n: int) -> tuple[int, int]:
    return 3 * v * m, 3 * (p - 1)


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What distinguishes one schedule from another.

    - `drains`: a stage starts backward only when the whole batch has passed forward.
    - `limited`: per direction, a rank holds at most as many forwards as there are stages from its first one to the
      last.
    - `splits`: the gradient of the weights is an action of its own, done when there is nothing else to do.
    - `alone`: a rank begins a batch only when it has finished all earlier ones, of any direction.
    - `mirrored`: batches alternate between two directions in mirrored rank order, so that there have to be two.
    - `count_bubble`: the units that a rank works and idles, from the number of ranks p, of micro-batches m, of stages
      per rank v and of batches n; None if there is no formula (see `compute_bubble_share`).
    """

    drains: bool = False
    limited: bool = False
    splits: bool = False
    alone: bool = False
    mirrored: bool = False
    count_bubble: Callable[[int, int, int, int], tuple[int, int]] | None = None

    @property
    def units(self) -> dict[ActionKind, int]:
        """The duration of each kind of action, in units of one forward."""
        return _SPLIT if self.splits else _FUSED


SCHEDULES = {
    "fill_drain": ScheduleRule(drains=True, count_bubble=_count_one_bubble),
    "1f1b": ScheduleRule(limited=True, count_bubble=_count_one_bubble),
    "interleaved": ScheduleRule(limited=True, count_bubble=_count_one_bubble),
    "zero_bubble": ScheduleRule(
        limited=True, splits=True, count_bubble=lambda p, m, v, n: (3 * v * m, p - 1 + max(0, p - m))
    ),
    "gems": ScheduleRule(
        drains=True, alone=True, mirrored=True, count_bubble=lambda p, m, v, n: (3 * m * n, (p - 1) * (2 * n + 1))
    ),
}
"""Schedule rules by name. Interleaved is 1F1B on ranks with several stages; only the placement differs."""


def get_schedule_rule(name: str) -> ScheduleRule:
    """Return the rule of a schedule. Raises PlanError if there is no schedule of that name."""
    check_choice("schedule", name, SCHEDULES)
    return SCHEDULES[name]


# The pipeline bubble by formula: the fraction of the ranks' time that a schedule leaves idle.


def compute_bubble_share(
    name: str, stages: int, micro_batches: int, stages_per_rank: int = 1, batches: int = 2
) -> float:
    """Return the idle fraction of all ranks' time, 0 to 1, if a backward takes as long as two forwards.

    The stages are on p = `stages` / `stages_per_rank` ranks, each of which takes m = `micro_batches` of every batch,
    and v = `stages_per_rank`. A rank works 3 v m units for a batch, and idles

    - `fill_drain`, `1f1b`, `interleaved`: 3 (p - 1), so that the fraction is (p - 1) / (v m + p - 1): Huang et al. 2019
      (GPipe), section 2.3; Narayanan et al. 2021, section 2.2, where the bubble is relative to the work alone;
    - `zero_bubble`: p - 1 if m >= p: Qi et al. 2023, section 2.1, a third of 1F1B's; with fewer micro-batches p - m
      more, as the way back is then longer than the work;
    - `gems`: (p - 1)(2 n + 1) in n = `batches`, which alternate between both ends. For many batches of one micro-batch
      the fraction tends to (p - 1) / (p + 1/2), as given by Li and Hoefler 2021 (Chimera). Plain layer parallelism,
      which is `fill_drain` with one micro-batch, idles (p - 1) / p.

    Only the fraction of `gems` depends on `batches`. The formulas are exact for v = 1, and for other v if m is a
    multiple of p; for other m they are a lower bound. Raises PlanError if there is no formula.

    >>> (
    ...     compute_bubble_share("1f1b", stages=4, micro_batches=9),
    ...     compute_bubble_share("zero_bubble", stages=4, micro_batches=9),
    ... )
    (0.25, 0.1)
    """
    rule = get_schedule_rule(name)
    if min(stages, micro_batches, stages_per_rank, batches) < 1 or stages % stages_per_rank:
        raise PlanError(
            f"There are {stages} stages, {stages_per_rank} per rank, {micro_batches} micro-batches and {batches} "
            "batches. Each must be at least 1, and stages a multiple of stages_per_rank."
        )
    if rule.count_bubble is None or (rule.mirrored and stages_per_rank > 1):
        raise PlanError(f"There is no formula for {name} with stages_per_rank={stages_per_rank}: use 1, or a schedule.")
    # Every rank idles as long as the others together need to pass one micro-batch on, forward (1 unit each) and back (2
    # units). For p = 4, m = 3 that is 9 units beside 9 of work.
    #
    #   rank 0   F0 F1 F2 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2
    #   rank 1   .  F0 F1 F2 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 .  .
    #   rank 2   .  .  F0 F1 F2 .  .  .  B0 B0 B1 B1 B2 B2 .  .  .  .
    #   rank 3   .  .  .  F0 F1 F2 B0 B0 B1 B1 B2 B2 .  .  .  .  .  .
    work, idle = rule.count_bubble(stages // stages_per_rank, micro_batches, stages_per_rank, batches)
    return idle / (work + idle)
