"""Work beside the notebook: what takes seconds keeps no page waiting, and what is asked for last is what counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Condition, Thread

__all__ = ["LatestOnly"]

IsAsked = Callable[[], bool]


class LatestOnly:
    """Does one thing at a time in a thread; a newer one takes the place of an older one, which ends when it looks.

    Python does not end before the threads do: torch aborts the process where it is cut off in the middle.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._asked = self._done = 0

    def submit(self, work: Callable[[IsAsked], None]) -> None:
        """`work(is_asked)` in a thread; it is to look at `is_asked()` before it shows anything, and now and then."""
        number = self.cancel()

        def run() -> None:
            try:
                work(lambda: number == self._asked)
            finally:
                with self._changed:
                    self._done = max(self._done, number)
                    self._changed.notify_all()

        Thread(target=run, name="mpi4dl_nb later").start()

    def cancel(self) -> int:
        """What is under way is not asked for any more; the number of what comes next."""
        with self._changed:
            self._asked += 1
            return self._asked

    def mark_done(self) -> None:
        """Nothing is asked for: who waits need not wait."""
        with self._changed:
            self._done = self.cancel()
            self._changed.notify_all()

    def pause(self, seconds: float, is_asked: IsAsked) -> bool:
        """Wait so long, unless something newer is asked for; whether it was not."""
        end_s = time.monotonic() + seconds
        while is_asked() and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(0.02, left_s))
        return is_asked()

    def wait(self, within_s: float) -> bool:
        """Until all that is asked for is done; whether it was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= self._asked, within_s)
