"""The messages of a training step, counted before anything runs, and the memory in which they are staged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from engines.comm.all_reduce_sizes import count_sends
from engines.program.instructions import (
    AllReduce,
    CountLabels,
    Exchange,
    FiniteCheckAllReduce,
    Phase,
    ReduceBatchStats,
    SumGradients,
)
from engines.spatial.tiles import Move, Tile

if TYPE_CHECKING:
    from engines.program.program import Program, Step

__all__ = [
    "ALIGNED_BYTES",
    "LEAST_BYTES",
    "Traffic",
    "compute_arena_bytes",
    "count_staged_bytes",
    "count_step_traffic",
    "count_traffic",
    "is_all_sent",
    "is_persistent",
    "is_tile_contiguous",
]


# The messages that a rank sends in one training step, counted from its program before anything runs.


@dataclass(frozen=True, slots=True)
class Traffic:
    """A number of messages that a rank sends, and their total bytes."""

    messages: int
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)


def count_traffic(program: Program) -> dict[str, Traffic]:
    """Return what the rank of this program sends in a training step, forward and backward, by kind of instruction.

    Kinds are `halo`, `stage` (from one stage to the next) and `all-reduce`, as in a timeline.
    """
    found: dict[str, Traffic] = {}
    for step in program.steps:
        kind = step.instruction.kind
        for part in count_step_traffic(step):
            found[kind] = found.get(kind, Traffic(0, 0)) + part
    return found


def count_step_traffic(step: Step) -> Iterable[Traffic]:
    """Yield what one step sends, if anything."""
    match step.instruction:
        case Exchange(begins=True) as exchange:
            moves = exchange.sends if step.phase is Phase.FORWARD else exchange.receives
            yield Traffic(len(moves), exchange.compute_bytes(moves))
        case CountLabels(program=program, bytes=count_bytes, group=group):
            yield from count_traffic(program).values()
            yield Traffic(*count_sends(count_bytes, len(group)))
        case SumGradients() if step.phase is Phase.UPDATE:
            return  # counted where it starts
        case AllReduce() | SumGradients() | ReduceBatchStats() | FiniteCheckAllReduce() as total:
            yield Traffic(*count_sends(total.bytes, len(total.group)))


# The memory of an exchange's messages: kept between steps, fresh, or the tensors themselves.


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


# The size from which on a tensor is offloaded.


LEAST_BYTES = 1 << 14
