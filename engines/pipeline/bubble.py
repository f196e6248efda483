"""The pipeline bubble by formula: the fraction of the ranks' time that a schedule leaves idle."""

from __future__ import annotations

from engines.errors import PlanError
from engines.pipeline.rules import get_schedule_rule
from engines.plan import Plan

__all__ = ["compute_bubble_share", "compute_plan_bubble"]


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
