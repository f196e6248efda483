"""How much memory one read may take: asked before it is taken, since a header says whatever somebody put into it."""

from __future__ import annotations

from pathlib import Path

from engines.comm.cgroup_limits import get_memory_bytes
from engines.errors import ImageError
from engines.formatting import format_bytes

__all__ = ["check_budget"]

ANY_FILE_BYTES = 2 << 30  # whatever the file's size: a mask of 30,000 x 30,000 px, which packs into a thousandth
PER_BYTE = 128  # of the file: photographs of the highest compression take a hundred times their bytes
SMALL_BYTES = 64 << 20  # not worth asking what is free


def check_budget(path: Path, wanted_bytes: int, what: str, mend: str) -> None:
    """Raises ImageError where a read would take more memory than is right for a file of this size, or than is there.

    Right are 2 GB, or 128 times the file's bytes where these are more; and never more than half of the memory that is
    free, since other ranks read at the same time. `what` says what takes it, and `mend` how it could take less.
    """
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
    """Of the machine, or all that the group of this process may have, where that is less."""
    import psutil  # a machine that only checks its GPU need not have it

    return min(int(psutil.virtual_memory().available), get_memory_bytes())
