"""Which ranks can do their next instruction, and who has to go along: the rule by which programs are walked.

How far ranks have come is one number for each: how many of its steps are done. Some numbers cannot be had together: a
rank that waits for others is not past an instruction that they have not begun. `Order` finds those that can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engines.program.instructions import (
    Agree,
    AllReduce,
    CountLabels,
    Exchange,
    Half,
    Phase,
    ShareStatistics,
    SumGradients,
    Update,
)
from engines.program.program import Program, Step

__all__ = ["Order", "Places", "partners"]

Places = tuple[int, ...]
"""For each rank, how many of its steps are done."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Where ranks meet: instructions of one `key` on several ranks, and for whom this one waits there.

    It waits for their instruction of the key `asks`: of its own, where that is None.
    """

    key: Hashable
    waits_for: frozenset[int]
    asks: Hashable = None


class Order:
    """All ranks' programs, and for each of their steps which steps of other ranks must have begun for it to end.

    Messages that only leave are not waited for. Weights move on all ranks at once, or on none.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.ends: Places = tuple(len(program.steps) for program in programs)
        everyone = frozenset(range(len(programs)))
        met = [_numbered(_meeting(step, everyone) for step in program.steps) for program in programs]
        where = [{meeting.key: index for index, meeting in enumerate(each)} for each in met]
        self.needs = tuple(
            tuple(
                tuple((peer, where[peer][meeting.asks]) for peer in sorted(meeting.waits_for - {rank}))
                for meeting in meetings
            )
            for rank, meetings in enumerate(met)
        )

    def closed(self, places: Places, wanted: Mapping[int, int]) -> Places:
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

    def within(self, places: Places, limits: Sequence[int]) -> Places:
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

    def wave(self, places: Places) -> Places:
        """One instruction of every rank that can do its next one."""
        return self.within(places, [min(place + 1, end) for place, end in zip(places, self.ends, strict=True)])

    def next(self, places: Places) -> int | None:
        """Of the ranks that can go on, the one that has done least; None at the end."""
        ready = [rank for rank, place in enumerate(self.wave(places)) if place > places[rank]]
        return min(ready, key=lambda rank: places[rank], default=None)

    def waits(self, places: Places, rank: int) -> tuple[int, ...]:
        """The ranks for which a rank has to wait before its next instruction."""
        if places[rank] == self.ends[rank]:
            return ()
        return tuple(peer for peer, needed in self.needs[rank][places[rank]] if places[peer] < needed)


def _numbered(meetings: Iterable[_Meeting]) -> list[_Meeting]:
    """Of equal keys on one rank, the first meets the first on the others, and so on."""
    seen: Counter[Hashable] = Counter()
    found = []
    for meeting in meetings:
        number = seen[meeting.key]
        asks = meeting.key if meeting.asks is None else meeting.asks
        found.append(_Meeting((meeting.key, number), meeting.waits_for, (asks, number)))
        seen[meeting.key] += 1
    return found


def partners(program: Program, step: Step) -> tuple[int, ...]:
    """The other ranks whose messages, or readiness for one, a rank may have to wait for in this step of its program."""
    return tuple(sorted(_meeting(step, frozenset()).waits_for - {program.rank}))


def _meeting(step: Step, everyone: frozenset[int]) -> _Meeting:
    forward, alone = step.phase is Phase.FORWARD, frozenset[int]()
    match step.instruction:
        case Exchange() as exchange:
            key = ("exchange", exchange.tag, forward, step.micro_batch)
            return _Meeting(key, _waited_for(exchange, forward))
        case Half(exchange=exchange, begins=begins):
            key = ("exchange", exchange.tag, forward, step.micro_batch)
            return _Meeting(key, alone) if begins else _Meeting((*key, "ends"), _waited_for(exchange, forward), key)
        case AllReduce(name=name, group=group):
            return _Meeting((name, forward, step.micro_batch), frozenset(group))
        case SumGradients(name=name, group=group):
            ends = step.phase is Phase.UPDATE
            return _Meeting((name, ends), frozenset(group) if ends else alone)
        case (
            CountLabels(name=name, group=group)
            | ShareStatistics(name=name, group=group)
            | Agree(name=name, group=group)
        ):
            return _Meeting(name, frozenset(group))
        case Update(name=name):
            return _Meeting(name, everyone)
    return _Meeting(None, alone)


def _waited_for(exchange: Exchange, forward: bool) -> frozenset[int]:
    """Whoever expects something waits for what it sends as well."""
    lenders, borrowers = {m.source for m in exchange.receives}, {m.target for m in exchange.sends}
    return frozenset(lenders | borrowers) if (lenders if forward else borrowers) else frozenset()
