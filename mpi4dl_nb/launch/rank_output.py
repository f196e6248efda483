"""What the engines of a cluster have printed, as ipyparallel's client takes it in."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from engines.output import OutputLine
from engines.rank_server import SPOKEN

__all__ = ["RankOutput"]

_CALLS = 3  # what a rank's threads print after a call still counts for it, and may come during the next ones


class _CallOutput:
    """The texts of one call: those that the client keeps under its number, made longer as more comes.

    Once a call is over the client forgets them, and begins anew where more comes.
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
                for line in text[begin : end - 1].split("\n"):  # not `splitlines`, to which the mark is an end
                    yield from self._parse_line(stream, line)

    def _parse_line(self, stream: str, line: str) -> Iterator[OutputLine]:
        """A line of the rank's Python; or one of its libraries, which write to the process's own output."""
        before, mark, told = line.partition(SPOKEN)
        if before.strip():
            yield OutputLine(stream, before)
        if mark:
            self.lines += 1
            yield _decode_line(stream, told)


def _decode_line(stream: str, told: str) -> OutputLine:
    try:
        return OutputLine(*json.loads(told))
    except (ValueError, TypeError):  # a library of the rank has written into it
        return OutputLine(stream, told)


class RankOutput:
    """Of one rank: what it has printed in its last calls."""

    def __init__(self) -> None:
        self._readers: deque[_CallOutput] = deque(maxlen=_CALLS)

    def add_call(self, kept: Mapping[str, Mapping[str, Any]], number: str) -> None:
        """There is a new call: what the client has `kept` of it is under this number."""
        self._readers.append(_CallOutput(kept, number))

    def read_new(self) -> list[OutputLine]:
        """What has come since it was last asked."""
        return [line for reader in self._readers for line in reader.read_new()]

    def has_pending(self, lines: int) -> bool:
        """Whether some of so many lines of the last call have not come yet."""
        return bool(self._readers) and self._readers[-1].lines < lines
