"""The links between nodes, and who has to wait for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engines.predict.machine import Link, Machine

__all__ = ["BackgroundAllReduce", "LinkQueues"]


@dataclass
class BackgroundAllReduce:
    """A sum of gradients on its way, from when it was begun: complete at `end_s`, if nothing comes in between.

    `seen_s` is how long others had used each of its links by then, `given_s` how much later it ends for them.
    """

    end_s: float
    seen_s: dict[tuple[int, str], float]
    given_s: float = 0.0


@dataclass
class LinkQueues:
    """Each node has one link, for both ways at once; a message between nodes takes the sender's and the receiver's.

    A link carries messages one after another, in the order in which they come to it; the next link has the
    beginning of a message as soon as it leaves the first. Within a node they do not hinder each other.
    Sums for which ranks wait are in that order too. Gradients' sums, which go on behind backward, let all others pass;
    among themselves they are in order, also on the ranks that take part: each does one at a time.
    """

    machine: Machine
    free_s: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    used_s: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    sums_free_s: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def find_link(self, source: int, target: int) -> Link | None:
        """What carries a message to another node; None within one."""
        if self.machine.between is None or self.machine.get_node(source) == self.machine.get_node(target):
            return None
        return self.machine.between

    def schedule_message(self, rank: int, way: str, seconds: float, now: float) -> float:
        """When the link of a rank's node begins to carry what takes it for so long. `way`: `out` or `in`."""
        return self._reserve([(self.machine.get_node(rank), way)], seconds, now)

    def schedule_all_reduce(self, ranks: Iterable[int], seconds: float, now: float) -> float:
        """When the last of the links of these ranks' nodes begins to carry a sum; each begins as soon as it is free."""
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
        """Begin a sum of gradients behind the earlier ones of its ranks, and of its links where it `crosses` nodes."""
        places = self._list_link_ends(ranks) if crosses else []
        keys = [("rank", rank) for rank in ranks] + [("node", node) for node, way in places if way == "out"]
        end_s = max(now, *(self.sums_free_s[key] for key in keys)) + carried_s
        self.sums_free_s.update(dict.fromkeys(keys, end_s))
        return BackgroundAllReduce(end_s, {place: self.used_s[place] for place in places})

    def update_delay(self, passing: BackgroundAllReduce) -> float:
        """For how long it was held up since it was asked last."""
        held_s = max((self.used_s[place] - seen for place, seen in passing.seen_s.items()), default=0.0)
        more, passing.given_s = held_s - passing.given_s, held_s
        return more
