"""Pipeline schedules as data: the order in which each rank takes micro-batches through its stages.

One simulation makes all of them (`engines/program/schedule_simulation.py`); a schedule is only its rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engines.errors import PlanError
from engines.plan import Plan
from engines.program.schedule import ActionKind, Batch, PipelineAction, Schedule, Slot
from engines.program.schedule_rules import get_schedule_rule
from engines.program.schedule_simulation import Stages, make_queues, simulate

__all__ = [
    "ActionKind",
    "Batch",
    "PipelineAction",
    "Schedule",
    "Slot",
    "compute_bubble_share",
    "compute_plan_bubble",
    "make_schedule",
]


def make_schedule(name: str, placement: Sequence[Stages], batches: Sequence[Batch]) -> Schedule:
    """Return the schedule of one training step.

    `placement[direction][stage]` are the ranks, of 0 to R - 1, that work on a stage together. A forward takes one unit
    of time, a backward two (in `zero_bubble` one, and the weights' gradient one). Two ranks have their common actions
    in the same order, so ranks that follow their orders never deadlock. A stage begins a batch only when it has
    finished the previous one of the same direction, and runs backwards in the order of the forwards: every schedule
    accumulates the gradients in the same order.

    - `fill_drain`: all micro-batches forward, then all backward (Huang et al. 2019, GPipe, section 2.3; there the last
      one goes backward first, which takes the same time).
    - `1f1b`: a stage starts a backward as soon as it can, and holds at most as many micro-batches as there are stages
      from it to the last (Narayanan et al. 2021, Efficient Large-Scale Language Model Training, section 2.2.1).
    - `interleaved`: the same with several stages per rank (ibid., section 2.2.2; here ranks start fewer forwards before
      the first backward, for the same bubble).
    - `zero_bubble`: ZB-H1 (Qi et al. 2023, Zero Bubble Pipeline Parallelism, section 2.1).
    - `gems`: a batch follows the previous one, of the opposite direction, rank by rank, so that a rank holds
      activations of one batch only (Jain et al. 2020, GEMS).

    Raises PlanError if the name is unknown, or placement or batches are invalid.

    >>> print(make_schedule("1f1b", [[(0,), (1,)]], [Batch(0, (0, 1, 2))]).format_table())
    F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
    .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    """
    rule = get_schedule_rule(name)
    if rule.mirrored and len(placement) < 2:
        raise PlanError(
            f"schedule={name!r} needs 2 directions, one of them mirrored, but the placement has {len(placement)}. "
            "Set bidirectional=True, or choose fill_drain."
        )
    _check_placement(placement)
    for batch in batches:
        if batch.direction not in range(len(placement)):
            raise PlanError(
                f"A batch goes in direction {batch.direction}, but the placement has {len(placement)}: "
                f"use 0 to {len(placement) - 1}, or place another direction."
            )
    times = Counter(number for batch in batches for number in batch.micro_batches)
    if twice := [number for number, count in times.items() if count > 1]:
        raise PlanError(
            f"Micro-batch {_format_numbers(twice)} is in the step more than once. Number them through over its batches."
        )
    return Schedule(name, simulate(rule, placement, make_queues(placement, batches)))


def _check_placement(placement: Sequence[Stages]) -> None:
    for direction, stages in enumerate(placement):
        for stage, ranks in enumerate(stages):
            if not ranks or len(set(ranks)) < len(ranks):
                raise PlanError(
                    f"Stage {stage} of direction {direction} is on ranks {tuple(ranks)}. "
                    "Give at least one rank, each once."
                )
    found = {rank for stages in placement for ranks in stages for rank in ranks}
    if not found or found != set(range(len(found))):
        raise PlanError(
            f"The placement names the ranks {_format_numbers(found)}. Number them from 0, and leave none out."
        )


def _format_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"


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


def compute_plan_bubble(plan: Plan) -> float | None:
    """Return the idle fraction of a plan's schedule if all its stages took the same time; None if there is no formula.

    There is no formula for two directions (except `gems`), for several batches in a row, or for plans in which only
    some stages are interleaved.

    >>> compute_plan_bubble(Plan(split_size=4, spatial_size=0, parts=9, schedule="1f1b"))
    0.25
    """
    rule, some_interleaved = plan.rule, plan.stages_per_rank > 1 and plan.spatial_size > 0
    several = plan.replica_batches > 1 and (not rule.mirrored or plan.stages_per_rank > 1 or plan.accumulate > 1)
    if rule.count_bubble is None or some_interleaved or several:
        return None
    return compute_bubble_share(plan.schedule, plan.split_size, plan.parts, plan.stages_per_rank, plan.replica_batches)
