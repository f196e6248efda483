"""What distinguishes the pipeline schedules: one rule each. A new schedule is a new entry of `SCHEDULES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.errors import PlanError
from engines.program.schedule import ActionKind

__all__ = ["SCHEDULES", "ScheduleRule", "get_schedule_rule"]

_FUSED = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2}
_SPLIT = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 1, ActionKind.WEIGHTS: 1}


def _count_one_bubble(p: int, m: int, v: int, n: int) -> tuple[int, int]:
    return 3 * v * m, 3 * (p - 1)


def _count_zero_bubble(p: int, m: int, v: int, n: int) -> tuple[int, int]:
    return 3 * v * m, p - 1 + max(0, p - m)


def _count_gems_bubble(p: int, m: int, v: int, n: int) -> tuple[int, int]:
    return 3 * m * n, (p - 1) * (2 * n + 1)


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What distinguishes one schedule from another.

    - `drains`: a stage starts backward only when the whole batch has passed forward.
    - `limited`: per direction, a rank holds at most as many forwards as there are stages from its first one to the
      last.
    - `splits`: the gradient of the weights is an action of its own, done when there is nothing else to do.
    - `alone`: a rank begins a batch only when it has finished all earlier ones, of any direction.
    - `interleaved`: a rank has several stages (`stages_per_rank`).
    - `mirrored`: batches alternate between two directions in mirrored rank order, so that there have to be two.
    - `count_bubble`: the units that a rank works and idles, from the number of ranks p, of micro-batches m, of stages
      per rank v and of batches n; None if there is no formula (see `engines/program/make_schedule.py`).
    """

    drains: bool = False
    limited: bool = False
    splits: bool = False
    alone: bool = False
    interleaved: bool = False
    mirrored: bool = False
    count_bubble: Callable[[int, int, int, int], tuple[int, int]] | None = None

    @property
    def units(self) -> dict[ActionKind, int]:
        """The duration of each kind of action, in units of one forward."""
        return _SPLIT if self.splits else _FUSED


SCHEDULES = {
    "fill_drain": ScheduleRule(drains=True, count_bubble=_count_one_bubble),
    "1f1b": ScheduleRule(limited=True, count_bubble=_count_one_bubble),
    "interleaved": ScheduleRule(limited=True, interleaved=True, count_bubble=_count_one_bubble),
    "zero_bubble": ScheduleRule(limited=True, splits=True, count_bubble=_count_zero_bubble),
    "gems": ScheduleRule(drains=True, alone=True, mirrored=True, count_bubble=_count_gems_bubble),
}
"""Schedule rules by name. Interleaved is 1F1B on ranks with several stages; only the placement differs."""


def get_schedule_rule(name: str) -> ScheduleRule:
    """Return the rule of a schedule. Raises PlanError if there is no schedule of that name."""
    if name not in SCHEDULES:
        raise PlanError(f"schedule={name!r} is unknown. Choose one of {', '.join(SCHEDULES)}.")
    return SCHEDULES[name]
