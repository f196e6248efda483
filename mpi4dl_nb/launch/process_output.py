"""The output of a cluster's processes, of which only the end is kept, and of its ranks, which a notebook prints."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from mpi4dl_nb.engines.comm.output import OutputLine, RateLimiter
from mpi4dl_nb.engines.server.rank_server import SPOKEN
from mpi4dl_nb.launch.reaper_process import is_running

if TYPE_CHECKING:
    from ipyparallel.cluster.launcher import LocalProcessLauncher as _Launcher
else:
    _Launcher = object  # whatever the mixin is mixed with

_KEPT_BYTES = 1 << 16
_PART_BYTES = 1 << 16
_LAST_S = 0.5  # an ended process's last output is in the pipe, and read in this time
_CODE_S = 5.0  # an ended process's exit code is fetched in this time


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


class CaptureMixin(_Launcher):
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

    def poll(self) -> Any:
        """Return the exit code of the process; None while it is running."""
        if is_running(self.process):
            return None
        # A thread of ipyparallel fetches the code. The kernel gives it out once: who asks in between gets none.
        self._wait_thread.join(_CODE_S)
        return super().poll()

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


def begin_in_thread(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine in a thread of its own: one that blocks, and may be abandoned, must not block the loop."""
    future: Future[Any] = Future()
    Thread(target=settle, args=(future, lambda: asyncio.run(work)), name="mpi4dl_nb connecting", daemon=True).start()
    return future


def settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do some work, and give the future its result or its error."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


# Output of the ranks: the client keeps that of each call, and it is printed with the rank before each line.


_CALLS = 3  # threads of a rank may print after their call, while the next ones run


# The client keeps the output of each call as one growing text per stream, under the id of the call's message:
#
#     metadata[id]["stdout"]    "SPOKEN{json of a line}\n" "output of a C library\n" "SPOKEN{json" ...
#                               └── read before ──────┘ └── new, whole lines ────┘ └── later
#
# Lines of Python code carry SPOKEN and their stream; all else was written by libraries to the process's own output.


class _CallOutput:
    """The output of one call, which the client stores under the call's id and extends as more arrives.

    Once a call is over, the client drops this text and starts a new one if more arrives.
    """

    def __init__(self, kept: Mapping[str, Mapping[str, Any]], number: str) -> None:
        self._kept, self._number, self.lines = kept, number, 0
        self._begin(kept[number])

    def _begin(self, texts: Mapping[str, Any]) -> None:
        self._texts, self._read = texts, {"stdout": 0, "stderr": 0}

    def read_new(self) -> Iterator[OutputLine]:
        yield from self._read_rest()
        now = self._kept.get(self._number, self._texts)
        if now is not self._texts:
            self._begin(now)
            yield from self._read_rest()

    def _read_rest(self) -> Iterator[OutputLine]:
        for stream, begin in self._read.items():
            text = self._texts[stream]
            end = text.rfind("\n") + 1
            if end <= begin:
                continue
            self._read[stream] = end
            for line in text[begin : end - 1].split("\n"):  # not `splitlines`, which would split at the mark
                before, mark, facts = line.partition(SPOKEN)
                if before.strip():  # of a library, which writes to the process's own output
                    yield OutputLine(stream, before)
                if mark:
                    self.lines += 1
                    try:
                        yield OutputLine(*json.loads(facts))
                    except (ValueError, TypeError):  # garbled by output of a library
                        yield OutputLine(stream, facts)


class RankOutput:
    """The output of one rank in its last calls."""

    def __init__(self) -> None:
        self._readers: deque[_CallOutput] = deque(maxlen=_CALLS)

    def add_call(self, kept: Mapping[str, Mapping[str, Any]], number: str) -> None:
        """Add a call, whose output the client stores in `kept` under `number`."""
        self._readers.append(_CallOutput(kept, number))

    def read_new(self) -> list[OutputLine]:
        """Return the lines since the last call of this method."""
        return [line for reader in self._readers for line in reader.read_new()]

    def has_pending(self, lines: int) -> bool:
        """Return whether some of the `lines` lines of the last call have not arrived yet."""
        return bool(self._readers) and self._readers[-1].lines < lines


# Print the output of ranks in the cell or terminal that started their work, with the rank before each line.


_RANKS = 4  # rate limit: that of 4 ranks with much output


class OutputPrinter:
    """Prints lines of ranks while they work: no more in total than a page can take, and none if `on` is false."""

    def __init__(self, on: bool) -> None:
        self.on, self._meter = on, RateLimiter(_RANKS)

    def begin_call(self) -> None:
        """Let a new call print some lines, although the last one has used up the room."""
        self._meter.begin_call()

    def show(self, lines: Iterable[tuple[int, OutputLine]]) -> None:
        """Print lines with their ranks. If printing fails, the lines are dropped, and work continues."""
        passed = []
        for rank, line in lines if self.on else ():
            if self._meter.allow(line.text):
                note = self._meter.report_dropped()
                passed.append((line.stream, f"{note}{chr(10) * bool(note)}[rank {rank}] {line.text}\n"))
        # Neighbours of the same stream are written at once: each write costs a message to the page.
        for stream, texts in groupby(passed, key=lambda pair: pair[0]):
            with suppress(OSError, ValueError):
                # Not `print`, which would write into a progress bar.
                tqdm.write("".join(text for _, text in texts), file=getattr(sys, stream), end="")
