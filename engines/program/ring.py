"""Attention in a ring: each rank keeps its queries, and the keys and values of the others arrive one after another.

After Liu, Zaharia and Abbeel, 2023 (arXiv:2310.01889), section 3, but each block comes from its owner and not from the
neighbour: the same bytes, and a rank waits for no third one. Beside its own block a rank holds some pieces of others,
and never a matrix of tokens by tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from mpi4dl_nb.engines.geometry.places import Ranges
from mpi4dl_nb.engines.geometry.tiles import Move, Tile, split_axis
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.program.effects import Effects, Instruction, LocalOp, Messages, MessageSpec, Phase


def count_chunk_scores(block_numel: int) -> int:
    """Return how many scores are in memory at once: as many as a block has numbers, or a mebibyte of float32."""
    return max(1 << 18, block_numel)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What besides the vectors decides about the score of each pair of a query and a key.

    Scores are multiplied by `scale`. `causal`: a query sees no key behind its own place in the whole image. A fraction
    `dropout` of the weights, drawn by place with the number `draw`, is dropped.
    """

    scale: float
    causal: bool = False
    dropout: float = 0.0
    draw: int = 0


def can_fuse(rule: ScoreRule, has_mask: bool, key_size: int, value_size: int) -> bool:
    """Return whether PyTorch's kernel takes a block: without an order, a mask or dropout, and values as wide as keys.

    The kernel could take a part of a mask, and returns no gradient of it.
    """
    return not (rule.causal or rule.dropout or has_mask) and key_size == value_size


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The places of a rank's tokens in the whole image: `pixels`, behind `lead` tokens that the first tile has, too."""

    pixels: Ranges
    lead: int = 0

    @property
    def count(self) -> int:
        """The number of tokens of the whole image."""
        return self.lead + math.prod(size for size, _, _ in self.pixels)

    @property
    def has_lead(self) -> bool:
        """Whether the first tokens are here."""
        return all(start == 0 for _, start, _ in self.pixels)


def place_alone(heads: int, queries: int) -> tuple[Ranges, TokenPlaces]:
    """Return the places of all queries of one image, with so many heads, on one rank, for `tile.attention`."""
    return ((1, 0, 1), (heads, 0, heads)), TokenPlaces(((queries, 0, queries),))


PIECE_BYTES, _MOST_PIECES = 1 << 20, 8

RING_TAGS = 4
"""Three are for blocks in forward, blocks in backward and gradients of blocks; every instruction has an even number."""


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """The keys and values that one rank owns: their specs, their `tile`, and their places as `tokens`."""

    rank: int
    key: TensorSpec
    value: TensorSpec
    tile: Tile
    tokens: TokenPlaces

    @property
    def bytes(self) -> int:
        """Size in bytes of keys and values."""
        return self.key.bytes + self.value.bytes


@dataclass(frozen=True, slots=True)
class RingAttention(Instruction):
    """`target` is the attention of this rank's queries to the keys of all `blocks`; that at `position` is its own.

    Blocks are in the order of their ranks, and travel in `pieces`. `spec` is that of this rank's part of the result.
    `groups` are the places of the queries along the axes before the tokens (batch and heads), `tokens` those along
    them. `log_sums` names the value that backward needs beside the result. `trained_mask` is the spec of this rank's
    part of a mask whose gradient is wanted.
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
    position: int
    rule: ScoreRule
    groups: Ranges
    tokens: TokenPlaces
    tag: int
    differentiable: bool
    trained_mask: TensorSpec | None = None

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
    def trained(self) -> tuple[str, ...]:
        """The values of which backward makes the gradients."""
        return tuple(dict.fromkeys(self.sources if self.trained_mask else self.sources[:3]))

    @property
    def rounds(self) -> tuple[KeyBlock, ...]:
        """The blocks in the order in which this rank reads them: its own one, and on to higher ranks."""
        # Every rank begins elsewhere, so that no owner has to send to all others at once:
        #
        #   rank 0   0 1 2 3
        #   rank 1   1 2 3 0
        #   rank 2   2 3 0 1
        return (*self.blocks[self.position :], *self.blocks[: self.position])

    @property
    def pieces(self) -> int:
        """The number of pieces in which each block travels: of `PIECE_BYTES` or more, and eight at most."""
        fewest = min(block.key.shape[-2] for block in self.blocks)
        return max(1, min(_MOST_PIECES, max(block.bytes for block in self.blocks) // PIECE_BYTES, fewest))

    @property
    def is_fused(self) -> bool:
        """Whether a kernel of PyTorch computes each block, where there is one for the device."""
        own = self.blocks[self.position]
        return can_fuse(self.rule, self.mask is not None, own.key.shape[-1], own.value.shape[-1])

    @property
    def local_ops(self) -> tuple[LocalOp, ...]:
        """The attention to all keys, as if they were here: what the rank computes in all rounds together."""
        # Axes before the tokens as the runner passes them on, and as many heads as queries have, if several share one.
        count, first, heads = sum(block.key.shape[-2] for block in self.blocks), self.blocks[0], self.spec.shape[:-2]
        before = math.prod(heads[:-1]), heads[-1] if heads else 1
        shapes = [(self.spec.shape[-2], first.key), (count, first.key), (count, first.value)]
        tensors = [replace(spec, shape=(*before, tokens, spec.shape[-1])) for tokens, spec in shapes]
        if self.is_fused:
            return (LocalOp(self.target, "aten.scaled_dot_product_attention.default", tuple(tensors)),)
        # Whatever the mask and the order are: they cost little beside the scores, unlike dropout.
        rest = None, 0, self.rule, self.groups, self.tokens
        return (LocalOp(self.target, "tile.attention", (*tensors, *rest)),)

    def get_effects(self, phase: Phase) -> Effects:
        """Return what the ring does in a phase: backward fetches the blocks again, and returns their gradients."""
        forward = phase is Phase.FORWARD
        own, *others = self.rounds
        sends = [
            MessageSpec(to.rank, size, Move(own.rank, to.rank, own.tile)) for to in others for size in self._cut(own)
        ]
        receives = [
            MessageSpec(block.rank, size, Move(block.rank, own.rank, block.tile))
            for block in others
            for size in self._cut(block)
        ]
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
        return Effects(tuple(specs), self.trained, {}, messages, temporary=temporary)

    def _cut(self, block: KeyBlock) -> list[int]:
        """Return the bytes of each piece of a block."""
        tokens = block.key.shape[-2]
        return [block.bytes // tokens * len(span) for span in split_axis(tokens, self.pieces)]

    def _count_temporary_bytes(self, forward: bool) -> int:
        """Return the bytes of blocks on their way, of sums, and of chunks of scores, or what a kernel has made."""
        own, wide, item = self.blocks[self.position], self.spec.sums.item_bytes, self.spec.item_bytes
        largest, arriving = max(max(self._cut(block)) for block in self.blocks), min(2, len(self.blocks) - 1)
        rows, keys = self.spec.numel // self.spec.shape[-1], max(block.key.shape[-2] for block in self.blocks)
        chunk = min(count_chunk_scores(max(block.key.numel + block.value.numel for block in self.blocks)), rows * keys)
        drawn = 3 * 8 * chunk if self.rule.dropout else 0  # random numbers are made of integers of 64 bits
        # Of heads that share keys, each has a copy of a piece, and backward gradients for it.
        shared = math.prod(self.spec.shape[:-2]) // math.prod(own.key.shape[:-2])
        copies = shared * largest if shared > 1 else 0
        if forward:
            working = self.spec.numel * item if self.is_fused else chunk * wide + drawn
            return arriving * largest + copies + self.spec.numel * wide + working
        # Gradients of a piece: as computed, and packed; those of the one before, on their way back. Of the own block:
        # the sum of its gradients, and those of a piece that arrive.
        blocks = arriving + 2 + min(1, len(self.blocks) - 2)
        mask = self.trained_mask.numel * wide if self.trained_mask else 0
        sums = rows * (own.key.shape[-1] + 1) * wide + mask
        working = rows * own.key.shape[-1] * item if self.is_fused else chunk * wide + max(chunk * wide, drawn)
        return blocks * largest + 2 * copies + own.bytes + max(self._cut(own)) + sums + working
