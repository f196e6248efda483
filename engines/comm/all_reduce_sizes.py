"""The sizes of an all-reduce's messages, for counting and pricing programs as well as for running them."""

from __future__ import annotations

LONG_BYTES = 1 << 15
"""From this size on, a second round of messages costs less than sending the whole tensor to every rank."""

PIECE_BYTES = 1 << 23
"""Bytes of a tensor per piece of a long sum; larger pieces do not stay in a processor's cache."""

AHEAD = 2
"""Number of pieces in flight at once."""


def count_sends(tensor_bytes: int, ranks: int) -> tuple[int, int]:
    """Return the messages that each rank sends to sum tensors of that size, and their bytes, to within an element.

    >>> count_sends(100, 4), count_sends(1 << 20, 4), count_sends(1 << 24, 4)
    ((3, 300), (6, 1572864), (12, 25165824))
    """
    others = ranks - 1
    if tensor_bytes < LONG_BYTES:
        return others, others * tensor_bytes
    return 2 * others * count_pieces(tensor_bytes), 2 * others * tensor_bytes // ranks


def count_pieces(tensor_bytes: int) -> int:
    """Return the number of pieces into which each rank's chunk of a long tensor is cut."""
    return -(-tensor_bytes // PIECE_BYTES)


def compute_workspace_bytes(tensor_bytes: int, ranks: int) -> int:
    """Return each rank's memory in bytes for the other ranks' terms, of as many pieces as are in flight at once.

    >>> compute_workspace_bytes(100, 4), compute_workspace_bytes(1 << 20, 4), compute_workspace_bytes(1 << 26, 2)
    (300, 786432, 8388608)
    """
    if tensor_bytes < LONG_BYTES:
        return (ranks - 1) * tensor_bytes
    count = count_pieces(tensor_bytes)
    return (ranks - 1) * min(count, AHEAD) * tensor_bytes // (ranks * count)
