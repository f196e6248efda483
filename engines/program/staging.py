"""The memory of an exchange's messages: kept between steps, fresh, or the tensors themselves."""

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

_KEPT_BYTES = 1 << 24  # larger messages are not kept between steps: copying dominates, not set-up
ALIGNED_BYTES = 64


def compute_staging_bytes(exchange: Exchange) -> int:
    """Return the memory in bytes for all messages of an exchange on one rank."""
    each = (exchange.compute_bytes([move]) for move in (*exchange.sends, *exchange.receives))
    return sum(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in each)


def is_persistent(exchange: Exchange) -> bool:
    """Return whether the messages are kept between steps.

    Those of a one-way exchange are not: nothing waits for its sends, so their buffers could not be reused safely.
    """
    return bool(exchange.sends and exchange.receives) and compute_staging_bytes(exchange) <= _KEPT_BYTES


def compute_arena_bytes(exchanges: Iterable[Exchange]) -> int:
    """Return the bytes of the arena shared by persistent exchanges: the largest, as only one runs at a time."""
    return max(map(compute_staging_bytes, filter(is_persistent, exchanges)), default=0)


def is_all_sent(exchange: Exchange) -> bool:
    """Return whether each pixel that this rank holds is sent to exactly one other rank, and none stays."""
    if not exchange.own or (exchange.window and exchange.own & exchange.window):
        return False
    apart = not any(one.tile & other.tile for one, other in combinations(exchange.sends, 2))
    return apart and exchange.compute_bytes(exchange.sends) == exchange.compute_bytes([Move(0, 0, exchange.own)])


def is_tile_contiguous(exchange: Exchange, tile: Tile, frame: Tile) -> bool:
    """Return whether the pixels of `tile` are contiguous in a tensor of those of `frame`, stored channels last."""
    part, whole = list(exchange.compute_shape(tile)), list(exchange.compute_shape(frame))
    if len(part) == 4:
        for shape in (part, whole):
            shape.append(shape.pop(1))  # (N, H, W, C), the order in memory
    cut = [index for index, (here, all_here) in enumerate(zip(part, whole, strict=True)) if here < all_here]
    # Contiguous if only the outermost axis longer than 1 is cut: all axes before the last cut one have length 1.
    #
    #   rows 0 and 1 of one image    (1, [2], 8, 16)   contiguous
    #   columns 0 and 1              (1, 8, [2], 16)   8 pieces
    #   rows 0 and 1 of two images   (2, [2], 8, 16)   2 pieces
    return all(size == 1 for size in part[: max(cut, default=0)])


def count_staged_bytes(exchange: Exchange, forward: bool) -> tuple[int, int]:
    """Return the bytes copied into messages and out of messages; messages directly between tensors copy none."""
    lent = _count_copied_bytes(exchange, exchange.sends, exchange.own)
    borrowed = _count_copied_bytes(exchange, exchange.receives, exchange.window)
    if forward:
        return lent, borrowed
    return borrowed, lent if is_all_sent(exchange) else exchange.compute_bytes(exchange.sends)


def _count_copied_bytes(exchange: Exchange, ends: Sequence[Move], frame: Tile | None) -> int:
    if frame is None or is_persistent(exchange):
        return exchange.compute_bytes(ends)
    return exchange.compute_bytes(move for move in ends if not is_tile_contiguous(exchange, move.tile, frame))
