"""Where a rank is: written in memory that outlives it, so that others can tell when it can't any more."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engines.output import LineBuffer

__all__ = ["BOARD", "RankStatus", "StatusBoard", "get_status_board", "report_working", "set_status_board"]

BOARD = "MPI4DL_NB_BOARD"
"""The environment variable that names the open file which a rank's process writes on."""

_HEAD = Struct("<dqHB")  # since when, which step, length of the text, whether it waits
_SIZE = 512


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank does, and since when, by its host's `time.monotonic()`. `waits`: for a message. `step` 0 is none."""

    text: str
    since_s: float
    step: int = 0
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.text}, step {self.step}" if self.step else self.text


class StatusBoard:
    """What one rank writes of itself, and another process or thread may read at any time.

    `output` takes what the rank prints, where that is known by the thread.

    >>> board = StatusBoard()
    >>> board.read() is None
    True
    >>> board.report(b"update of the weights", step=3)
    >>> str(board.read())
    'update of the weights, step 3'
    """

    def __init__(self, memory: bytearray | mmap.mmap | None = None) -> None:
        self._memory = bytearray(_SIZE) if memory is None else memory
        self._length, self._step = 0, 0
        self.output: LineBuffer | None = None

    @classmethod
    def from_file(cls, file: int) -> StatusBoard:
        """On an open file, which is made large enough."""
        if os.fstat(file).st_size < _SIZE:
            os.truncate(file, _SIZE)
        return cls(mmap.mmap(file, _SIZE))

    @classmethod
    def from_environment(cls) -> StatusBoard:
        """On the file that whoever started this process reads, if there is one."""
        file = os.environ.get(BOARD)
        return cls() if file is None else cls.from_file(int(file))

    def report(self, text: bytes, step: int = 0) -> None:
        """From now on the rank does this; nothing, where the text is empty."""
        text = text[: _SIZE - _HEAD.size]
        self._length, self._step = len(text), step
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        _HEAD.pack_into(self._memory, 0, time.monotonic(), step, len(text), False)

    def report_waiting(self, waits: bool) -> None:
        """From now on it waits for a message, or does so no more."""
        _HEAD.pack_into(self._memory, 0, time.monotonic(), self._step, self._length, waits)

    @property
    def since_s(self) -> float:
        """Since when the rank is where it is, be it that it does nothing."""
        return float(_HEAD.unpack_from(self._memory, 0)[0])

    def read(self) -> RankStatus | None:
        """None where the rank does nothing."""
        since_s, step, length, waits = _HEAD.unpack_from(self._memory, 0)
        text = bytes(self._memory[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
        return RankStatus(text, since_s, step, bool(waits)) if length else None


class _ThreadBoard(threading.local):
    """Ranks may be threads: each has a board of its own, and so has a thread that reads images."""

    def __init__(self) -> None:
        self.board = StatusBoard()


_here = _ThreadBoard()


def get_status_board() -> StatusBoard:
    """The board of the rank that this thread is."""
    return _here.board


def set_status_board(board: StatusBoard) -> None:
    """From now on this thread is the rank with that board."""
    _here.board = board


@contextmanager
def report_working(board: StatusBoard, text: str) -> Iterator[None]:
    """Within it this thread writes on `board`; first that it does `text`, in the end that it does nothing."""
    set_status_board(board)
    board.report(text.encode())
    try:
        yield
    finally:
        board.report(b"")
