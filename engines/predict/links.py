"""The links between nodes, and the order of messages and all-reduces on them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from mpi4dl_nb.engines.comm.all_reduce_sizes import count_sends
from mpi4dl_nb.engines.predict.machine import Link, Machine


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
        is_within = self.machine.get_node(source) == self.machine.get_node(target)
        return None if is_within else self.machine.between

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
        starts_s = [max(now, self.free_s[link]) for link in places]
        for link, start_s in zip(places, starts_s, strict=True):
            self.free_s[link] = start_s + seconds
            self.used_s[link] += seconds
        return max(starts_s)

    def schedule_background(self, ranks: Sequence[int], cost: AllReduceCost, now: float) -> BackgroundAllReduce:
        """Start a gradient all-reduce after the earlier ones of its ranks and, if it crosses nodes, of its links."""
        places = self._list_link_ends(ranks) if cost.crosses else []
        keys = [("rank", rank) for rank in ranks] + [("node", node) for node, way in places if way == "out"]
        end_s = max(now, *(self.sums_free_s[key] for key in keys)) + cost.carried_s
        self.sums_free_s.update(dict.fromkeys(keys, end_s))
        # `free_s` stays as it is: a background all-reduce never delays foreground traffic, and `update_delay` adds the
        # delay that it suffers itself.
        return BackgroundAllReduce(end_s, {link: self.used_s[link] for link in places})

    def update_delay(self, passing: BackgroundAllReduce) -> float:
        """Return the seconds by which it was delayed since the last call."""
        held_s = max((self.used_s[link] - seen for link, seen in passing.seen_s.items()), default=0.0)
        # Only foreground traffic counts in `used_s`; the link with the most of it determines the delay.
        more, passing.given_s = held_s - passing.given_s, held_s
        return more


# The cost of an all-reduce on a machine of nodes, by direct sends between all ranks or in two levels.


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """An all-reduce occupies its ranks and the links of their nodes for `carried_s`, and is complete `latency_s` later.

    `crosses` says whether it leaves a node. Where ranks share the cores of one host, the cores themselves carry it:
    each rank's core is then busy for `fetched_s`, and no link is used.
    """

    carried_s: float
    latency_s: float
    crosses: bool
    fetched_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of an all-reduce on an otherwise idle machine."""
        return self.carried_s + self.latency_s + self.fetched_s


@lru_cache(maxsize=1024)
def count_members(group: tuple[int, ...], node_ranks: int | None) -> tuple[int, ...]:
    """Return how many ranks of a group are on each node with at least one, in ascending order.

    >>> count_members((0, 1, 5, 6), node_ranks=4)
    (2, 2)
    """
    return tuple(sorted(Counter(rank // node_ranks for rank in group).values())) if node_ranks else (len(group),)


def estimate_all_reduce(machine: Machine, members: Sequence[int], tensor_bytes: int) -> AllReduceCost:
    """Return the cost of an all-reduce of `tensor_bytes` over `members` ranks on each node.

    `direct`: each rank sends to each other rank, in two rounds where that is less (`engines/comm/all_reduce_sizes.py`),
    and the ranks of a node share its link.
    `two_level`: an all-reduce within each node, then between the nodes, where each rank handles a part of the numbers,
    and then an all-gather within each node. Within a level it works by recursive halving or, where less, on all numbers
    at once (Thakur, Rabenseifner and Gropp, 2005, Optimization of collective communication operations in MPICH,
    sections 4.1 to 4.4). Long all-reduces pass the levels in pieces, so that only the slower level counts.
    """
    travels = _estimate_direct if machine.sums == "direct" else _estimate_two_level
    cost = travels(machine, members, tensor_bytes)
    if machine.cores is None or cost.crosses:
        return cost
    # Within a host, messages are copies by the cores that also compute: no link is occupied, but the ranks are.
    return AllReduceCost(0.0, cost.latency_s, crosses=False, fetched_s=cost.carried_s)


def _estimate_two_level(machine: Machine, members: Sequence[int], tensor_bytes: int) -> AllReduceCost:
    here, between = Link(machine.latency_s, machine.bytes_per_s), machine.between
    inside, across = _estimate_tree(here, max(members), tensor_bytes, 1), AllReduceCost(0.0, 0.0, False)
    if between and len(members) > 1:
        across = _estimate_tree(between, len(members), tensor_bytes, max(members))
    # Up and down both trees, each message costs its sender or receiver `message_s`.
    messages = 2 * (math.ceil(math.log2(max(members))) + math.ceil(math.log2(len(members))))
    # The pieces of a long all-reduce are at different levels at the same time: latencies add up, transfers overlap.
    latency_s = inside.latency_s + across.latency_s + messages * machine.message_s
    return AllReduceCost(max(inside.carried_s, across.carried_s), latency_s, len(members) > 1)


def _estimate_direct(machine: Machine, members: Sequence[int], tensor_bytes: int) -> AllReduceCost:
    ranks = sum(members)
    messages, sent = count_sends(tensor_bytes, ranks)
    # One round: all numbers to all others. Two rounds: each rank sums a part of the numbers, and then hands it out.
    rounds = 2 if messages > ranks - 1 else 1
    latency_s, carried_s = machine.latency_s, sent / machine.bytes_per_s
    if machine.between and len(members) > 1:
        latency_s = max(latency_s, machine.between.latency_s)
        # On a node with `count` ranks, each of them sends to the ranks - count others over the node's only link. The
        # bottleneck is that link, or the messages of a rank within its node.
        share = sent / (ranks - 1)
        leaving = max(count * (ranks - count) for count in set(members)) * share
        carried_s = max((max(members) - 1) * share / machine.bytes_per_s, leaving / machine.between.bytes_per_s)
    return AllReduceCost(carried_s, rounds * latency_s + messages * machine.message_s, len(members) > 1)


def _estimate_tree(link: Link, ends: int, tensor_bytes: int, sharing: int) -> AllReduceCost:
    """Return the cost over `ends` link ends, by recursive halving; `sharing` ranks of each end could send at once."""
    if ends < 2:
        return AllReduceCost(0.0, 0.0, False)
    # Long: a reduce-scatter by halving and an all-gather by doubling, in which the sizes of the messages add up to all
    # numbers but one part, twice. Short: all numbers in each of half as many rounds.
    rounds = math.ceil(math.log2(ends))
    long = AllReduceCost(2 * (ends - 1) / ends * tensor_bytes / link.bytes_per_s, 2 * rounds * link.latency_s, False)
    short = AllReduceCost(rounds * tensor_bytes / link.bytes_per_s, rounds * link.latency_s, False)
    return min(long, short, key=lambda cost: cost.seconds)
