"""Output of a cluster's processes: read as it arrives, with only the end kept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import cache
from threading import Thread
from typing import Any

__all__ = ["CaptureMixin", "ProcessOutput", "run_in_loop"]

_KEPT_BYTES = 1 << 16
_PART_BYTES = 1 << 16
_LAST_S = 0.5  # an ended process's last output is in the pipe, and read in this time


class ProcessOutput:
    """The output of a process and its descendants. `on_line` is called with each whole line, in a separate thread.

    The output goes through a pipe, since a file would grow as long as the cluster lives. `path` names the end to write
    to, and is valid until `begin`, by which time the process has opened it.
    """

    def __init__(self, on_line: Callable[[bytes], object] = bool) -> None:
        self._on_line, self._kept = on_line, b""
        self._read, self._write = os.pipe()
        self.path = f"/dev/fd/{self._write}"
        self._thread = Thread(target=self._read_lines, name="mpi4dl_nb listener", daemon=True)

    # ipyparallel's launchers take a file name for the output, so the pipe is given as one:
    #
    #     launcher (here) ── opens /dev/fd/5 ──> the process ── writes ──> pipe ── _read_lines ──> on_line(line)
    #
    # Once the process has inherited it, this side closes its own writing end: the reader then sees the end of the pipe
    # as soon as the last process of the family has ended.
    def begin(self) -> None:
        """Start reading, until no process has the pipe open for writing."""
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
                    self._on_line(line)

    @property
    def end(self) -> str:
        """The last part of the output, complete if the process has ended."""
        if self._thread.ident is not None:
            self._thread.join(_LAST_S)
        return self._kept.decode(errors="replace")


class CaptureMixin:
    """Mixin for ipyparallel launchers that captures the process's output in `written` instead of a file."""

    def __init__(self, *args: Any, on_line: Callable[[bytes], object] = bool, **kwargs: Any) -> None:
        self.written = ProcessOutput(on_line)
        super().__init__(*args, output_file=self.written.path, **kwargs)

    def start(self, *args: Any) -> Any:
        """Start the process, which inherits the pipe if it could be started."""
        try:
            return super().start(*args)
        finally:
            self.written.begin()

    def get_output(self, remove: bool = False) -> str:
        """Return the end of the output; `remove` has no effect."""
        return self.written.end


# Run ipyparallel's coroutines in a separate event loop, since that of a notebook's kernel is busy.


@cache
def _get_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of this process: a fork has a copy of its parent's loop, but not the thread that runs it."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="mpi4dl_nb launcher", daemon=True).start()
    return loop


def run_in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to completion and return its result."""
    future = asyncio.run_coroutine_threadsafe(work, _get_loop(os.getpid()))
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
