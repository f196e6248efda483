"""Detection of hangs: ranks that wait for each other without progress, where, and since when."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from mpi4dl_nb.launch.guard_reports import StalledRank

__all__ = ["Hang", "find_hang"]


@dataclass(frozen=True)
class Hang:
    """A hang. `rank` is the one that the others wait for, as far as can be determined; `words` describes all ranks."""

    rank: int
    words: str


def find_hang(
    working: Collection[int], still: Mapping[int, StalledRank], after_s: float, began_s: float
) -> Hang | None:
    """Return the hang of the working ranks, or None.

    The ranks hang if none has made progress for `after_s` seconds, and one waits, was stopped, is idle or silent. Time
    before `began_s` (of `time.monotonic()`) does not count, because reports of ranks may be half a second old. A rank
    that computes for long is no hang as long as no rank waits for it, nor are waiting ranks while another one makes
    progress. A rank with work that is idle has not received it, or its reply does not arrive. Of a silent rank, it is
    unknown whether it makes progress.
    """
    if time.monotonic() - began_s < after_s:
        return None
    # One rank that progresses is enough to rule a hang out: the others wait for it, or will be waited for by it.
    #
    #     rank 0  computes (progress)          no hang, whatever the others do
    #     rank 1  waits ──> rank 0
    #
    #     rank 0  computes, same place         no hang: nobody waits, it may be one long kernel on every rank
    #     rank 1  computes, same place
    #
    #     rank 0  computes, same place         a hang: rank 1 can only go on if rank 0 does
    #     rank 1  waits ──> rank 0
    stuck = {rank: still[rank] for rank in sorted(working) if rank in still and still[rank].for_s >= after_s}
    if (
        not stuck
        or len(stuck) < len(working)
        or not any(each.at.waits or each.stopped or each.idle or each.silent for each in stuck.values())
    ):
        return None
    # The likely cause comes first: a rank stopped by a signal, then a silent one, then one that computes; ranks that
    # wait are consequences.
    order = sorted(
        stuck, key=lambda rank: (not stuck[rank].stopped, not stuck[rank].silent, stuck[rank].at.waits, rank)
    )
    first, *others = order
    lines = [
        f"Rank {rank} {'waits' if stuck[rank].at.waits else 'stands still'}: {_describe_state(stuck[rank])}."
        for rank in others
    ]
    said = (
        f"Rank {first} does not go on: {_describe_state(stuck[first])}. No rank has for {after_s:.0f} s "
        "(hang_after_s). If work may take as long, start the cluster with a larger one."
    )
    return Hang(first, "\n".join([said, *lines]))


def _describe_state(still: StalledRank) -> str:
    why = f"; {still.why}" if still.why and not still.at.waits else ""
    if still.silent:
        return f"nothing has been heard of it for {still.for_s:.1f} s{why}"
    if still.idle:
        return f"it has not received its work, or its answer does not arrive{why}"
    return f"{still.at}, since {still.for_s:.1f} s{why}"
