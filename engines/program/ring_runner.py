"""Runs attention in a ring, forward and backward: a block is computed while the next one is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.geometry.tiles import Span, split_axis
from mpi4dl_nb.engines.program.attention import AttentionGradient, Queries, RunningAttention, number_tokens
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.ring import RingAttention


class RingRunner:
    """One ring on one rank, prepared to run repeatedly.

    Blocks travel in pieces. While a piece is computed, the next one is on its way, and the gradient of the one before.

      round        0        1        2
      computed    own      block 1  block 2
      arriving    block 1  block 2
      returned             grad 1   grad 2
    """

    def __init__(self, ring: RingAttention, world: World, device: torch.device) -> None:
        self.ring, self.world = ring, world
        self._columns = [number_tokens(block.tokens, device) for block in ring.rounds]
        self._steps = [(number, piece) for number in range(len(ring.rounds)) for piece in range(ring.pieces)]
        forward, backward = (ring.get_effects(phase).messages for phase in (Phase.FORWARD, Phase.BACKWARD))
        self._sent = [sum(sent.bytes for sent in messages.sends) for messages in (forward, backward) if messages]

    @torch.no_grad()
    def run_forward(self, values: Mapping[str, Tensor], seed: int) -> tuple[Tensor, Tensor, int]:
        """Return the result, the logarithms of the sums of exponentials, and the bytes that this rank sends."""
        queries, key, value = self._read(values, seed)
        running = RunningAttention(queries, value.shape[-1])
        for _, keys, key_values, columns in self._fetch_pieces(self._pack(key, value), self.ring.tag):
            running.add(keys, key_values, columns)
        return *running.finish(), self._sent[0]

    @torch.no_grad()
    def run_backward(self, leaves: Mapping[str, Tensor], grad: Tensor, seed: int) -> tuple[dict[str, Tensor], int]:
        """Return the gradients by name, as far as `RingAttention.trained` says, and the bytes that this rank sends."""
        ring = self.ring
        queries, key, value = self._read(leaves, seed)
        trains_mask = ring.trained_mask is not None
        gradient = AttentionGradient(queries, leaves[ring.target], leaves[ring.log_sums], grad, trains_mask)
        own = self._pack(key, value)
        totals, returning = [torch.zeros_like(piece) for piece in own], None
        for (number, piece), keys, key_values, columns in self._fetch_pieces(own, ring.tag + 1):
            parts = gradient.add(keys, key_values, columns)
            if returning is not None:
                totals[returning.piece] += returning.wait()
                returning = None  # frees what was sent and received
            if number == 0:
                totals[piece] += _join(*parts)
            else:
                received = torch.empty_like(own[piece])
                returning = self._exchange(_join(*parts), number, received, -number, piece, ring.tag + 2)
        if returning is not None:
            totals[returning.piece] += returning.wait()
        split = [self._split(total, 0, piece) for piece, total in enumerate(totals)]
        key_parts, value_parts = zip(*split, strict=True)
        of_sources = [gradient.query, torch.cat(key_parts, -2), torch.cat(value_parts, -2), gradient.mask]
        gradients: dict[str, Tensor] = {}
        for name, part in zip(ring.sources, of_sources, strict=False):
            if part is not None:
                part = part.to(leaves[name].dtype)
                # One value may be several of them.
                gradients[name] = gradients[name] + part if name in gradients else part
        return gradients, self._sent[1]

    def _read(self, values: Mapping[str, Tensor], seed: int) -> tuple[Queries, Tensor, Tensor]:
        ring = self.ring
        mask = None if ring.mask is None else values[ring.mask]
        places = ring.groups, ring.tokens, ring.rounds[0].tokens.count
        queries = Queries(values[ring.queries], ring.rule, *places, mask, seed)
        return queries, values[ring.keys], values[ring.values]

    def _pack(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return this rank's keys and values in pieces, each in one dimension."""
        spans = (slice(span.start, span.stop) for span in self._cut(0))
        return [_join(key[..., span, :], value[..., span, :]) for span in spans]

    def _cut(self, number: int) -> list[Span]:
        """Return the tokens of each piece of the block of a round."""
        return split_axis(self.ring.rounds[number].key.shape[-2], self.ring.pieces)

    def _split(self, flat: Tensor, number: int, piece: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a piece of the block of a round."""
        block, count = self.ring.rounds[number], len(self._cut(number)[piece])
        key, value = block.key.resize(-2, count), block.value.resize(-2, count)
        keys, values = flat.split([key.numel, value.numel])
        return keys.view(key.shape), values.view(value.shape)

    def _fetch_pieces(
        self, own: Sequence[Tensor], tag: int
    ) -> Iterator[tuple[tuple[int, int], Tensor, Tensor, Tensor]]:
        """Yield for each piece the numbers of its round and of itself, its keys and values, and their places."""

        rounds = self.ring.rounds

        def start(number: int, piece: int) -> _Arriving:
            count = len(self._cut(number)[piece])
            numel = sum(spec.resize(-2, count).numel for spec in (rounds[number].key, rounds[number].value))
            return self._exchange(own[piece], -number, own[piece].new_empty(numel), number, piece, tag)

        following = start(*self._steps[len(own)])  # the pieces before are the rank's own
        for position, (number, piece) in enumerate(self._steps):
            flat = own[piece]
            if number:
                arriving = following
                if position + 1 < len(self._steps):
                    following = start(*self._steps[position + 1])
                flat = arriving.wait()
            span = self._cut(number)[piece]
            yield (number, piece), *self._split(flat, number, piece), self._columns[number][span.start : span.stop]

    def _exchange(self, sent: Tensor, target: int, received: Tensor, source: int, piece: int, tag: int) -> _Arriving:
        """Start to send to the owner of the block of round `target`, and to receive from that of round `source`."""
        target_rank, source_rank = (self.ring.rounds[number].rank for number in (target, source))
        messages = [Message(target_rank, tag, sent)], [Message(source_rank, tag, received)]
        return _Arriving(self.world.exchange(*messages), received, piece)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A message on its way into a tensor: that of a `piece` of a block."""

    pending: Pending
    received: Tensor
    piece: int

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.received


def _join(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])
