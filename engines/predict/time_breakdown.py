"""Where the time of a step goes: computing, handling messages and sums, and waiting for either."""

from __future__ import annotations

from collections.abc import Mapping

from engines.program.timeline import WORK, Timeline

__all__ = ["SHARES", "compute_time_shares"]

SHARES = ("compute", "messages", "waiting for messages", "sums", "waiting for sums")
"""`compute` has updates in it; `messages` are halos and what goes from stage to stage, packed and unpacked; `sums` are
those of gradients, norms and statistics. Waiting has the travel in it, and the others' delay."""


def compute_time_shares(timeline: Timeline) -> Mapping[str, float]:
    """Parts of all ranks' time, by `SHARES`; together 1."""
    found = dict.fromkeys(SHARES, 0.0)
    for event in timeline.events:
        kind = "compute" if event.kind in WORK else "sums" if event.kind == "all-reduce" else "messages"
        found[kind] += event.busy_s
        found[f"waiting for {'sums' if kind == 'sums' else 'messages'}"] += event.wait_s
    whole = len(timeline.ranks) * timeline.seconds
    parts = {kind: seconds / whole for kind, seconds in found.items()}
    parts["waiting for messages"] += max(0.0, 1 - sum(parts.values()))  # between instructions, or done before others
    return parts
