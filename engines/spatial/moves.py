"""Moves: rectangles that one rank sends to another. Halos, gathers, scatters and repartitions all consist of moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engines.spatial.tiles import Tile

__all__ = ["Move", "compute_moves"]


@dataclass(frozen=True, slots=True)
class Move:
    """A transfer of the pixels of `tile` from rank `source` to rank `target`."""

    source: int
    target: int
    tile: Tile


def compute_moves(owned: Mapping[int, Tile], wanted: Mapping[int, Tile]) -> tuple[Move, ...]:
    """Return every transfer that fills each rank's `wanted` tile from the `owned` tiles, its own pixels included.

    The owned tiles do not overlap, so each wanted pixel inside the image arrives exactly once.

    >>> from engines.spatial.tiles import Span
    >>> left, right = (Tile(Span(0, 4), cols) for cols in (Span(0, 4), Span(4, 8)))
    >>> [m.source for m in compute_moves({0: left, 1: right}, {0: Tile(Span(0, 4), Span(0, 5))})]
    [0, 1]
    """
    # Four ranks own a quarter each. Rank 0 wants its own and a halo of one pixel, marked by the numbers of the owners:
    #
    #     0 0 0 | 1 . .
    #     0 0 0 | 1 . .
    #     0 0 0 | 1 . .        0 -> 0 its own pixels, 1 -> 0 a column, 2 -> 0 a row, 3 -> 0 the corner
    #     ------+------
    #     2 2 2 | 3 . .
    #     . . . | . . .
    return tuple(
        Move(source, target, overlap)
        for target, want in wanted.items()
        for source, own in owned.items()
        if (overlap := want & own)
    )
