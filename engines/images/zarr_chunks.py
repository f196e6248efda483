"""Chunks of a Zarr array that unpack to more than memory holds: noticed before they are unpacked."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from engines.errors import ImageError
from engines.images.files import damaged
from engines.regular import TEXT_BYTES, open_regular

__all__ = ["check_chunks", "check_metadata", "check_stored"]

METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
"""What describes a group or an array in a folder."""

_LARGEST_BYTES = 1 << 30  # a chunk is unpacked whole, on every rank that reads a pixel of it
_SLACK_BYTES = 1 << 16
_ZSTD = b"\x28\xb5\x2f\xfd"


def check_metadata(path: Path, within: str = "") -> None:
    """Raises ImageError where what describes a store, or a group or array `within`, is no file of its own, or huge."""
    for name in METADATA:
        file = Path(path, within, name)
        if os.path.lexists(file) and _own_bytes(path, file) > TEXT_BYTES:
            raise damaged(path, f"its {Path(within, name)} has more than {TEXT_BYTES:,} bytes")


def _own_bytes(path: Path, file: Path) -> int:
    """The size of a store's file. Raises ImageError where a link leads out of the store, or to a pipe or a device."""
    real = Path(os.path.realpath(file))
    name = os.path.relpath(file, path)
    if not real.is_relative_to(os.path.realpath(path)):
        raise ImageError(f"{path} is no store of its own: a link leads out of it, at {name}. Copy the store whole.")
    found = real.stat()
    if not stat.S_ISREG(found.st_mode):
        raise damaged(path, f"its {name} is no regular file")
    return found.st_size


def check_chunks(path: Path, array: Any) -> None:
    """Raises ImageError where an array says that its chunks are too large to be read."""
    size = math.prod(array.chunks) * array.dtype.itemsize
    if size > _LARGEST_BYTES:
        raise ImageError(
            f"{path} has chunks of {' x '.join(map(str, array.chunks))}, {size / (1 << 30):.1f} GiB each, and a chunk "
            f"is read whole: {_LARGEST_BYTES >> 30} GiB is the most. Save it in smaller chunks, such as 512 x 512."
        )


def check_stored(path: Path, array: Any, wanted: Sequence[slice | int]) -> None:
    """Raises ImageError where a chunk of the part that is `wanted` is elsewhere, or unpacks to more than is said.

    Stored, a chunk is about as large as unpacked at most; and of the usual codecs only Zstandard makes more than some
    thousand times as much of it, but says beforehand how much. For stores in folders.
    """
    root = getattr(array.store_path.store, "root", None)
    if root is None:
        return
    sides = array.shards or array.chunks
    most = math.prod(sides) * array.dtype.itemsize
    for place in product(*map(_chunks, wanted, array.shape, sides)):
        file = Path(root, array.store_path.path, array.metadata.encode_chunk_key(place))
        if not os.path.lexists(file):  # it is blank
            continue
        size = _own_bytes(path, file)
        with open_regular(file) as stored:
            holds = max(size - _SLACK_BYTES - most, _announced(stored.read(18)))
        if holds > most:
            raise damaged(path, f"its chunk {file.name} unpacks to {holds} bytes or more, where {most} are due")


def _chunks(part: slice | int, size: int, side: int) -> range:
    """Which chunks along an axis a part of it lies in."""
    start, stop = (part, part + 1) if isinstance(part, int) else part.indices(size)[:2]
    return range(start // side, -(-stop // side))


def _announced(head: bytes) -> int:
    """How many bytes a Zstandard frame says that it holds (RFC 8878, 3.1.1); 0 for others, or if it doesn't say.

    >>> _announced(b"(\\xb5/\\xfd" + bytes([0b1110_0000]) + (1 << 40).to_bytes(8, "little")) == 1 << 40
    True
    """
    if not head.startswith(_ZSTD) or len(head) < 6:
        return 0
    flags = head[4]
    size_flag, single = flags >> 6, bool(flags & 0x20)
    at = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    width = (int(single), 2, 4, 8)[size_flag]
    size = int.from_bytes(head[at : at + width], "little")
    return size + 256 if width == 2 else size
