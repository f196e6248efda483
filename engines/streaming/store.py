"""A file that holds the contents of tensors which nobody needs for a while."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

from engines.errors import RankError
from engines.spoken import spoken_bytes

__all__ = ["Slot", "Store"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the file."""

    start: int
    size_bytes: int


class Store:
    """Contents of storages in a file without a name: it is gone when the process is, however that ends.

    `folder`: where it lies (None: where temporary files do). Slots that are free are used again.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder or tempfile.gettempdir())
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (open as long as the store)
        except OSError as error:
            raise RankError(f"Nothing can be stored in {self.folder}: {error}. Choose another folder.") from error
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self.end_bytes = self.written_bytes = 0

    def put(self, storage: torch.UntypedStorage) -> Slot:
        """Write a storage's content. Raises RankError where the disk is full."""
        size = storage.nbytes()
        slot = self._free[size].pop() if self._free[size] else self._new(size)
        host = storage.cpu()
        content, done = _memory_of(host), 0
        try:
            while done < size:
                done += os.pwrite(self._file.fileno(), content[done:], slot.start + done)
        except OSError as error:
            self.free(slot)
            raise self._full(error, size) from error
        self.written_bytes += size
        return slot

    def get(self, slot: Slot, storage: torch.UntypedStorage) -> None:
        """Read it back into a storage of that size. Raises RankError where it cannot be read."""
        host = storage if storage.device.type == "cpu" else torch.UntypedStorage(slot.size_bytes)
        content, done = _memory_of(host), 0
        while done < slot.size_bytes:
            try:
                count = os.preadv(self._file.fileno(), [content[done:]], slot.start + done)
            except OSError as error:
                raise RankError(f"What was stored in {self.folder} cannot be read: {error}.") from error
            if not count:
                raise RankError(f"What was stored in {self.folder} ends too early. Choose a folder on another disk.")
            done += count
        if host is not storage:
            storage.copy_(host)

    def free(self, slot: Slot) -> None:
        """Its content is not needed any more."""
        self._free[slot.size_bytes].append(slot)

    def close(self) -> None:
        """Give the disk's space back."""
        self._file.close()

    def _new(self, size: int) -> Slot:
        slot = Slot(self.end_bytes, size)
        self.end_bytes += size
        return slot

    def _full(self, error: OSError, size: int) -> RankError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return RankError(f"{self.folder} cannot be written: {error}.")
        return RankError(
            f"{self.folder} is full: {spoken_bytes(size)} more are to be stored beside {spoken_bytes(self.end_bytes)}. "
            "Make room, choose another folder, or use a smaller image."
        )


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    """All of a storage on the host. (What NumPy has seen could not be resized any more.)"""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
