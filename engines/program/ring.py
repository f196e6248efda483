"""Attention in a ring: each rank keeps its queries, and the keys and values of the others arrive one after another.

After Liu, Zaharia and Abbeel, 2023 (arXiv:2310.01889), section 3, but each block comes from its owner and not from the
neighbour: the same bytes, and a rank waits for no third one. A rank holds two blocks beside its own, and never a matrix
of tokens by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.geometry.tiles import Move, Tile
from mpi4dl_nb.engines.graph.model_graph import Ref, TensorSpec
from mpi4dl_nb.engines.program.attention import (
    CHUNK_SCORES,
    AttentionGradient,
    Queries,
    RunningAttention,
    ScoreRule,
)
from mpi4dl_nb.engines.program.effects import Effects, Instruction, LocalOp, Messages, MessageSpec, Phase
from mpi4dl_nb.engines.program.rng import Ranges, number_positions

RING_TAGS = 4
"""Three are for blocks in forward, blocks in backward and gradients of blocks; every instruction has an even number."""


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The keys and values that one rank owns: their specs, their `tile`, and the `tokens` places in the whole image."""

    rank: int
    key: TensorSpec
    value: TensorSpec
    tile: Tile
    tokens: Ranges

    @property
    def bytes(self) -> int:
        """Size in bytes of keys and values."""
        return self.key.bytes + self.value.bytes


@dataclass(frozen=True, slots=True)
class RingAttention(Instruction):
    """`target` is the attention of this rank's queries to the keys of all `blocks`, of which `own` is this rank's.

    Blocks are in the order of their ranks. `spec` is that of this rank's part of the result. `groups` and `tokens` are
    the places of the queries (see `Queries`), of which there are `key_count` keys in the whole image. `log_sums` names
    the value that backward needs beside the result.
    """

    per_micro_batch: ClassVar[bool] = True
    kind: ClassVar[str] = "ring"
    name: str
    queries: str
    keys: str
    values: str
    mask: str | None
    target: str
    spec: TensorSpec
    blocks: tuple[KeyBlock, ...]
    own: int
    rule: ScoreRule
    groups: Ranges
    tokens: Ranges
    key_count: int
    tag: int
    differentiable: bool

    @property
    def log_sums(self) -> str:
        """The name of the logarithms of the sums of exponentials, one for each query."""
        return f"{self.target}.log_sums"

    @property
    def sources(self) -> tuple[str, ...]:
        """The values that it reads."""
        masks = () if self.mask is None else (self.mask,)
        return self.queries, self.keys, self.values, *masks

    @property
    def rounds(self) -> tuple[KeyBlock, ...]:
        """The blocks in the order in which this rank reads them: its own one, and on to higher ranks."""
        # Every rank begins elsewhere, so that no owner has to send to all others at once:
        #
        #   rank 0   0 1 2 3
        #   rank 1   1 2 3 0
        #   rank 2   2 3 0 1
        return (*self.blocks[self.own :], *self.blocks[: self.own])

    @property
    def local_ops(self) -> tuple[LocalOp, ...]:
        """The attention to all keys, as if they were here: what the rank computes in all rounds together."""
        keys, values = (
            replace(specs[0], shape=(*specs[0].shape[:-2], sum(spec.shape[-2] for spec in specs), specs[0].shape[-1]))
            for specs in ([block.key for block in self.blocks], [block.value for block in self.blocks])
        )
        return (LocalOp(self.target, "aten.scaled_dot_product_attention.default", (Ref(self.queries), keys, values)),)

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the ring does in a phase: backward fetches the blocks again, and returns their gradients."""
        forward = phase is Phase.FORWARD
        own, *others = self.rounds
        sends = [MessageSpec(block.rank, own.bytes, Move(own.rank, block.rank, own.tile)) for block in others]
        receives = [MessageSpec(block.rank, block.bytes, Move(block.rank, own.rank, block.tile)) for block in others]
        if not forward:
            sends, receives = [*sends, *receives], [*receives, *sends]
        messages = Messages(
            tag=self.tag + (not forward),
            sends=tuple(sends),
            receives=tuple(receives),
            posts=True,
            waits=True,
            packed=own.bytes,
            unpacked=0,
            own=0,
            makes_room=False,
            in_place=False,
            arena=0,
            lasting=0,
        )
        sums = TensorSpec((*self.spec.shape[:-1], 1), self.spec.sums.dtype)
        specs = {self.target: self.spec, self.log_sums: sums}
        temporary = self._count_temporary_bytes(forward)
        if forward:
            return Effects((*self.sources, self.log_sums), tuple(specs), specs, messages, temporary=temporary)
        return Effects(tuple(specs), tuple(dict.fromkeys(self.sources[:3])), {}, messages, temporary=temporary)

    def _count_temporary_bytes(self, forward: bool) -> int:
        """Return the bytes of two blocks on their way, of sums, and of one chunk of scores."""
        own, wide = self.blocks[self.own], self.spec.sums.item_bytes
        largest = max(block.bytes for block in self.blocks)
        rows, keys = self.spec.numel // self.spec.shape[-1], max(block.key.shape[-2] for block in self.blocks)
        chunk = min(CHUNK_SCORES, rows * keys) * wide
        if forward:
            return 2 * largest + self.spec.numel * wide + chunk
        # Gradients of a block: as computed, and packed; of the own block: the sum, and what arrives for it.
        return 4 * largest + 2 * own.bytes + rows * own.key.shape[-1] * wide + 2 * chunk


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
        self._columns = [number_positions(block.tokens, device).flatten() for block in ring.rounds]
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
        queries = Queries(values[ring.queries], ring.rule, ring.groups, ring.tokens, ring.key_count, mask, seed)
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
