"""Ranks that wait for each other and do not go on: who hangs, who waits for it, where, and since when."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mpi4dl_nb.launch.guard_reports import StalledRank

__all__ = ["Hang", "find_hang"]


@dataclass(frozen=True)
class Hang:
    """`rank` is the one that others wait for, as far as that can be told; `words` tell of all."""

    rank: int
    words: str


def find_hang(
    working: Collection[int], still: Mapping[int, StalledRank], after_s: float, began_s: float
) -> Hang | None:
    """Whether the ranks that have work hang: none goes on for so long, and one waits, was stopped, is idle or silent.

    What was before `began_s` (by `time.monotonic()`) does not count: what is known of ranks may be half a second old.
    A rank that computes for long is no hang as long as nobody waits for it, nor are those that wait while another one
    goes on. One that has work but is idle has not received it, or its answer does not arrive; of one that is silent
    nobody knows any more whether it goes on.
    """
    if time.monotonic() - began_s < after_s:
        return None
    stuck = {rank: still[rank] for rank in sorted(working) if rank in still and still[rank].for_s >= after_s}
    if (
        not stuck
        or len(stuck) < len(working)
        or not any(each.at.waits or each.stopped or each.idle or each.silent for each in stuck.values())
    ):
        return None
    order = sorted(
        stuck, key=lambda rank: (not stuck[rank].stopped, not stuck[rank].silent, stuck[rank].at.waits, rank)
    )
    first, *others = order
    lines = [_describe_rank(rank, stuck[rank]) for rank in others]
    said = (
        f"Rank {first} does not go on: {_describe_state(stuck[first])}. No rank has for {after_s:.0f} s "
        "(hang_after_s). If work may take as long, start the cluster with a larger one."
    )
    return Hang(first, "\n".join([said, *lines]))


def _describe_rank(rank: int, still: StalledRank) -> str:
    return f"Rank {rank} {'waits' if still.at.waits else 'stands still'}: {_describe_state(still)}."


def _describe_state(still: StalledRank) -> str:
    why = f"; {still.why}" if still.why and not still.at.waits else ""
    if still.silent:
        return f"nothing has been heard of it for {still.for_s:.1f} s{why}"
    if still.idle:
        return f"it has not received its work, or its answer does not arrive{why}"
    return f"{still.at}, since {still.for_s:.1f} s{why}"
