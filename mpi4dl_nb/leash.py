"""A process that ends the cluster when the notebook lets go of it, or dies in whatever way."""

from __future__ import annotations

import inspect
import subprocess
import sys

__all__ = ["Leash"]


class Leash:
    """Holds processes, their children included, and a folder. It survives the notebook by a moment."""

    def __init__(self, home: str) -> None:
        source = f"{inspect.getsource(_end_when_let_go)}\n{_end_when_let_go.__name__}({home!r})"
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=silent, stderr=silent,
            start_new_session=True,  # an interrupt of the notebook is not for it
        )  # fmt: skip

    def hold(self, pid: int) -> None:
        """One process more; the last one held is the first to end."""
        self._process.stdin.write(b"%d\n" % pid)
        self._process.stdin.flush()

    def let_go(self, within_s: float) -> None:
        """End them, and remove the folder; back when that is done."""
        self._process.stdin.close()
        self._process.wait(within_s)


def _end_when_let_go(home: str) -> None:
    """Read pids until the input ends. The text of this function is all that the process runs."""
    import contextlib
    import shutil
    import sys
    import time

    import psutil  # its processes are never mistaken for later ones with the same pid

    def works(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def end(process: psutil.Process) -> None:
        family, deadline = [*process.children(recursive=True), process], time.monotonic() + 5
        process.terminate()
        while any(map(works, family)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for left in filter(works, family):
            left.kill()

    held: list[psutil.Process] = []
    for line in sys.stdin:
        with contextlib.suppress(psutil.NoSuchProcess):
            held.append(psutil.Process(int(line)))
    for process in reversed(held):
        with contextlib.suppress(psutil.NoSuchProcess):
            end(process)
    shutil.rmtree(home, ignore_errors=True)
