"""How long this thread has been blocked, with nothing to do until a message arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engines.comm.status_board import get_status_board, set_status_board

__all__ = ["get_wait_cpu_s", "get_wait_s", "measure_suspension", "measure_wait"]


class _WaitClock(threading.local):
    """Thread-local, so that each rank that is a thread has its own, and so has a thread that reads images."""

    seconds = 0.0
    processor_s = 0.0


_held = _WaitClock()


@contextmanager
def measure_wait() -> Iterator[None]:
    """Count the time within the context as waiting. Use only if nothing has arrived yet: arrived messages cost nothing.

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
    """As `measure_wait`, while other ranks use this thread: what they record is not added to this rank's times."""
    # The other ranks add to the counters of this thread, and set their own status boards: both are put back at the end.
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
    """Return the seconds that this thread has waited since it began, transfer of the awaited messages included."""
    return _held.seconds


def get_wait_cpu_s() -> float:
    """Return the CPU seconds that this thread spent waiting: polling, and fetching what arrived."""
    return _held.processor_s
