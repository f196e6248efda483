"""Runs attention in a ring, forward and backward: a block is computed while the next one is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.program.attention import AttentionGradient, Queries, RunningAttention, number_tokens
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.ring import KeyBlock, RingAttention


class RingRunner:
    """One ring on one rank, prepared to run repeatedly.

    While a block is computed, the next one is on its way, and the gradient of the one before.

      round        0        1        2
      computed    own      block 1  block 2
      arriving    block 1  block 2
      returned             grad 1   grad 2
    """

    def __init__(self, ring: RingAttention, world: World, device: torch.device) -> None:
        self.ring, self.world = ring, world
        self._columns = [number_tokens(block.tokens, device) for block in ring.rounds]
        forward, backward = (ring.get_effects(phase).messages for phase in (Phase.FORWARD, Phase.BACKWARD))
        self._sent = [sum(sent.bytes for sent in messages.sends) for messages in (forward, backward) if messages]

    @torch.no_grad()
    def run_forward(self, values: Mapping[str, Tensor], seed: int) -> tuple[Tensor, Tensor, int]:
        """Return the result, the logarithms of the sums of exponentials, and the bytes that this rank sends."""
        queries, key, value = self._read(values, seed)
        running = RunningAttention(queries, value.shape[-1])
        for number, keys, key_values in self._fetch_blocks(key, value, self.ring.tag):
            running.add(keys, key_values, self._columns[number])
        return *running.finish(), self._sent[0]

    @torch.no_grad()
    def run_backward(self, leaves: Mapping[str, Tensor], grad: Tensor, seed: int) -> tuple[dict[str, Tensor], int]:
        """Return the gradients of queries, keys and values by name, and the bytes that this rank sends."""
        ring = self.ring
        queries, key, value = self._read(leaves, seed)
        gradient = AttentionGradient(queries, leaves[ring.target], leaves[ring.log_sums], grad)
        total = torch.zeros(key.numel() + value.numel(), dtype=key.dtype, device=key.device)
        returning = None
        for number, keys, key_values in self._fetch_blocks(key, value, ring.tag + 1):
            of_block = _pack(*gradient.add(keys, key_values, self._columns[number]))
            if returning is not None:
                total += returning.wait()
            if number == 0:
                total += of_block
            else:
                returning = self._exchange(of_block, number, torch.empty_like(total), -number, ring.tag + 2)
        if returning is not None:
            total += returning.wait()
        of_key, of_value = _unpack(total, ring.rounds[0])
        gradients = {ring.queries: gradient.query.to(queries.query.dtype)}
        for name, part in ((ring.keys, of_key), (ring.values, of_value)):  # one value may be two of them, or all three
            gradients[name] = gradients[name] + part if name in gradients else part
        return gradients, self._sent[1]

    def _read(self, values: Mapping[str, Tensor], seed: int) -> tuple[Queries, Tensor, Tensor]:
        ring = self.ring
        mask = None if ring.mask is None else values[ring.mask]
        queries = Queries(
            values[ring.queries], ring.rule, ring.groups, ring.tokens, ring.rounds[0].tokens.count, mask, seed
        )
        return queries, values[ring.keys], values[ring.values]

    def _fetch_blocks(self, key: Tensor, value: Tensor, tag: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each round, with its keys and values."""
        rounds, own = self.ring.rounds, _pack(key, value)

        def start(number: int) -> _Arriving:
            block = rounds[number]
            return self._exchange(own, -number, own.new_empty(block.key.numel + block.value.numel), number, tag)

        following = start(1)
        yield 0, key, value
        for number, block in enumerate(rounds[1:], 1):
            arriving = following
            if number + 1 < len(rounds):
                following = start(number + 1)
            yield number, *_unpack(arriving.wait(), block)

    def _exchange(self, sent: Tensor, target: int, received: Tensor, source: int, tag: int) -> _Arriving:
        """Start to send to the owner of the block of round `target`, and to receive from that of round `source`."""
        target_rank, source_rank = (self.ring.rounds[number].rank for number in (target, source))
        messages = [Message(target_rank, tag, sent)], [Message(source_rank, tag, received)]
        return _Arriving(self.world.exchange(*messages), received)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A message on its way into a tensor."""

    pending: Pending
    received: Tensor

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.received


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(flat: Tensor, block: KeyBlock) -> tuple[Tensor, Tensor]:
    key, value = flat.split([block.key.numel, block.value.numel])
    return key.view(block.key.shape), value.view(block.value.shape)
