"""The sum over ranks, from messages alone: the same on every transport, and the same bits on every rank.

Short tensors: everyone sends everything to everyone. Long ones: each rank sums one chunk and sends it round
(reduce-scatter, then all-gather; Thakur, Rabenseifner and Gropp, 2005, section 4), in two rounds of messages.
Terms are added in rank order, so that copies of a weight can never drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from engines.comm.world import Message, World

__all__ = ["Total", "all_reduce", "sent_by_each"]

_LONG = 1 << 15  # bytes from which a second round costs less than sending everything to everyone
_PARTS, _SUMS = 0, 1  # tags; those of programs begin at 2


def sent_by_each(count_bytes: int, ranks: int) -> tuple[int, int]:
    """The messages that each rank sends for a sum of tensors of that size, and their bytes.

    >>> sent_by_each(100, 4), sent_by_each(1 << 20, 4)
    ((3, 300), (6, 1572864))
    """
    others = ranks - 1
    if count_bytes < _LONG:
        return others, others * count_bytes
    return 2 * others, 2 * others * count_bytes // ranks


class Total:
    """The sum of `tensor` over the ranks in `group`, under way; `wait` leaves it in `tensor`."""

    def __init__(self, world: World, tensor: Tensor, group: Sequence[int]) -> None:
        self.world = world
        self.flat, self.group = tensor.detach().view(-1), tuple(group)
        self.mine = self.group.index(world.rank)
        self.chunks = self._chunks()
        own = self.chunks[self.mine]
        self.parts = [own if peer == world.rank else torch.empty_like(own) for peer in self.group]
        sends = [Message(peer, _PARTS, chunk) for peer, chunk in self._others(self.chunks)]
        receives = [Message(peer, _PARTS, part) for peer, part in self._others(self.parts)]
        self.pending = world.exchange(sends, receives)

    def _chunks(self) -> Sequence[Tensor]:
        """What each rank of the group sums: a chunk of a long tensor, all of a short one."""
        count = len(self.group)
        if self.flat.nbytes < _LONG or count == 1:
            return [self.flat] * count
        cuts = [self.flat.numel() * index // count for index in range(count + 1)]
        return [self.flat[start:stop] for start, stop in pairwise(cuts)]

    def _others(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = zip(self.group, tensors, strict=True)
        return [(peer, tensor) for peer, tensor in pairs if peer != self.world.rank]

    def wait(self) -> None:
        """Add the parts up, and pass long sums round. Raises RankError if a rank fails meanwhile."""
        self.pending.wait()
        total = self.parts[0].clone()
        for part in self.parts[1:]:
            total += part
        self.chunks[self.mine].copy_(total)
        if self.chunks[0].numel() == self.flat.numel():
            return
        sends = [Message(peer, _SUMS, total) for peer in self.group if peer != self.world.rank]
        receives = [Message(peer, _SUMS, chunk) for peer, chunk in self._others(self.chunks)]
        self.world.exchange(sends, receives).wait()


def all_reduce(world: World, tensor: Tensor, group: Sequence[int]) -> Total:
    """Start to replace `tensor` (contiguous) by its sum over the ranks in `group`; collective over them, in order."""
    return Total(world, tensor, group)
