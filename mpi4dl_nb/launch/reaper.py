"""A process that ends the cluster when the notebook releases it, or dies in whatever way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, Thread

from mpi4dl_nb.launch.reaper_process import PROGRAM

__all__ = ["Reaper"]

_CHECK_S = 1.0


# Two processes that look after each other; both must be killed at once to leave a cluster behind, and the next start
# finds even that one by its record (pid_file.py).
#
#     notebook ── pids to watch, as lines ──> reaper process ── SIGTERM, SIGKILL ──> all with the cluster's MARK
#        ^  │                                    │   ^
#        │  └── waits for it, starts another ────┼───┘
#        └───── pids that had ended ─────────────┘
#
# The end of the pipe is the only message that arrives even if the notebook is killed: the kernel closes it.


class Reaper:
    """Holds the processes of a cluster, and the paths that are removed after them.

    The reaper process outlives the notebook by a moment. If it is killed, another one replaces it; if it is stopped, it
    is continued.
    """

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self._command = [*PROGRAM, "hold", name, str(os.getpid()), *map(str, paths)]
        self._held: list[int] = []
        self._heard = b""
        self._lock, self._given_up = Lock(), False
        self._start()
        Thread(target=self._supervise, name="mpi4dl_nb leash", daemon=True).start()

    def _start(self) -> None:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # In a session of its own, so that it is not interrupted together with the notebook.
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._send_pids(self._held)

    def _send_pids(self, pids: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # killed: its replacement gets all pids
            self._process.stdin.write(b"".join(b"%d\n" % pid for pid in pids))
            self._process.stdin.flush()

    def _supervise(self) -> None:
        """Wait for the reaper process to end, and replace it if a signal ended it."""
        code = None
        while code is None or code < 0:
            try:
                code = self._process.wait(_CHECK_S)
            except subprocess.TimeoutExpired:
                code = None
                self._process.send_signal(signal.SIGCONT)  # in case it was stopped
            with self._lock:
                if self._given_up:
                    return
                if code is not None and code < 0:
                    self._replace()

    def _replace(self) -> None:
        self._close()
        self._read_ended()
        self._process.stdout.close()
        self._start()

    def _read_ended(self) -> None:
        if not self._process.stdout.closed:
            self._heard += self._process.stdout.read() or b""

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """The pid of the current reaper process."""
        return self._process.pid

    def get_ended_pids(self) -> list[int]:
        """Return the processes that had ended before the reaper ended the others; empty while all are running."""
        with self._lock:
            self._read_ended()
        return [int(pid) for pid in self._heard.split()]

    def add_process(self, pid: int) -> None:
        """Add a process: when it ends, for whatever reason, the whole cluster is ended."""
        with self._lock:
            self._held.append(pid)
            self._send_pids([pid])

    def end_cluster(self, within_s: float) -> None:
        """End the cluster and wait for it. Raises subprocess.TimeoutExpired."""
        with self._lock:
            self._given_up = True
        self._close()
        self._process.send_signal(signal.SIGCONT)  # in case it was stopped
        while self._process.wait(within_s) < 0:  # killed by a signal, possibly half-way: a replacement finishes
            self._replace()
            self._close()
        self._read_ended()
        self._process.stdout.close()
