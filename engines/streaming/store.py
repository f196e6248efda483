"""A file that holds the contents of tensors which nobody needs for a while."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path

import torch

from engines.errors import RankError
from engines.spoken import spoken_bytes

__all__ = ["Store"]


class Store:
    """Contents of storages in a file without a name: it is gone when the process is, however that ends.

    What is put there can be read and changed where it lies, through the system's cache of the file, whose pages it
    takes for other things when memory is short. `folder`: where it lies (None: where temporary files do). A place
    that no tensor uses any more is used again.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as the store)
        except OSError as error:
            raise RankError(f"Nothing can be stored in {self.folder}: {error}. Choose another folder.") from error
        self._free: dict[int, list[int]] = defaultdict(list)
        self._maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
        self.end_bytes = self.written_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A storage on the host with the same content, whose memory is the file. Raises RankError where it is full."""
        size = storage.nbytes()
        start = self._free[size].pop() if self._free[size] else self._new(size)
        try:
            self._write(storage.cpu(), start)
            there = mmap.mmap(self._file.fileno(), size, offset=start)
        except OSError as error:
            self._free[size].append(start)
            raise self._full(error, size) from error
        weakref.finalize(there, self._free[size].append, start).atexit = False
        stored = torch.frombuffer(there, dtype=torch.uint8).untyped_storage()
        self._maps[stored.data_ptr()] = there
        return stored

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether its memory is the file."""
        return storage.data_ptr() in self._maps

    def rest(self, storage: torch.UntypedStorage) -> None:
        """The process needs no memory for it until it is looked at again; the content stays."""
        self._maps[storage.data_ptr()].madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give the disk's space back, as soon as no tensor lies there."""
        self._file.close()

    def _new(self, size: int) -> int:
        start = self.end_bytes
        self.end_bytes += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return start

    def _write(self, host: torch.UntypedStorage, start: int) -> None:
        content, done = memoryview((ctypes.c_char * host.nbytes()).from_address(host.data_ptr())).cast("B"), 0
        while done < host.nbytes():
            done += os.pwrite(self._file.fileno(), content[done:], start + done)
        self.written_bytes += done

    def _full(self, error: OSError, size: int) -> RankError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return RankError(f"{self.folder} cannot be written: {error}.")
        return RankError(
            f"{self.folder} is full: {spoken_bytes(size)} more are to be stored beside {spoken_bytes(self.end_bytes)}. "
            "Make room, choose another folder, or use a smaller image."
        )
