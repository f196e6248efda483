"""Write one checkpoint: all of its files, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from engines.errors import CheckpointError
from engines.graph.model_graph import TensorSpec
from engines.train.checkpoint_files import TensorFile, serialise_manifest
from engines.train.checkpoint_folder import (
    MANIFEST,
    check_space,
    create_draft,
    describe_remedy,
    get_free_bytes,
    lock_folder,
    make_space_error,
    prune,
    publish_draft,
)

__all__ = ["CheckpointWriter", "check_writable"]

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)  # another folder would not help
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointWriter:
    """A checkpoint being written into `folder`. Raises CheckpointError if `needed_bytes` are not free.

    Errors in `begin` and `add` are kept and raised by `finish`, because the ranks that send tensors wait for no reply.
    """

    def __init__(self, folder: Path, needed_bytes: int) -> None:
        self.folder, self.needed_bytes = folder, needed_bytes
        self.written: dict[str, dict[str, int]] = {}
        self._failure: OSError | None = None
        self._file: TensorFile | None = None
        self._path: Path | None = None
        self._lock = ExitStack()
        try:
            self._lock.enter_context(lock_folder(folder))
            self._path = create_draft(folder)
            check_space(folder, needed_bytes)
        except OSError as error:
            self.discard()
            raise self._make_error(error) from error
        except CheckpointError:
            self.discard()
            raise

    def begin(self, name: str, specs: Mapping[str, TensorSpec]) -> None:
        """Start the next file."""
        self._try(lambda: self._open_file(name, specs))

    def _open_file(self, name: str, specs: Mapping[str, TensorSpec]) -> None:
        self._file = TensorFile(self._path / name, specs)

    def add(self, tensor: Tensor) -> None:
        """Append the next tensor to the file."""
        self._try(lambda: self._file.add(tensor))

    def end(self, name: str) -> None:
        """Complete the file."""
        self._try(lambda: self._close_file(name))

    def _close_file(self, name: str) -> None:
        self._file.close()
        self.written[name] = {"bytes": self._file.bytes, "crc32": self._file.crc32}

    def _try(self, work: Callable[[], None]) -> None:
        # After an error, later calls do nothing, but the caller goes on receiving: a rank whose tensor nobody received
        # would block in its send.
        if self._failure is None:
            try:
                work()
            except OSError as error:
                self._failure = error

    def finish(self, manifest: Mapping[str, Any], keep: int) -> Path:
        """Publish the checkpoint on disk and remove all but the last `keep`. Raises CheckpointError."""
        try:
            if self._failure:
                raise self._failure
            with (self._path / MANIFEST).open("x") as file:
                file.write(serialise_manifest(manifest))
                file.flush()
                os.fsync(file.fileno())
            found = publish_draft(self._path, manifest["step"])
            self._path = None  # it is no draft any more, so `discard` must not remove it
            prune(self.folder, keep)  # last: until the new checkpoint is on disk, no old one goes
            return found
        except OSError as error:
            self.discard()
            raise self._make_error(error) from error

    def discard(self) -> None:
        """Remove unfinished files and release the lock. A finished checkpoint stays."""
        if self._file:
            with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
                self._file.close(complete=False)
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)
        self._path = self._file = None
        self._lock.close()

    def _make_error(self, error: OSError) -> CheckpointError:
        if error.errno in _FULL:
            return make_space_error(self.folder, self.needed_bytes, get_free_bytes(self.folder), error.strerror)
        mend = describe_remedy(error.errno) if error.errno in _PASSING else "Name a folder that this user may write to."
        return CheckpointError(
            f"{self.folder}: no checkpoint can be written here: {error.strerror or error}. Those that are there are as "
            f"they were. {mend}"
        )


def check_writable(folder: Path) -> None:
    """Try to create `folder` and a draft in it, before hours of training depend on that. Raises CheckpointError."""
    CheckpointWriter(folder, needed_bytes=1).discard()
