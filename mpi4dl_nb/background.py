"""Work of a notebook outside its cells: slow work in a thread, of which only the latest counts; and after each cell."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Thread
from weakref import WeakMethod

from IPython import get_ipython

IsAsked = Callable[[], bool]


class LatestOnly:
    """Runs the latest request in a thread. A newer one replaces the older one, which ends at its next `is_asked()`.

    The threads are no daemons, so Python waits for them at exit: torch aborts the process if it is cut off.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._asked = self._done = 0

    def submit(self, work: Callable[[IsAsked], None]) -> None:
        """Run `work(is_asked)` in a thread. It must check `is_asked()` before it shows anything, and now and then."""
        request = self.cancel()

        def run() -> None:
            try:
                work(lambda: request == self._asked)
            finally:
                with self._changed:
                    self._done = max(self._done, request)
                    self._changed.notify_all()

        Thread(target=run, name="mpi4dl_nb later").start()

    def cancel(self) -> int:
        """Cancel the pending request, and return the number of the next one."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def mark_done(self) -> None:
        """Discard the pending request and release all waiters."""
        with self._changed:
            self._done = self.cancel()

    def pause(self, seconds: float, is_asked: IsAsked) -> bool:
        """Sleep for `seconds`, or until a newer request replaces this one. Return whether this one is still current."""
        with self._changed:
            return not self._changed.wait_for(lambda: not is_asked(), seconds)

    def wait(self, within_s: float) -> bool:
        """Wait until all requests are done. Return whether that was within `within_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= self._asked, within_s)


def call_after_cells(method: Callable[[], None]) -> None:
    """Call a bound method after each cell of the notebook, until its object is collected; nothing outside IPython."""
    shell, known = get_ipython(), WeakMethod(method)
    if shell is None:
        return

    def call(*_result: object) -> None:
        if (alive := known()) is None:
            shell.events.unregister("post_run_cell", call)
        else:
            alive()

    shell.events.register("post_run_cell", call)
