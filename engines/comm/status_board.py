"""What a rank does, on a board in memory that outlives it, so that others can report it; and how long it has waited."""

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
    from mpi4dl_nb.engines.comm.output import LineBuffer

BOARD = "MPI4DL_NB_BOARD"
"""The environment variable with the descriptor of the open file on which a rank's process writes its status."""

_HEAD = Struct("<dqHB")  # start time, step number, length of the text, whether the rank waits
_SIZE = 512


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank is doing, since when by its host's `time.monotonic()`, and whether it waits for a message.

    `step` is 0 outside of training steps.
    """

    text: str
    since_s: float
    step: int = 0
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.text}, step {self.step}" if self.step else self.text


class StatusBoard:
    """The status of one rank, written by the rank and readable by other processes and threads at any time.

    `output` collects what the rank prints, if output is assigned by thread.

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
        """Map an open file, which is extended if it is too small."""
        if os.fstat(file).st_size < _SIZE:
            os.truncate(file, _SIZE)
        return cls(mmap.mmap(file, _SIZE))

    @classmethod
    def from_environment(cls) -> StatusBoard:
        """Map the file that the parent process has opened, or make a board in memory if there is none."""
        file = os.environ.get(BOARD)
        return cls() if file is None else cls.from_file(int(file))

    def report(self, text: bytes, step: int = 0) -> None:
        """Set the rank's current work; an empty text means that it is idle."""
        # The memory, which the supervisor maps as well, so that it can be read after the rank's death:
        #
        #     0         8      16            18      19               512
        #     | since_s | step | text length | waits | text           |
        text = text[: _SIZE - _HEAD.size]
        self._length, self._step = len(text), step
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        # The header last, so that a reader never combines the new length with the old text.
        _HEAD.pack_into(self._memory, 0, time.monotonic(), step, len(text), False)

    def report_waiting(self, waits: bool) -> None:
        """Set whether the rank waits for a message."""
        # Called before and after each wait: the text stays, only the header is written.
        _HEAD.pack_into(self._memory, 0, time.monotonic(), self._step, self._length, waits)

    @property
    def since_s(self) -> float:
        """The time of the last change of status, including that to idle."""
        return float(_HEAD.unpack_from(self._memory, 0)[0])

    def read(self) -> RankStatus | None:
        """Return the status, or None if the rank is idle."""
        since_s, step, length, waits = _HEAD.unpack_from(self._memory, 0)
        text = bytes(self._memory[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
        return RankStatus(text, since_s, step, bool(waits)) if length else None


class _ThreadState(threading.local):
    """The board and the waiting times of each thread: ranks may be threads, and one that reads images has its own."""

    def __init__(self) -> None:
        self.board, self.wait_s, self.wait_cpu_s = StatusBoard(), 0.0, 0.0


_here = _ThreadState()


def get_status_board() -> StatusBoard:
    """Return the board of the rank that runs in this thread."""
    return _here.board


def set_status_board(board: StatusBoard) -> None:
    """Make `board` the status board of this thread."""
    _here.board = board


@contextmanager
def report_working(board: StatusBoard, text: str) -> Iterator[None]:
    """Within the context, make `board` this thread's board, with status `text`; afterwards report the rank as idle."""
    set_status_board(board)
    board.report(text.encode())
    try:
        yield
    finally:
        board.report(b"")


# How long this thread has been blocked, with nothing to do until a message arrived.


@contextmanager
def measure_wait(suspended: bool = False) -> Iterator[None]:
    """Count the time within the context as waiting. Use only if nothing has arrived yet: arrived messages cost nothing.

    `suspended`: other ranks use this thread meanwhile. What they record is not added to this rank's times.

    >>> before_s = get_wait_s()
    >>> with measure_wait():
    ...     time.sleep(0.01)
    >>> 0.01 <= get_wait_s() - before_s < 1
    True
    """
    # Other ranks add to the counters of this thread, and set their own status boards: both are put back at the end.
    board, wait_s, wait_cpu_s = _here.board, _here.wait_s, _here.wait_cpu_s
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    board.report_waiting(True)
    try:
        yield
    finally:
        set_status_board(board)
        board.report_waiting(False)
        _here.wait_s = wait_s + time.perf_counter() - start_s
        _here.wait_cpu_s = wait_cpu_s + (0.0 if suspended else time.thread_time() - start_cpu_s)


def get_wait_s() -> float:
    """Return the seconds that this thread has waited since it began, transfer of the awaited messages included."""
    return _here.wait_s


def get_wait_cpu_s() -> float:
    """Return the CPU seconds that this thread spent waiting: polling, and fetching what arrived."""
    return _here.wait_cpu_s
