"""What processes of a cluster write to their output: read as it comes, and only the end of it is kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import Any

__all__ = ["CaptureMixin", "ProcessOutput"]

_KEPT_BYTES = 1 << 16
_PART_BYTES = 1 << 16
_LAST_S = 0.5  # what a process that has ended wrote last is in the pipe, and read within this time


class ProcessOutput:
    """The output of a process and of those that it starts. `told` is given each whole line, in a thread of its own.

    It is a pipe and no file, which would grow as long as the cluster lives. `path` names the end to write to, until
    `begin` is called: by then the process has it.
    """

    def __init__(self, told: Callable[[bytes], object] = bool) -> None:
        self._told, self._kept = told, b""
        self._read, self._write = os.pipe()
        self.path = f"/dev/fd/{self._write}"
        self._thread = Thread(target=self._read_lines, name="mpi4dl_nb listener", daemon=True)

    def begin(self) -> None:
        """From here on it is read, until nobody writes any more."""
        os.close(self._write)
        self._thread.start()

    def _read_lines(self) -> None:
        rest = b""
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while part := pipe.read(_PART_BYTES):
                self._kept = (self._kept + part)[-_KEPT_BYTES:]
                *lines, rest = (rest + part).split(b"\n")
                rest = rest[-_KEPT_BYTES:]
                for line in lines:
                    self._told(line)

    @property
    def end(self) -> str:
        """The last of it; all, where the process has ended."""
        if self._thread.ident is not None:
            self._thread.join(_LAST_S)
        return self._kept.decode(errors="replace")


class CaptureMixin:
    """Of a launcher of ipyparallel: what its process writes is `written`, and not in a file."""

    def __init__(self, *args: Any, told: Callable[[bytes], object] = bool, **kwargs: Any) -> None:
        self.written = ProcessOutput(told)
        super().__init__(*args, output_file=self.written.path, **kwargs)

    def start(self, *args: Any) -> Any:
        """Start the process; it has the pipe then, if it could be started."""
        try:
            return super().start(*args)
        finally:
            self.written.begin()

    def get_output(self, remove: bool = False) -> str:
        """The end of it: there is nothing to remove."""
        return self.written.end
