"""How long this thread has been held up: it had nothing to do until a message came."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engines.status_board import get_status_board, set_status_board

__all__ = ["get_wait_cpu_s", "get_wait_s", "measure_suspension", "measure_wait"]


class _WaitClock(threading.local):
    """Each rank that is a thread has its own, and so has a thread that reads images."""

    seconds = 0.0
    processor_s = 0.0


_held = _WaitClock()


@contextmanager
def measure_wait() -> Iterator[None]:
    """What passes within it is waiting. Only for where nothing had come yet: messages that are there cost nothing.

    >>> before_s = get_wait_s()
    >>> with measure_wait():
    ...     time.sleep(0.01)
    >>> 0.01 <= get_wait_s() - before_s < 1
    True
    """
    board, start_s, processor_s = get_status_board(), time.perf_counter(), time.thread_time()
    board.report_waiting(True)
    try:
        yield
    finally:
        board.report_waiting(False)
        _held.seconds += time.perf_counter() - start_s
        _held.processor_s += time.thread_time() - processor_s


@contextmanager
def measure_suspension() -> Iterator[None]:
    """As `waited`, where other ranks use this thread meanwhile: what they write of themselves is none of this one's."""
    board, start_s, processor_s = get_status_board(), time.perf_counter(), _held.processor_s
    held_s = _held.seconds
    board.report_waiting(True)
    try:
        yield
    finally:
        set_status_board(board)
        board.report_waiting(False)
        _held.seconds, _held.processor_s = held_s + time.perf_counter() - start_s, processor_s


def get_wait_s() -> float:
    """Of this thread, since it began: the travel of a message that it waits for is part of it."""
    return _held.seconds


def get_wait_cpu_s() -> float:
    """The processor's time of this thread that went into waiting: looking, and fetching what came in the end."""
    return _held.processor_s
