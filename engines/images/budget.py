"""Limit on the memory of one read, checked before allocation, since a file's header cannot be trusted."""

from __future__ import annotations

from pathlib import Path

from engines.comm.cgroup_limits import get_memory_bytes
from engines.errors import ImageError
from engines.formatting import format_bytes

__all__ = ["check_budget"]

# A file's header cannot be trusted, so that the memory of a read is limited by the bytes that the file really has.
ANY_FILE_BYTES = 2 << 30  # for a file of any size: a mask of 30,000 x 30,000 px compresses to a thousandth
PER_BYTE = 128  # per byte of the file: highly compressed photographs take a hundred times their bytes
SMALL_BYTES = 64 << 20  # smaller reads are not checked


def check_budget(path: Path, wanted_bytes: int, what: str, mend: str) -> None:
    """Raise ImageError if a read would take too much memory for a file of this size, or for the free memory.

    The limit is 2 GB or 128 times the file's bytes, whichever is more, but never more than half of the free memory,
    since other ranks read at the same time. In the message, `what` says what takes the memory, and `mend` how to avoid
    it.
    """
    # One limit stops a small file that claims to be huge (a decompression bomb), the other an honest file that is too
    # large for this host. The message names the one that was hit.
    if wanted_bytes <= SMALL_BYTES:
        return
    there = path.stat().st_size
    right, free = max(ANY_FILE_BYTES, PER_BYTE * there), _get_free_bytes() // 2
    if wanted_bytes <= min(right, free):
        return
    most = (
        f"{format_bytes(right)} are the most for a file of {format_bytes(there)}"
        if right < free
        else f"{format_bytes(free)} are the most here, half of what is free"
    )
    raise ImageError(f"{path}: {what}, which takes {format_bytes(wanted_bytes)} of memory, and {most}. {mend}")


def _get_free_bytes() -> int:
    """Return the free memory of the host, or the limit of this process's cgroup if that is less."""
    import psutil  # imported here: a host that only checks its GPU need not have it

    return min(int(psutil.virtual_memory().available), get_memory_bytes())
