"""Breakdown of the time of steps by phase, from each rank's own events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engines.program.instructions import Phase
from engines.program.timeline import TimelineEvent

__all__ = ["PHASES", "compute_shares", "sum_by_phase"]

PHASES = ("forward", "backward", "messages", "sums", "update", "waiting")


def sum_by_phase(events: Iterable[TimelineEvent]) -> Counter[str]:
    """Return the seconds of one rank by phase; waiting is counted apart from the phases in which it occurs."""
    found, kinds = Counter[str](), {"all-reduce": "sums", "update": "update"}
    for event in events:
        if event.kind == "compute":
            phase = "forward" if event.phase == Phase.FORWARD.value else "backward"
        else:
            phase = kinds.get(event.kind, "messages")
        found[phase] += event.busy_s
        found["waiting"] += event.wait_s
    return found


def compute_shares(ranks: Sequence[Counter[str]]) -> dict[str, float]:
    """Return the share of each phase in the time of all ranks.

    >>> compute_shares([Counter(forward=1.0, waiting=1.0), Counter(forward=2.0)])["forward"]
    0.75
    """
    together = sum(ranks, Counter())
    total = sum(together.values())
    return {name: round(together[name] / total, 4) if total else 0.0 for name in PHASES}
