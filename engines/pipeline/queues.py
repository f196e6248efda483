"""The order in which the micro-batches of a direction are processed, and what each of them waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from engines.pipeline.work import Batch

__all__ = ["QueuedMicroBatch", "Stages", "make_queues"]

Stages = Sequence[Sequence[int]]
"""The stages of one direction, each with the ranks that work on it together."""


@dataclass(frozen=True, slots=True)
class QueuedMicroBatch:
    """One micro-batch in the queue of its direction. `batch` and `group` are ranges of positions in that queue.

    A rank with several stages takes a whole group through one stage before it takes any of it through the next.
    `earlier` is, for each direction, the number of micro-batches in the batches before this one's.
    """

    micro_batch: int
    batch: range
    group: range
    earlier: tuple[int, ...]


def make_queues(placement: Sequence[Stages], batches: Sequence[Batch]) -> list[list[QueuedMicroBatch]]:
    """Return the micro-batches of each direction, in the order of the batches.

    >>> [[turn.group for turn in queue] for queue in make_queues([[(0,), (1,), (0,), (1,)]], [Batch(0, (5, 6, 7))])]
    [[range(0, 2), range(0, 2), range(2, 3)]]
    """
    sizes = [_compute_group_size(stages) for stages in placement]
    found: list[list[QueuedMicroBatch]] = [[] for _ in placement]
    # Positions in the queue of one direction, for batches of 3 micro-batches and groups of 2:
    #
    #   position   0 1 2   3 4 5   6 7 8
    #   batch     |     |       |       |
    #   group     |   | |   |   |   |   |      a batch ends its last group early
    for batch in batches:
        # Counted in the order of `batches`, so it also covers the batches of the other directions.
        earlier = tuple(len(queue) for queue in found)
        queue, size = found[batch.direction], sizes[batch.direction]
        places = range(len(queue), len(queue) + len(batch.micro_batches))
        for index, micro_batch in enumerate(batch.micro_batches):
            start = index // size * size
            queue.append(QueuedMicroBatch(micro_batch, places, places[start : start + size], earlier))
    return found


def _compute_group_size(stages: Stages) -> int:
    """Return the least number of stages from one stage of a rank to its next: the group then returns just in time.

    Megatron groups micro-batches in the same way (Narayanan et al. 2021, section 2.2.2).

    >>> _compute_group_size([(0, 1), (2,), (3,), (2,), (3,)])
    2
    """
    pairs = combinations(enumerate(map(frozenset, stages)), 2)
    return min((later - stage for (stage, one), (later, other) in pairs if one & other), default=len(stages))
