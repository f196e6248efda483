"""The output of a cluster's engines, as ipyparallel's client receives it."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any

from tqdm.auto import tqdm

from engines.comm.output import OutputLine, RateLimiter
from engines.comm.rank_server import SPOKEN

__all__ = ["OutputPrinter", "RankOutput"]

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
            if end > begin:
                self._read[stream] = end
                for line in text[begin : end - 1].split("\n"):  # not `splitlines`, which would split at the mark
                    yield from self._parse_line(stream, line)

    def _parse_line(self, stream: str, line: str) -> Iterator[OutputLine]:
        """Yield a line of the rank's Python code, or of a library, which writes to the process's own output."""
        before, mark, spoken = line.partition(SPOKEN)
        if before.strip():
            yield OutputLine(stream, before)
        if mark:
            self.lines += 1
            try:
                yield OutputLine(*json.loads(spoken))
            except (ValueError, TypeError):  # garbled by output of a library
                yield OutputLine(stream, spoken)


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

    def show(self, lines: Iterable[tuple[int, OutputLine]]) -> None:
        """Print lines with their ranks. If printing fails, the lines are dropped, and work continues."""
        passed = []
        for rank, line in lines if self.on else ():
            if self._meter.allow(line.text):
                note = self._meter.report_dropped()
                passed.append((line.stream, f"{note}{chr(10) * bool(note)}[rank {rank}] {line.text}\n"))
        # Neighbours of the same stream are written at once: each write costs a message to the page.
        for stream, texts in groupby(passed, key=lambda each: each[0]):
            with suppress(OSError, ValueError):
                # Not `print`, which would write into a progress bar.
                tqdm.write("".join(text for _, text in texts), file=getattr(sys, stream), end="")
