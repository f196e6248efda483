"""Which ranks can run their next instruction, and which others must advance first: the order in which programs may run.

The state of all ranks is one number for each: how many of its steps are done. Not all combinations are reachable: a
rank that waits for others cannot be past an instruction that they have not begun. `DependencyOrder` finds the reachable
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

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
        begun: list[dict[Hashable, int]] = []  # by rank: the index of the step with each key and number
        asked: list[list[tuple[Hashable, frozenset[int]]]] = []  # by rank and step: a key and number, and who has it
        for program in programs:
            seen: Counter[Hashable] = Counter()
            begun.append({})
            asked.append([])
            for index, step in enumerate(program.steps):
                key, asks, waits_for = _find_sync(step, everyone)
                begun[-1][key, seen[key]] = index
                asked[-1].append(((asks, seen[key]), waits_for))
                seen[key] += 1
        # needs[rank][index] are the (peer, step of the peer) pairs that the step waits for
        self.needs = tuple(
            tuple(tuple((peer, begun[peer][asks]) for peer in sorted(waits_for - {rank})) for asks, waits_for in steps)
            for rank, steps in enumerate(asked)
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
    return tuple(sorted(_find_sync(step, frozenset())[2] - {program.rank}))


def _find_sync(step: Step, everyone: frozenset[int]) -> tuple[Hashable, Hashable, frozenset[int]]:
    """Return the key of a step, and that of the steps which other ranks, returned as well, must begin for it to end.

    Steps at which ranks synchronise have one key on all of them.
    """
    forward = step.phase is Phase.FORWARD
    key: Hashable = None
    waits_for = frozenset[int]()
    match step.instruction:
        case Exchange() as exchange:
            key = asks = ("exchange", exchange.tag, forward, step.micro_batch)
            # A rank that receives also waits for its own sends to complete.
            lenders, borrowers = {m.source for m in exchange.receives}, {m.target for m in exchange.sends}
            if exchange.ends and (lenders if forward else borrowers):
                waits_for = frozenset(lenders | borrowers)
            return key if exchange.begins else (*asks, "ends"), asks, waits_for
        case AllReduce(name=name, group=group):
            key, waits_for = (name, forward, step.micro_batch), frozenset(group)
        case SumGradients(name=name, group=group):
            ends = step.phase is Phase.UPDATE
            key, waits_for = (name, ends), frozenset(group if ends else ())
        case (
            CountLabels(name=name, group=group)
            | ReduceBatchStats(name=name, group=group)
            | FiniteCheckAllReduce(name=name, group=group)
        ):
            key, waits_for = name, frozenset(group)
        case Update(name=name):
            key, waits_for = name, everyone
    return key, key, waits_for
