"""Which ranks can do their next instruction, and who has to go along: the rule by which programs are walked.

How far ranks have come is one number for each: how many of its steps are done. Some numbers cannot be had together: a
rank that waits for others is not past an instruction that they have not begun. `Order` finds those that can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engines.program.instructions import (
    AllReduce,
    CountLabels,
    Exchange,
    ExchangeHalf,
    FiniteCheckAllReduce,
    Phase,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from engines.program.program import Program, Step

__all__ = ["DependencyOrder", "StepCounts", "find_peers"]

StepCounts = tuple[int, ...]
"""For each rank, how many of its steps are done."""


@dataclass(frozen=True, slots=True)
class _SyncPoint:
    """Where ranks meet: instructions of one `key` on several ranks, and for whom this one waits there.

    It waits for their instruction of the key `asks`: of its own, where that is None.
    """

    key: Hashable
    waits_for: frozenset[int]
    asks: Hashable = None


class DependencyOrder:
    """All ranks' programs, and for each of their steps which steps of other ranks must have begun for it to end.

    Messages that only leave are not waited for. Weights move on all ranks at once, or on none.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.ends: StepCounts = tuple(len(program.steps) for program in programs)
        everyone = frozenset(range(len(programs)))
        met = [_number_sync_points(_make_sync_point(step, everyone) for step in program.steps) for program in programs]
        where = [{meeting.key: index for index, meeting in enumerate(each)} for each in met]
        self.needs = tuple(
            tuple(
                tuple((peer, where[peer][meeting.asks]) for peer in sorted(meeting.waits_for - {rank}))
                for meeting in meetings
            )
            for rank, meetings in enumerate(met)
        )

    def compute_closure(self, places: StepCounts, wanted: Mapping[int, int]) -> StepCounts:
        """The least that all ranks must do for the `wanted` ones to come so far."""
        targets = list(places)
        open_ranks = dict(wanted)
        while open_ranks:
            rank, target = open_ranks.popitem()
            for index in range(targets[rank], target):
                for peer, needed in self.needs[rank][index]:
                    if targets[peer] <= needed:
                        open_ranks[peer] = max(open_ranks.get(peer, 0), needed + 1)
            targets[rank] = max(targets[rank], target)
        return tuple(targets)

    def advance_within(self, places: StepCounts, limits: Sequence[int]) -> StepCounts:
        """The most that ranks can do if none goes beyond its limit."""
        targets, changed = list(limits), True
        while changed:
            changed = False
            for rank, limit in enumerate(targets):
                for index in range(places[rank], limit):
                    if any(targets[peer] <= needed for peer, needed in self.needs[rank][index]):
                        targets[rank], changed = index, True
                        break
        return tuple(targets)

    def advance_once(self, places: StepCounts) -> StepCounts:
        """One instruction of every rank that can do its next one."""
        return self.advance_within(places, [min(place + 1, end) for place, end in zip(places, self.ends, strict=True)])

    def choose_next_rank(self, places: StepCounts) -> int | None:
        """Of the ranks that can go on, the one that has done least; None at the end."""
        ready = [rank for rank, place in enumerate(self.advance_once(places)) if place > places[rank]]
        return min(ready, key=lambda rank: places[rank], default=None)

    def find_blocking_ranks(self, places: StepCounts, rank: int) -> tuple[int, ...]:
        """The ranks for which a rank has to wait before its next instruction."""
        if places[rank] == self.ends[rank]:
            return ()
        return tuple(peer for peer, needed in self.needs[rank][places[rank]] if places[peer] < needed)


def _number_sync_points(meetings: Iterable[_SyncPoint]) -> list[_SyncPoint]:
    """Of equal keys on one rank, the first meets the first on the others, and so on."""
    seen: Counter[Hashable] = Counter()
    found = []
    for meeting in meetings:
        number = seen[meeting.key]
        asks = meeting.key if meeting.asks is None else meeting.asks
        found.append(_SyncPoint((meeting.key, number), meeting.waits_for, (asks, number)))
        seen[meeting.key] += 1
    return found


def find_peers(program: Program, step: Step) -> tuple[int, ...]:
    """The other ranks whose messages, or readiness for one, a rank may have to wait for in this step of its program."""
    return tuple(sorted(_make_sync_point(step, frozenset()).waits_for - {program.rank}))


def _make_sync_point(step: Step, everyone: frozenset[int]) -> _SyncPoint:
    forward, alone = step.phase is Phase.FORWARD, frozenset[int]()
    match step.instruction:
        case Exchange() as exchange:
            key = ("exchange", exchange.tag, forward, step.micro_batch)
            return _SyncPoint(key, _find_awaited_ranks(exchange, forward))
        case ExchangeHalf(exchange=exchange, begins=begins):
            key = ("exchange", exchange.tag, forward, step.micro_batch)
            return (
                _SyncPoint(key, alone)
                if begins
                else _SyncPoint((*key, "ends"), _find_awaited_ranks(exchange, forward), key)
            )
        case AllReduce(name=name, group=group):
            return _SyncPoint((name, forward, step.micro_batch), frozenset(group))
        case SumGradients(name=name, group=group):
            ends = step.phase is Phase.UPDATE
            return _SyncPoint((name, ends), frozenset(group) if ends else alone)
        case (
            CountLabels(name=name, group=group)
            | ReduceBatchStats(name=name, group=group)
            | FiniteCheckAllReduce(name=name, group=group)
        ):
            return _SyncPoint(name, frozenset(group))
        case Update(name=name):
            return _SyncPoint(name, everyone)
    return _SyncPoint(None, alone)


def _find_awaited_ranks(exchange: Exchange, forward: bool) -> frozenset[int]:
    """Whoever expects something waits for what it sends as well."""
    lenders, borrowers = {m.source for m in exchange.receives}, {m.target for m in exchange.sends}
    return frozenset(lenders | borrowers) if (lenders if forward else borrowers) else frozenset()
