"""Signals that ask a training to end: the training stops at the next point where it can be saved."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from mpi4dl_nb.engines.errors import Mpi4dlError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""`mpiexec` forwards only the last one to the ranks. On the other two it terminates the ranks at once."""


class StoppedError(Mpi4dlError):
    """A training stopped on request by signal `number`; the message says where the training was saved.

    >>> from mpi4dl_nb import Mpi4dlError, StoppedError
    >>> issubclass(StoppedError, Mpi4dlError), StoppedError("Stopped.", 2).number
    (True, 2)
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Interrupts:
    """Context in which the first signal is only recorded. Calling the object returns its number, or 0.

    A second signal is not held back: the first one restores the previous handlers. Python delivers signals to the main
    thread only, so that elsewhere nothing is recorded. `obeyed`: on exit, raise the recorded signal again so that the
    process ends, unless it is SIGINT, which concerns this work only.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, obeyed: bool = False) -> None:
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._obeyed = obeyed
        self._number, self._since_s = 0, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> int:
        return self._number

    def is_overdue(self, within_s: float) -> bool:
        """Return whether a signal arrived more than `within_s` seconds ago."""
        return bool(self._number) and time.monotonic() - self._since_s > within_s

    def __enter__(self) -> Interrupts:
        self._before = {
            signal_number: signal.signal(signal_number, self._record_signal) for signal_number in self._signals
        }
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._restore_handlers()
        if self._obeyed and self._number not in (0, signal.SIGINT):
            if error is not None:
                print(error, file=sys.stderr, flush=True)  # the signal ends the process without a traceback
            signal.raise_signal(self._number)

    def _restore_handlers(self) -> None:
        for signal_number, handler in self._before.items():
            # None: not installed from Python
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)

    def _record_signal(self, signal_number: int, frame: FrameType | None) -> None:
        # Nothing else happens in the handler: it may run between any two bytecodes of the step.
        self._number, self._since_s = signal_number, time.monotonic()
        self._restore_handlers()  # a second signal ends the process at once


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Within this context, hold back the first SIGINT; it takes effect on exit."""
    asked = Interrupts((signal.SIGINT,))
    try:
        with asked:
            yield
    finally:
        if asked():
            signal.raise_signal(signal.SIGINT)
