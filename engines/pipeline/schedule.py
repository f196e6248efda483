"""Pipeline schedules as data: the order in which each rank takes micro-batches through its stages.

One simulation makes all of them (`engines/pipeline/simulation.py`); a schedule is only its rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engines.errors import PlanError
from engines.pipeline.queues import Stages, make_queues
from engines.pipeline.rules import get_schedule_rule
from engines.pipeline.simulation import simulate
from engines.pipeline.work import ActionKind, Batch, PipelineAction, Schedule, Slot

__all__ = ["ActionKind", "Batch", "PipelineAction", "Schedule", "Slot", "make_schedule"]


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
