"""A file that holds the contents of tensors which nobody needs for a while."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engines.errors import RankError
from engines.formatting import format_bytes

__all__ = ["OffloadStore", "find_disk_folder"]

_CHUNK_BYTES = 256 << 20
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class _FileRegion:
    """Some bytes of the file, which begin at `start` of a chunk of it that is mapped as a whole, at `offset`."""

    chunk: mmap.mmap
    offset: int
    start: int


class OffloadStore:
    """Contents of storages in a file without a name: it is gone when the process is, however that ends.

    What is put there can be read and changed where it lies, through the system's cache of the file, whose pages it
    takes for other things when memory is short. `folder`: where it lies (None: where temporary files do, on a disk).
    A place that no tensor uses any more is used again.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or find_disk_folder())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as the store)
        except OSError as error:
            raise RankError(f"Nothing can be stored in {self.folder}: {error}. Choose another folder.") from error
        weakref.finalize(self, self._file.close).atexit = False
        self._free: dict[int, list[_FileRegion]] = defaultdict(list)
        self._rest: _FileRegion | None = None  # of the last chunk, from where on it is free
        self._used: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self._mapped_bytes = self.end_bytes = self.written_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage on the host with the same content, whose memory is the file. Raises RankError where it is full."""
        size = storage.nbytes()
        place = self._free[size].pop() if self._free[size] else self._allocate(size)
        there = np.frombuffer(place.chunk, np.uint8, size, place.start)
        weakref.finalize(there, self._free[size].append, place).atexit = False
        copy = torch.frombuffer(there, dtype=torch.uint8)
        copy.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))  # by several threads
        self.written_bytes += size
        self._used[copy.data_ptr()] = there
        return copy.untyped_storage()

    def has_storage(self, storage: torch.UntypedStorage) -> bool:
        """Whether its memory is the file."""
        return storage.data_ptr() in self._used

    def close(self) -> None:
        """Give the disk's space back, as soon as no tensor lies there."""
        self._file.close()
        self._free.clear()
        self._rest = None

    def _allocate(self, size: int) -> _FileRegion:
        """A place that the disk has given: one that it has not would end the process when it is written."""
        needed = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            if self._rest is None or self._rest.start + needed > len(self._rest.chunk):
                self._rest = self._map_chunk(max(needed, _CHUNK_BYTES))
            place = self._rest
            _reserve(self._file.fileno(), place.offset + place.start, needed)
        except OSError as error:
            raise self._make_disk_error(error, size) from error
        self._rest = replace(place, start=place.start + needed)
        self.end_bytes += needed
        return place

    def _map_chunk(self, size: int) -> _FileRegion:
        """So many bytes more of the file, which the disk has not given yet."""
        os.ftruncate(self._file.fileno(), self._mapped_bytes + size)
        chunk = mmap.mmap(self._file.fileno(), size, offset=self._mapped_bytes)
        place = _FileRegion(chunk, self._mapped_bytes, 0)
        self._mapped_bytes += size
        return place

    def _make_disk_error(self, error: OSError, size: int) -> RankError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return RankError(f"{self.folder} cannot be written: {error}. Choose another folder.")
        return RankError(
            f"{self.folder} is full: {format_bytes(size)} more are to be stored beside {format_bytes(self.end_bytes)}. "
            "Make room, choose another folder (TMPDIR), or use a smaller image."
        )


def _reserve(file: int, start: int, size: int) -> None:
    """Have the disk give so many bytes. Raises OSError where it can't."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, start, size)
    else:  # macOS
        os.pwrite(file, bytes(size), start)


def find_disk_folder() -> Path:
    """Where large temporary files may lie: on some systems the usual folder is itself in memory."""
    usual, other = Path(tempfile.gettempdir()).resolve(), Path("/var/tmp")
    try:
        import psutil  # not on every machine that has ranks
    except ImportError:
        return usual
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    kind = next((mounts[folder] for folder in (usual, *usual.parents) if folder in mounts), "")
    return other if kind in _IN_MEMORY and os.access(other, os.W_OK) else usual
