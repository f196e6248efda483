"""All-reduce from point-to-point messages: the same on every transport, and the same bits on every rank.

Short tensors: every rank sends its tensor to all others. Long ones: each rank sums one chunk and sends the sum to the
others (reduce-scatter, then all-gather; Thakur, Rabenseifner and Gropp, 2005, section 4). Very long ones are processed
in pieces: while one piece is added up, the next one is received and the sum of the previous one is distributed. Terms
are added in rank order, so that replicas of a weight can never diverge.

  piece 0:  gather | add | all-gather sums
  piece 1:  gather   ....| add | all-gather sums
  piece 2:               gather   | add | all-gather sums
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from engines.comm.all_reduce_sizes import AHEAD, LONG_BYTES, count_pieces, count_sends
from engines.comm.world import Message, Pending, World

__all__ = ["AllReduceRequest", "all_reduce"]

_PARTS, _SUMS = 0, 1  # tags; programs use tags from 2 on


class _BufferPool(threading.local):
    """Receive buffers of long sums, kept for reuse: faulting in fresh pages takes longer than the messages do.

    Thread-local, so that each rank that is a thread has its own.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    def take(self, like: Tensor) -> Tensor:
        """Return a flat tensor of at least that size, with arbitrary content."""
        there = self.tensors[like.dtype, like.device]
        found = next((index for index, tensor in enumerate(there) if tensor.numel() >= like.numel()), None)
        return torch.empty_like(like) if found is None else there.pop(found)

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Return tensors that nothing reads or writes any more."""
        for tensor in tensors:
            self.tensors[tensor.dtype, tensor.device].append(tensor)


_spare = _BufferPool()


@dataclass(frozen=True, slots=True)
class _AllReducePiece:
    """The `terms` of all ranks, in rank order, whose sum becomes `own`.

    `gather` starts the messages that bring the terms, `pass_on` those that distribute the sums of a long tensor.
    """

    own: Tensor
    terms: Sequence[Tensor]
    gather: Callable[[], Pending]
    pass_on: Callable[[], Pending] | None


class AllReduceRequest:
    """A non-blocking all-reduce of `tensor` over the ranks in `group`, in place.

    `begin` starts it. With `again`, it can be started repeatedly and keeps its messages and buffers. Sums that ranks
    may start in different orders need different (even) tags.
    """

    def __init__(self, world: World, tensor: Tensor, group: Sequence[int], tag: int = 0, again: bool = False) -> None:
        self.world, self.tag, self.again = world, tag, again
        self.flat, self.group = tensor.detach().view(-1), tuple(group)
        self.mine = self.group.index(world.rank)
        self.sent_bytes = count_sends(self.flat.nbytes, len(self.group))[1]
        self.long = self.flat.nbytes >= LONG_BYTES and len(self.group) > 1
        cuts = self._cut_pieces()
        self.lent = self._allocate_terms(cuts)
        self.pieces = [self._make_piece(cut, self.lent[index % AHEAD]) for index, cut in enumerate(cuts)]
        self.round: Pending | None = None

    def _cut_pieces(self) -> list[list[Tensor]]:
        """Return, per piece, what each rank of the group sums: its own part of a long tensor, all of a short one."""
        if not self.long:
            return [[self.flat] * len(self.group)]
        count = count_pieces(self.flat.nbytes)
        chunks = [_cut(chunk, count) for chunk in _cut(self.flat, len(self.group))]
        return [list(parts) for parts in zip(*chunks, strict=True)]

    def _allocate_terms(self, cuts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Allocate memory for the other ranks' terms, of as many pieces as are in flight at once."""
        own = max((cut[self.mine] for cut in cuts), key=Tensor.numel)
        made = _spare.take if self.long and not self.again else torch.empty_like
        return [[made(own) for _ in self.group[1:]] for _ in cuts[:AHEAD]]

    def _make_piece(self, cut: Sequence[Tensor], lent: Sequence[Tensor]) -> _AllReducePiece:
        own = cut[self.mine]
        terms = [tensor[: own.numel()] for tensor in lent]
        terms.insert(self.mine, own)
        pass_on = self._make_exchange(_SUMS, [own] * len(cut), cut) if self.long else None
        return _AllReducePiece(own, terms, self._make_exchange(_PARTS, cut, terms), pass_on)

    def _make_exchange(self, tag: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], Pending]:
        """Return a function that starts the sends of `sent` and the receives of `received`, one tensor per rank."""
        tag += self.tag
        sends, receives = (
            [Message(peer, tag, each) for peer, each in self._select_peers(own)] for own in (sent, received)
        )
        return self.world.prepare(sends, receives) if self.again else partial(self.world.exchange, sends, receives)

    def _select_peers(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        pairs = zip(self.group, tensors, strict=True)
        return [(peer, tensor) for peer, tensor in pairs if peer != self.world.rank]

    def begin(self) -> AllReduceRequest:
        """Start to replace the tensor by the sum; collective over the group."""
        self.rounds = self._run_rounds()
        self.round = next(self.rounds)
        return self

    def wait(self) -> None:
        """Return when the sum is complete. Raises RankError if a rank fails meanwhile."""
        while self.round is not None:
            self.round.wait()
            self.round = next(self.rounds, None)

    def is_completed(self) -> bool:
        """Advance as far as messages have arrived, and return whether the sum is complete."""
        while self.round is not None and self.round.is_completed():
            self.round = next(self.rounds, None)
        return self.round is None

    def _run_rounds(self) -> Iterator[Pending]:
        """Yield each communication that must complete before the next step of the sum can run."""
        arriving = [piece.gather() for piece in self.pieces[:AHEAD]]
        going_round = []
        for index, piece in enumerate(self.pieces):
            yield arriving[index]
            _add(piece.terms, piece.own)
            going_round += [piece.pass_on()] if piece.pass_on else []
            # Every AHEAD-th piece uses the same buffers: this piece's terms are added up, so piece index + AHEAD may be
            # received.
            arriving += [coming.gather() for coming in self.pieces[index + AHEAD : index + AHEAD + 1]]
        if self.long and not self.again:
            _spare.release([tensor for lent in self.lent for tensor in lent])
        # Last, so that the distribution of all sums overlaps with the pieces above.
        yield from going_round


def _cut(flat: Tensor, count: int) -> list[Tensor]:
    """Cut into parts that differ in length by at most one element."""
    cuts = [flat.numel() * index // count for index in range(count + 1)]
    return [flat[start:stop] for start, stop in pairwise(cuts)]


def _add(terms: Sequence[Tensor], out: Tensor) -> None:
    """Add the terms, from first to last, into `out`, which is one of them; the other terms are overwritten."""
    if len(terms) == 1:
        return
    first, *between, last = terms
    for term in between:
        first.add_(term)
    torch.add(first, last, out=out)


def all_reduce(world: World, tensor: Tensor, group: Sequence[int], tag: int = 0) -> AllReduceRequest:
    """Start an all-reduce of `tensor` (contiguous) over the ranks in `group`; collective, in the same order."""
    return AllReduceRequest(world, tensor, group, tag).begin()
