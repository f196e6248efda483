"""How a sum over ranks travels, in numbers: what programs are counted and priced by, and what carries it out."""

from __future__ import annotations

__all__ = ["AHEAD", "LONG_BYTES", "PIECE_BYTES", "compute_workspace_bytes", "count_pieces", "count_sends"]

LONG_BYTES = 1 << 15
"""From here on a second round costs less than sending everything to everyone."""

PIECE_BYTES = 1 << 23
"""Of a tensor, that make one such sum: more do not stay in a processor's cache."""

AHEAD = 2
"""Pieces that travel at once."""


def count_sends(count_bytes: int, ranks: int) -> tuple[int, int]:
    """The messages that each rank sends for a sum of tensors of that size, and their bytes.

    >>> count_sends(100, 4), count_sends(1 << 20, 4), count_sends(1 << 24, 4)
    ((3, 300), (6, 1572864), (12, 25165824))
    """
    others = ranks - 1
    if count_bytes < LONG_BYTES:
        return others, others * count_bytes
    return 2 * others * count_pieces(count_bytes), 2 * others * count_bytes // ranks


def count_pieces(count_bytes: int) -> int:
    """Into how many pieces each rank's chunk of a long tensor is cut."""
    return -(-count_bytes // PIECE_BYTES)


def compute_workspace_bytes(count_bytes: int, ranks: int) -> int:
    """The memory for the others' terms of a tensor of that size on each rank: of as many pieces as travel at once.

    >>> compute_workspace_bytes(100, 4), compute_workspace_bytes(1 << 20, 4), compute_workspace_bytes(1 << 26, 2)
    (300, 786432, 8388608)
    """
    if count_bytes < LONG_BYTES:
        return (ranks - 1) * count_bytes
    count = count_pieces(count_bytes)
    return (ranks - 1) * min(count, AHEAD) * count_bytes // (ranks * count)
