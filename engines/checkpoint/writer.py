"""Writes one checkpoint: all of its files, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.checkpoint.failures import how_to_mend
from engines.checkpoint.folder import MANIFEST, check_space, complete, draft, free_bytes, locked, no_room, prune
from engines.checkpoint.manifest import sealed
from engines.checkpoint.tensor_file import TensorFile
from engines.errors import CheckpointError
from engines.layer.graph import TensorSpec

__all__ = ["Writer", "check_writable"]

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # nothing that another folder would mend
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer:
    """A checkpoint under way in `folder`, of `needed_bytes`. Raises CheckpointError where there is no room for it.

    What goes wrong in `begin` and `add` is raised by `finish`: the ranks that give tensors do not wait for an answer.
    """

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        self.folder, self.needed_bytes = folder, needed_bytes
        self.written: dict[str, dict[str, int]] = {}
        self._failure: OSError | None = None
        self._file: TensorFile | None = None
        self._path: Path | None = None
        self._lock = ExitStack()
        try:
            self._lock.enter_context(locked(folder))
            self._path = draft(folder)
            check_space(folder, needed_bytes)
        except OSError as error:
            self.abandon()
            raise self._said(error) from error
        except CheckpointError:
            self.abandon()
            raise

    def begin(self, name: str, specs: Mapping[str, TensorSpec]) -> None:
        """The next file."""
        self._try(lambda: self._begin(name, specs))

    def _begin(self, name: str, specs: Mapping[str, TensorSpec]) -> None:
        self._file = TensorFile(self._path / name, specs)

    def add(self, tensor: Tensor) -> None:
        """The next tensor of the file."""
        self._try(lambda: self._file.add(tensor))

    def end(self, name: str) -> None:
        """The file is complete."""
        self._try(lambda: self._end(name))

    def _end(self, name: str) -> None:
        self._file.close()
        self.written[name] = {"bytes": self._file.bytes, "crc32": self._file.crc32}

    def _try(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error

    def finish(self, manifest: Mapping[str, Any], keep: int) -> Path:
        """The checkpoint, on the disk; of the older ones, so many are kept. Raises CheckpointError."""
        try:
            if self._failure:
                raise self._failure
            with (self._path / MANIFEST).open("x") as file:
                file.write(sealed(manifest))
                file.flush()
                os.fsync(file.fileno())
            found = complete(self._path, manifest["step"])
            self._path = None
            prune(self.folder, keep)
            return found
        except OSError as error:
            self.abandon()
            raise self._said(error) from error

    def abandon(self) -> None:
        """Leave nothing behind, whether it is finished or not."""
        if self._file:
            with suppress(OSError):  # what is still in the buffer finds no room either
                self._file.close(complete=False)
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)
        self._path = self._file = None
        self._lock.close()

    def _said(self, error: OSError) -> CheckpointError:
        if error.errno in _FULL:
            return no_room(self.folder, self.needed_bytes, free_bytes(self.folder), error.strerror)
        mend = how_to_mend(error.errno) if error.errno in _PASSING else "Name a folder that this user may write to."
        return CheckpointError(
            f"{self.folder}: no checkpoint can be written here: {error.strerror or error}. Those that are there are as "
            f"they were. {mend}"
        )


def check_writable(folder: Path) -> None:
    """Make the folder and another one in it, before hours of training depend on that. Raises CheckpointError."""
    Writer(folder, needed_bytes=1).abandon()
