"""A training that is asked to end by a signal: it ends where it can be saved."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from engines.errors import Mpi4dlError

__all__ = ["SIGNALS", "Interrupts", "StoppedError"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""`mpiexec` hands only the last one on: told to end by the others, it ends the ranks at once."""


class StoppedError(Mpi4dlError):
    """A training has ended because it was asked to, by signal `number`; where it is saved is said."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Interrupts:
    """Within it, the first signal is only noted: calling it tells which one, 0 for none. The next one is not held back.

    Only the main thread of a process hears of signals: elsewhere nothing is noted. `obeyed`: on leaving, a signal that
    is not for this work alone, as SIGINT is, but for the whole process, is sent to it again, so that it ends.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, obeyed: bool = False) -> None:
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._obeyed = obeyed
        self._number, self._since_s = 0, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> int:
        return self._number

    def is_overdue(self, within_s: float) -> bool:
        """Whether a signal has come longer ago than that."""
        return bool(self._number) and time.monotonic() - self._since_s > within_s

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._record_signal) for number in self._signals}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore_handlers()
        if self._obeyed and self._number not in (0, signal.SIGINT):
            if error is not None:
                print(error, file=sys.stderr, flush=True)  # nobody else will: most signals end the process at once
            signal.raise_signal(self._number)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not Python's

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self._number, self._since_s = number, time.monotonic()
        self._restore_handlers()
