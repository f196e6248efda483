"""Output of ranks: lines that they print, warn and log, limited to what a page can take, and sent to the right rank."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, TextIO

_AT_ONCE, _PER_S = 20_000, 5_000  # characters that may come in a burst, and per second after it
_EACH, _LONGEST = 100, 4_000  # characters that each line costs besides its own, and the most that are shown of it
_RESERVE, _RENEWALS = 2_000, 4  # characters for a call after a flood, and how often at once; once a second after that
_SAY_S = 1.0  # seconds between two notes on dropped lines


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line of output. `stream` is `stdout` or `stderr`."""

    stream: str
    text: str


class RateLimiter:
    """A token bucket for lines: it allows a burst, then a rate per second, and counts dropped lines.

    `times` multiplies the burst, the rate and the reserve of a new call.

    >>> meter = RateLimiter(clock=lambda: 0.0)
    >>> sum(meter.allow("0123456789") for _ in range(1_000)), meter.report_dropped()
    (181, '... 819 lines more were left out: more than a page can show.')
    """

    def __init__(self, times: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._per_s, self._reserve = float(times * _AT_ONCE), times * _PER_S, float(times * _RESERVE)
        self._clock, self._renewals, self._renewed_s = clock, float(_RENEWALS), clock()
        self._room, self._at_s, self._left_out, self._is_full = self._most, clock(), 0, False
        self._noted_s = float("-inf")

    def allow(self, text: str) -> bool:
        """Return whether there is room for one more line, and count the line."""
        now_s = self._clock()
        # A token bucket: room grows by `_per_s` characters each second up to `_most`, and each line takes its share of
        # it.
        self._room = min(self._most, self._room + (now_s - self._at_s) * self._per_s)
        self._at_s, cost = now_s, len(text) + _EACH
        # Hysteresis: after a flood, wait until half of the room is free. Otherwise every second line would be a note.
        self._is_full = cost > self._room or (self._is_full and 2 * self._room < self._most)
        passes = not self._is_full
        self._room -= passes * cost
        self._left_out += not passes
        return passes

    def begin_call(self) -> None:
        """Let a new call print at least some lines, although calls before it have used up the room."""
        # A second bucket counts these reserves: a loop of many short calls that print must not flood the page either.
        now_s = self._clock()
        self._renewals = min(_RENEWALS, self._renewals + now_s - self._renewed_s)
        self._renewed_s = now_s
        if (self._is_full or self._room < self._reserve) and self._renewals >= 1:
            self._renewals -= 1
            self._room, self._is_full = max(self._room, self._reserve), False

    def report_dropped(self, at_once: bool = False) -> str:
        """Return a note on the lines dropped since the last note; empty if there are none.

        The note is also empty within a second after the last one, unless `at_once`.
        """
        if not at_once and self._clock() - self._noted_s < _SAY_S:
            return ""
        count, self._left_out = self._left_out, 0
        self._noted_s = self._clock() if count else self._noted_s
        lines = "line more was" if count == 1 else "lines more were"
        return f"... {count:,} {lines} left out: more than a page can show." if count else ""


class LineBuffer:
    """The output of one rank. `emit` receives each complete line, and an incomplete one when `end` is called.

    `flush` sends the emitted lines at once. Lines above the rate limit are counted, and reported with the next line
    that passes.
    """

    def __init__(self, emit: Callable[[OutputLine], None], flush: Callable[[], None] = lambda: None) -> None:
        self._emit, self.flush, self._meter, self._lock = emit, flush, RateLimiter(), RLock()
        self._begun, self._more = {"stdout": "", "stderr": ""}, {"stdout": 0, "stderr": 0}
        self.emitted = 0

    def write(self, stream: str, text: str) -> None:
        """Write any part of a text. A carriage return restarts its line, as in a progress bar."""
        # Prints arrive in pieces, and a rank's threads may print at once:
        #
        #     "loss 0.1"     " ok\nstep"                 " 2\rstep 3"
        #     kept           one line; "step" is kept    "step 3" is kept, since \r starts the line anew
        with self._lock:
            *lines, begun = (self._begun[stream] + text).split("\n")
            for line in lines:
                self._end_line(stream, line)
            anew = begun.rfind("\r", 0, -1) + 1
            # A line without an end must not grow without bound: only its start is kept, and the length of the rest.
            self._more[stream] = (0 if anew else self._more[stream]) + max(0, len(begun) - anew - _LONGEST)
            self._begun[stream] = begun[anew : anew + _LONGEST]

    def end(self) -> None:
        """Emit the incomplete lines at the end of a call."""
        with self._lock:
            for stream, begun in self._begun.items():
                self._begun[stream] = ""
                if begun.strip():
                    self._end_line(stream, begun.strip("\r"))
                self._more[stream] = 0
            self._emit_note(at_once=True)
            self._meter.begin_call()  # the next one

    def _end_line(self, stream: str, line: str) -> None:
        more, self._more[stream] = self._more[stream], 0
        _, anew, text = line.rstrip("\r").rpartition("\r")
        # `more` characters of the line were not kept; they were overwritten if a carriage return followed.
        if more := (0 if anew else more) + max(0, len(text) - _LONGEST):
            text = f"{text[:_LONGEST]} ... ({more:,} characters more)"
        if self._meter.allow(text):
            self._emit_note()
            self._emit_counted(OutputLine(stream, text))

    def _emit_note(self, at_once: bool = False) -> None:
        if note := self._meter.report_dropped(at_once):
            self._emit_counted(OutputLine("stderr", note))

    def _emit_counted(self, line: OutputLine) -> None:
        self.emitted += 1
        self._emit(line)


class RankStream(io.TextIOBase):
    """A replacement of `sys.stdout` or `sys.stderr`: ranks write to their LineBuffers, other threads to the old stream.

    `whose()` returns the output of the rank that runs in this thread, or None.
    """

    def __init__(self, name: str, before: TextIO, whose: Callable[[], LineBuffer | None]) -> None:
        self._name, self._before, self._whose = name, before, whose

    def write(self, text: str) -> int:
        """Write a part of a text to the rank's output, or to the old stream."""
        if (output := self._whose()) is None:
            return self._before.write(text)
        output.write(self._name, text)
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def flush(self) -> None:
        """Flush the rank's output, or the old stream."""
        output = self._whose()
        (self._before if output is None else output).flush()

    def isatty(self) -> bool:
        """Return whether the old stream is a terminal; False for a rank's output."""
        return self._whose() is None and self._before.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the old stream."""
        return self._before.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the old stream."""
        return self._before.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._before, name)


# The redirection of the process's streams is in place while it has users.
_redirection = RLock()
_users: list[Callable[[], LineBuffer | None]] = []
_redirected: list[tuple[str, TextIO, RankStream]] = []


@contextmanager
def redirect_streams(whose: Callable[[], LineBuffer | None]) -> Iterator[None]:
    """Within the context, redirect the streams, and log handlers on them, to the outputs of threads that are ranks."""
    with _redirection:
        _users.append(whose)
        if len(_users) == 1:
            for name in ("stdout", "stderr"):
                before = getattr(sys, name)
                _redirected.append((name, before, RankStream(name, before, whose)))
                setattr(sys, name, _redirected[-1][2])
            # `logging.StreamHandler` holds the stream itself: replacing `sys.stderr` alone would miss all log lines.
            _redirect_handlers((before, mine) for _, before, mine in _redirected)
    try:
        yield
    finally:
        with _redirection:
            _users.remove(whose)
            if not _users:
                for name, before, mine in _redirected:
                    if getattr(sys, name) is mine:  # otherwise another redirection has replaced it
                        setattr(sys, name, before)
                _redirect_handlers((mine, before) for _, before, mine in _redirected)
                _redirected.clear()


def _redirect_handlers(instead: Iterable[tuple[Any, Any]]) -> None:
    """Replace the streams of log handlers, which keep the stream that was current when they were made."""
    instead = list(instead)
    for logger in (logging.root, *list(logging.root.manager.loggerDict.values())):
        for handler in getattr(logger, "handlers", ()):  # a name between two loggers has none
            for before, mine in instead:
                if getattr(handler, "stream", None) is before:
                    handler.stream = mine
