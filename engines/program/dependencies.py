"""Which ranks can run their next instruction, and which others must advance first: the order in which programs may run.

The state of all ranks is one number for each: how many of its steps are done. Not all combinations are reachable: a
rank that waits for others cannot be past an instruction that they have not begun. `DependencyOrder` finds the reachable
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from engines.program.instructions import (
    AllReduce,
    Exchange,
    FiniteCheckAllReduce,
    Phase,
    ReduceBatchStats,
    SumGradients,
    Update,
)
from engines.program.program import CountLabels, Program, Step

__all__ = ["DependencyOrder", "StepCounts", "find_peers"]

StepCounts = tuple[int, ...]
"""For each rank, the number of its steps that are done."""


@dataclass(frozen=True, slots=True)
class _SyncPoint:
    """A point at which ranks synchronise: instructions with one `key` on several ranks.

    The instruction waits for the ranks `waits_for` to begin their instruction of key `asks` (of its own key if None).
    """

    key: Hashable
    waits_for: frozenset[int]
    asks: Hashable = None


class DependencyOrder:
    """The programs of all ranks, and for each step the steps of other ranks that must have begun for it to end.

    A rank that only sends does not wait. Weights are updated on all ranks, or on none.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        self.ends: StepCounts = tuple(len(program.steps) for program in programs)
        everyone = frozenset(range(len(programs)))
        # Equal keys are numbered on each rank: its first one meets the first ones of the others, its second one theirs.
        #
        #   rank 0   exchange 2 #0 --> exchange 2 #1 --> update
        #   rank 1                     exchange 2 #0 --> exchange 2 #1 --> update      (#0 waits for #0, never for #1)
        met: list[list[_SyncPoint]] = []
        for program in programs:
            seen: Counter[Hashable] = Counter()
            meetings = []
            for step in program.steps:
                meeting = _make_sync_point(step, everyone)
                number = seen[meeting.key]
                asks = meeting.key if meeting.asks is None else meeting.asks
                meetings.append(_SyncPoint((meeting.key, number), meeting.waits_for, (asks, number)))
                seen[meeting.key] += 1
            met.append(meetings)
        where = [{meeting.key: index for index, meeting in enumerate(each)} for each in met]
        # needs[rank][index] are the (peer, step of the peer) pairs that the step waits for
        self.needs = tuple(
            tuple(
                tuple((peer, where[peer][meeting.asks]) for peer in sorted(meeting.waits_for - {rank}))
                for meeting in meetings
            )
            for rank, meetings in enumerate(met)
        )

    def compute_closure(self, places: StepCounts, wanted: Mapping[int, int]) -> StepCounts:
        """Return the smallest counts, from `places` on, at which the `wanted` ranks reach their wanted counts."""
        targets = list(places)
        open_ranks = dict(wanted)
        while open_ranks:
            rank, target = open_ranks.popitem()
            for index in range(targets[rank], target):
                for peer, needed in self.needs[rank][index]:
                    # `needed` is an index: the peer must have begun that step, so its count must be at least needed +
                    # 1.
                    if targets[peer] <= needed:
                        open_ranks[peer] = max(open_ranks.get(peer, 0), needed + 1)
            targets[rank] = max(targets[rank], target)
        return tuple(targets)

    def advance_within(self, places: StepCounts, limits: Sequence[int]) -> StepCounts:
        """Return the largest reachable counts in which no rank exceeds its limit."""
        # Start from the limits and lower a rank to the first step whose needs the others do not meet, until nothing
        # changes: the greatest fixed point. Ranks that wait for each other at one point pass it together.
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
        """Advance every rank that can run its next instruction by one."""
        return self.advance_within(places, [min(place + 1, end) for place, end in zip(places, self.ends, strict=True)])

    def choose_next_rank(self, places: StepCounts) -> int | None:
        """Return the rank with the fewest steps done among those that can continue; None at the end."""
        ready = [rank for rank, place in enumerate(self.advance_once(places)) if place > places[rank]]
        return min(ready, key=lambda rank: places[rank], default=None)

    def find_blocking_ranks(self, places: StepCounts, rank: int) -> tuple[int, ...]:
        """Return the ranks for which a rank has to wait before its next instruction."""
        if places[rank] == self.ends[rank]:
            return ()
        return tuple(peer for peer, needed in self.needs[rank][places[rank]] if places[peer] < needed)


def find_peers(program: Program, step: Step) -> tuple[int, ...]:
    """Return the other ranks for whose messages a rank may have to wait in this step of its program."""
    return tuple(sorted(_make_sync_point(step, frozenset()).waits_for - {program.rank}))


def _make_sync_point(step: Step, everyone: frozenset[int]) -> _SyncPoint:
    forward, alone = step.phase is Phase.FORWARD, frozenset[int]()
    match step.instruction:
        case Exchange() as exchange:
            key = ("exchange", exchange.tag, forward, step.micro_batch)
            # A rank that receives also waits for its own sends to complete.
            lenders, borrowers = {m.source for m in exchange.receives}, {m.target for m in exchange.sends}
            waits = exchange.ends and (lenders if forward else borrowers)
            here = key if exchange.begins else (*key, "ends")
            return _SyncPoint(here, frozenset(lenders | borrowers) if waits else alone, key)
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
