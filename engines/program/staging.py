"""Which memory the messages of an exchange travel through: kept between steps, fresh, or the tensors' own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from engines.program.instructions import Exchange
from engines.spatial.moves import Move
from engines.spatial.tiles import Tile

__all__ = [
    "ALIGNED_BYTES",
    "compute_arena_bytes",
    "count_staged_bytes",
    "is_all_sent",
    "is_persistent",
    "is_tile_contiguous",
]

_KEPT_BYTES = 1 << 24  # more than this is not held between steps: time goes into moving it, not into preparing
ALIGNED_BYTES = 64


def compute_staging_bytes(exchange: Exchange) -> int:
    """Memory for all messages of an exchange on one rank."""
    each = (exchange.compute_bytes([move]) for move in (*exchange.sends, *exchange.receives))
    return sum(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in each)


def is_persistent(exchange: Exchange) -> bool:
    """Whether its messages have a place between steps. What goes one way only does not: nobody waits until it left."""
    return bool(exchange.sends and exchange.receives) and compute_staging_bytes(exchange) <= _KEPT_BYTES


def compute_arena_bytes(exchanges: Iterable[Exchange]) -> int:
    """Of the place that those that are kept share: one at a time is under way."""
    return max(map(compute_staging_bytes, filter(is_persistent, exchanges)), default=0)


def is_all_sent(exchange: Exchange) -> bool:
    """Whether each pixel that this rank holds goes to exactly one other rank, and none stays."""
    if not exchange.own or (exchange.window and exchange.own & exchange.window):
        return False
    apart = not any(one.tile & other.tile for one, other in combinations(exchange.sends, 2))
    return apart and exchange.compute_bytes(exchange.sends) == exchange.compute_bytes([Move(0, 0, exchange.own)])


def is_tile_contiguous(exchange: Exchange, tile: Tile, frame: Tile) -> bool:
    """Whether the pixels of `tile` follow each other in a tensor that holds those of `frame`, channels last."""
    part, whole = (_to_memory_order(exchange.compute_shape(each)) for each in (tile, frame))
    cut = [index for index, (here, all_here) in enumerate(zip(part, whole, strict=True)) if here < all_here]
    return all(size == 1 for size in part[: max(cut, default=0)])


def _to_memory_order(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else tuple(shape)


def count_staged_bytes(exchange: Exchange, forward: bool) -> tuple[int, int]:
    """Bytes that are copied into messages, and out of messages: all but what goes from tensor to tensor."""
    lent = _count_copied_bytes(exchange, exchange.sends, exchange.own)
    borrowed = _count_copied_bytes(exchange, exchange.receives, exchange.window)
    if forward:
        return lent, borrowed
    return borrowed, lent if is_all_sent(exchange) else exchange.compute_bytes(exchange.sends)


def _count_copied_bytes(exchange: Exchange, ends: Sequence[Move], frame: Tile | None) -> int:
    if frame is None or is_persistent(exchange):
        return exchange.compute_bytes(ends)
    return exchange.compute_bytes(move for move in ends if not is_tile_contiguous(exchange, move.tile, frame))
