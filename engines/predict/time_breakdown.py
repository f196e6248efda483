"""The breakdown of a step's time: computing, handling messages and all-reduces, and waiting for either."""

from __future__ import annotations

from collections.abc import Mapping

from engines.program.timeline import WORK, Timeline

__all__ = ["SHARES", "compute_time_shares"]

SHARES = ("compute", "messages", "waiting for messages", "sums", "waiting for sums")
"""`compute` includes updates. `messages` are halos and transfers between stages, packed and unpacked. `sums` are
all-reduces of gradients, norms and statistics. Waiting includes the travel time and the delay of other ranks."""


def compute_time_shares(timeline: Timeline) -> Mapping[str, float]:
    """Return the fractions of all ranks' time, by `SHARES`; they add up to 1."""
    found = dict.fromkeys(SHARES, 0.0)
    for event in timeline.events:
        kind = "compute" if event.kind in WORK else "sums" if event.kind == "all-reduce" else "messages"
        found[kind] += event.busy_s
        found[f"waiting for {'sums' if kind == 'sums' else 'messages'}"] += event.wait_s
    # Events do not cover all of a rank's time. What is missing is waiting, so that the shares add up to 1.
    whole = len(timeline.ranks) * timeline.seconds
    parts = {kind: seconds / whole for kind, seconds in found.items()}
    parts["waiting for messages"] += max(0.0, 1 - sum(parts.values()))  # between instructions, or after the rank's end
    return parts
