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
from functools import partial
from typing import Self

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.all_reduce_sizes import AHEAD, LONG_BYTES, count_pieces, count_sends
from mpi4dl_nb.engines.comm.world import Message, Pending, World

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
        position = next((index for index, tensor in enumerate(there) if tensor.numel() >= like.numel()), None)
        return torch.empty_like(like) if position is None else there.pop(position)

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Return tensors that nothing reads or writes any more."""
        for tensor in tensors:
            self.tensors[tensor.dtype, tensor.device].append(tensor)


_spare = _BufferPool()


class RoundsRequest:
    """A non-blocking collective of several rounds of messages, which `_run_rounds` yields; `begin` starts it."""

    sent_bytes: int
    round: Pending | None = None

    def begin(self) -> Self:
        """Start it; collective over the group."""
        self.rounds = self._run_rounds()
        self.round = next(self.rounds)  # runs up to the first `yield`: posts the first messages
        return self

    def wait(self) -> int:
        """Wait until it is complete; return the bytes that this rank sent. Raises RankError if a rank fails."""
        while self.round is not None:
            self.round.wait()
            self.round = next(self.rounds, None)
        return self.sent_bytes

    def is_completed(self) -> bool:
        """Advance as far as messages have arrived, and return whether it is complete."""
        # Nothing else drives it: between two calls no piece is added up, and no further message is sent.
        while self.round is not None and self.round.is_completed():
            self.round = next(self.rounds, None)
        return self.round is None

    def _run_rounds(self) -> Iterator[Pending]:
        """Yield each communication that must complete before the next step can run."""
        raise NotImplementedError


class AllReduceRequest(RoundsRequest):
    """A non-blocking all-reduce of `tensor` over the ranks in `group`, in place.

    `begin` starts it. With `again`, it can be started repeatedly and keeps its messages and buffers. Sums that ranks
    may start in different orders need different (even) tags.
    """

    def __init__(self, world: World, tensor: Tensor, group: Sequence[int], tag: int = 0, again: bool = False) -> None:
        self.world, self.tag, self.again = world, tag, again
        flat, self.group = tensor.detach().view(-1), tuple(group)
        mine = self.group.index(world.rank)
        self.sent_bytes = count_sends(flat.nbytes, len(self.group))[1]
        # A short tensor costs the latency of one message rather than its bytes; a second round would double that.
        self.long = flat.nbytes >= LONG_BYTES and len(self.group) > 1
        # Per piece, what each rank of the group sums. Of a long tensor each rank has one chunk, and piece i is the i-th
        # part of every chunk. With 3 ranks and 2 pieces:
        #
        #   chunk of rank      0       1       2
        #   tensor         | a : b | c : d | e : f |     piece 0: a c e,  piece 1: b d f
        cuts: list[Sequence[Tensor]] = [[flat] * len(self.group)]
        if self.long:
            count = count_pieces(flat.nbytes)
            chunks = [chunk.tensor_split(count) for chunk in flat.tensor_split(len(self.group))]
            cuts = list(zip(*chunks, strict=True))
        # Memory for the other ranks' terms, of as many pieces as are in flight at once. A request that is kept for the
        # whole training owns its memory: between two steps another sum could otherwise take it from the pool.
        largest = max((cut[mine] for cut in cuts), key=Tensor.numel)
        allocate = _spare.take if self.long and not self.again else torch.empty_like
        self.lent = [[allocate(largest) for _ in self.group[1:]] for _ in cuts[:AHEAD]]
        # For each piece: this rank's part; the terms of all ranks, in rank order, whose sum it becomes; what starts the
        # messages that bring the terms; what starts those that distribute the sums of a long tensor.
        self.pieces = []
        for index, cut in enumerate(cuts):
            part = cut[mine]
            terms = [term[: part.numel()] for term in self.lent[index % AHEAD]]
            terms.insert(mine, part)
            # The sums arrive where they belong in the tensor, which needs no further copy: its old terms there were
            # sent away before, in `gather`.
            pass_on = self._make_exchange(_SUMS, [part] * len(cut), cut) if self.long else None
            self.pieces.append((part, terms, self._make_exchange(_PARTS, cut, terms), pass_on))

    def _make_exchange(self, tag: int, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Callable[[], Pending]:
        """Return a function that starts the sends of `sent` and the receives of `received`, one tensor per rank."""

        def make_messages(tensors: Sequence[Tensor]) -> list[Message]:
            pairs = zip(self.group, tensors, strict=True)
            return [Message(peer, self.tag + tag, tensor) for peer, tensor in pairs if peer != self.world.rank]

        sends, receives = make_messages(sent), make_messages(received)
        return self.world.prepare(sends, receives) if self.again else partial(self.world.exchange, sends, receives)

    def _run_rounds(self) -> Iterator[Pending]:
        arriving = [gather() for _, _, gather, _ in self.pieces[:AHEAD]]
        going_round = []
        for index, (part, terms, _, pass_on) in enumerate(self.pieces):
            yield arriving[index]
            if len(terms) > 1:
                # From first to last, so that the sum has the same bits whichever rank forms it. `part` is among the
                # terms; the others' memory is scratch from here on.
                first, *between, last = terms
                for term in between:
                    first.add_(term)
                torch.add(first, last, out=part)
            if pass_on:
                going_round.append(pass_on())
            # Every AHEAD-th piece uses the same buffers: this piece's terms are added up, so piece index + AHEAD may be
            # received.
            arriving += [gather() for _, _, gather, _ in self.pieces[index + AHEAD : index + AHEAD + 1]]
        if self.long and not self.again:
            _spare.release([tensor for lent in self.lent for tensor in lent])
        # Last, so that the distribution of all sums overlaps with the pieces above.
        yield from going_round


def all_reduce(world: World, tensor: Tensor, group: Sequence[int]) -> AllReduceRequest:
    """Start an all-reduce of `tensor` (contiguous) over the ranks in `group`; collective, in the same order."""
    return AllReduceRequest(world, tensor, group).begin()
