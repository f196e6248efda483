"""How long ranks may take to start, by what is seen of them meanwhile, and what is said where they take long.

A start is given up where nothing is done for it any more, or far more than a start takes. A busy machine does it
slowly: that is said, and waited for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from engines.comm.cgroup_limits import count_cores

__all__ = ["StartupMonitor", "compute_load_factor", "measure_work_s"]

_IDLE_S = 45.0  # without another rank, and without work for it; longer, the more work waits for each core
_SAY_S, _LOOK_S = 15.0, 1.0  # it is said after so long, and then each time that it has taken twice as long
_WORK_S = 3.0  # what a rank's start takes of a processor where that is not known better: most of it are imports
_TIMES = 20.0  # so many times that much, and it is no start any more
_SIGN_S = 0.05  # of a processor's time, and something was done


class StartupMonitor:
    """Of `n` ranks. `work` tells the seconds of processor time that went into it."""

    usual_s = _WORK_S
    """Of a processor, for a rank: as the last start in this process has taken."""

    def __init__(self, n: int, work: Callable[[], float]) -> None:
        self.n, self._work = n, work
        self._began_s = self._at_s = time.monotonic()
        self._count, self._since_s = 0, self._began_s
        self._done_s = self._done_before_s = 0.0
        self._sign_s, self._say_s = self._began_s, _SAY_S

    def begin_phase(self) -> None:
        """They are counted anew."""
        self._count, self._since_s, self._done_before_s = 0, time.monotonic(), self._done_s

    def update(self, count: int, what: str) -> str:
        """With `count` of them there. Why it will not become more, in words; empty where it may."""
        now_s = time.monotonic()
        if count > self._count:
            self._count, self._since_s, self._sign_s, self._done_before_s = count, now_s, now_s, self._done_s
        if now_s - self._at_s >= _LOOK_S:
            self._at_s, done_s = now_s, self._work()
            if done_s > self._done_s + _SIGN_S:
                self._done_s, self._sign_s = done_s, now_s
        self._report_delay(now_s, what)
        return self._describe_trouble(now_s, what)

    def _describe_trouble(self, now_s: float, what: str) -> str:
        silent_s, idle_s = now_s - self._since_s, now_s - self._sign_s
        if idle_s > _IDLE_S * compute_load_factor():
            return (
                f"Of {self.n} ranks only {self._count} {what}, and no other for {silent_s:.0f} s: their processes have "
                f"done nothing for {idle_s:.0f} s."
            )
        done_s = (self._done_s - self._done_before_s) / self.n
        if done_s > _TIMES * self.usual_s:
            return (
                f"Of {self.n} ranks only {self._count} {what}, and no other for {silent_s:.0f} s, in which each has "
                f"taken {done_s:.0f} s of a processor: {self.usual_s:.0f} s are usual for a start."
            )
        return ""

    def _report_delay(self, now_s: float, what: str) -> None:
        taken_s = now_s - self._began_s
        if now_s - self._since_s < _SAY_S or taken_s < self._say_s:
            return
        self._say_s = 2 * taken_s
        print(
            f"The start takes longer than usual, and goes on: {self._count} of {self.n} ranks {what} after "
            f"{taken_s:.0f} s. {self._describe_progress(now_s, taken_s)}",
            file=sys.stderr,
            flush=True,
        )

    def _describe_progress(self, now_s: float, taken_s: float) -> str:
        if (idle_s := now_s - self._sign_s) > _SAY_S / 2:
            limit_s = _IDLE_S * compute_load_factor()
            return (
                f"Their processes have done nothing for {idle_s:.0f} s; after {limit_s:.0f} s of that it is given up."
            )
        waits = os.getloadavg()[0] / count_cores()
        others = f", and {waits:.1f} programs wait for each core" if waits > 1.5 else ""
        left_s = max(self.n * self.usual_s - self._done_s, 0.0) * taken_s / max(self._done_s, 1.0)
        more = f"it may take {left_s:.0f} s more" if left_s > 5 else "it should be there soon"
        return f"The ranks have had {self._done_s:.0f} s of a processor by now{others}: {more}."

    def finish(self) -> None:
        """All are there: what this one took is what the next one will."""
        type(self).usual_s = max(1.0, self._work() / self.n)


def measure_work_s(roots: Sequence[psutil.Process]) -> float:
    """The processor time of these processes, of this machine, and of all that they have started."""
    total = 0.0
    for root in roots:
        with suppress(psutil.Error):
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.Error):
                    used = process.cpu_times()
                    total += used.user + used.system
    return total


def compute_load_factor() -> float:
    """How many times as long things take because of what waits for this machine's cores, up to eight."""
    return min(8.0, max(1.0, os.getloadavg()[0] / count_cores()))
