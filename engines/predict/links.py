"""The links between nodes, and the order of messages and all-reduces on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engines.predict.machine import Link, Machine

__all__ = ["BackgroundAllReduce", "LinkQueues"]


@dataclass
class BackgroundAllReduce:
    """A gradient all-reduce in progress, complete at `end_s` if no other traffic delays it.

    `seen_s` is how long each of its links had been used by other traffic at its start, and `given_s` the delay already
    reported.
    """

    end_s: float
    seen_s: dict[tuple[int, str], float]
    given_s: float = 0.0


@dataclass
class LinkQueues:
    """The links of all nodes.

    Each node has one full-duplex link. A message between nodes uses the sender's and the receiver's link. A link
    carries messages one after another, in order of arrival, and forwards the beginning of a message at once. Messages
    within a node do not delay each other.
    Blocking all-reduces are in the same order. Gradient all-reduces, which overlap with backward, yield to all other
    traffic. Among themselves they run in order, one at a time on each link and each rank.
    """

    # `free_s`: when a link end has passed on all that is scheduled. `used_s`: the seconds that foreground traffic has
    # used it so far; the difference of two readings is what a background all-reduce has lost in between.
    #
    #   foreground   ███░░███████░░░░███
    #   background   ···██·······████···     the end moves by as much as the foreground takes
    machine: Machine
    free_s: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    used_s: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    sums_free_s: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def find_link(self, source: int, target: int) -> Link | None:
        """Return the link for a message to another node, or None within a node."""
        if self.machine.between is None or self.machine.get_node(source) == self.machine.get_node(target):
            return None
        return self.machine.between

    def schedule_message(self, rank: int, way: str, seconds: float, now: float) -> float:
        """Return when the link of a rank's node starts a message of `seconds`. `way` is `out` or `in`."""
        return self._reserve([(self.machine.get_node(rank), way)], seconds, now)

    def schedule_all_reduce(self, ranks: Iterable[int], seconds: float, now: float) -> float:
        """Return when the last link of these ranks' nodes starts an all-reduce; each starts as soon as it is free."""
        return self._reserve(self._list_link_ends(ranks), seconds, now)

    def _list_link_ends(self, ranks: Iterable[int]) -> list[tuple[int, str]]:
        nodes = dict.fromkeys(self.machine.get_node(rank) for rank in ranks)
        return [(node, way) for node in nodes for way in ("out", "in")]

    def _reserve(self, places: Sequence[tuple[int, str]], seconds: float, now: float) -> float:
        starts_s = [max(now, self.free_s[place]) for place in places]
        for place, start_s in zip(places, starts_s, strict=True):
            self.free_s[place] = start_s + seconds
            self.used_s[place] += seconds
        return max(starts_s)

    def schedule_background(
        self, ranks: Sequence[int], carried_s: float, crosses: bool, now: float
    ) -> BackgroundAllReduce:
        """Start a gradient all-reduce after the earlier ones of its ranks and, if it `crosses` nodes, of its links."""
        places = self._list_link_ends(ranks) if crosses else []
        keys = [("rank", rank) for rank in ranks] + [("node", node) for node, way in places if way == "out"]
        end_s = max(now, *(self.sums_free_s[key] for key in keys)) + carried_s
        self.sums_free_s.update(dict.fromkeys(keys, end_s))
        # `free_s` stays as it is: a background all-reduce never delays foreground traffic, and `update_delay` adds the
        # delay that it suffers itself.
        return BackgroundAllReduce(end_s, {place: self.used_s[place] for place in places})

    def update_delay(self, passing: BackgroundAllReduce) -> float:
        """Return the seconds by which it was delayed since the last call."""
        held_s = max((self.used_s[place] - seen for place, seen in passing.seen_s.items()), default=0.0)
        # Only foreground traffic counts in `used_s`; the link with the most of it determines the delay.
        more, passing.given_s = held_s - passing.given_s, held_s
        return more
