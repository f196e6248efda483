"""A process that ends the cluster when the notebook lets go of it, or dies in whatever way."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, Thread

from mpi4dl_nb.launch import reaper_process

__all__ = ["Reaper"]

_LOOK_S = 1.0


class Reaper:
    """Holds the processes of a cluster, and paths that are removed after them.

    It survives the notebook by a moment. If it is killed itself, another one takes its place, and if it is stopped it
    is made to go on.
    """

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self._command = [
            sys.executable,
            "-P",
            reaper_process.__file__,
            "hold",
            name,
            str(os.getpid()),
            *map(str, paths),
        ]
        self._held: list[int] = []
        self._heard = b""
        self._lock, self._given_up = Lock(), False
        self._start()
        Thread(target=self._supervise, name="mpi4dl_nb leash", daemon=True).start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the notebook is not for it
        )  # fmt: skip
        os.set_blocking(self._process.stdout.fileno(), False)
        self._send_pids(self._held)

    def _send_pids(self, pids: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # killed: the next one is told
            self._process.stdin.write(b"".join(b"%d\n" % pid for pid in pids))
            self._process.stdin.flush()

    def _supervise(self) -> None:
        """Wait for its end, and replace it where a signal was its end."""
        while (code := self._wait()) is None or code < 0:
            with self._lock:
                if self._given_up:
                    return
                if code is not None:
                    self._replace()

    def _replace(self) -> None:
        self._close()
        self._read_ended()
        self._process.stdout.close()
        self._start()

    def _read_ended(self) -> None:
        if not self._process.stdout.closed:
            self._heard += self._process.stdout.read() or b""

    def _wait(self) -> int | None:
        """Its exit code, if it has ended within a second; otherwise it goes on, should it have been stopped."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_LOOK_S)
        self._process.send_signal(signal.SIGCONT)
        return None

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        """Of the process that holds them now."""
        return self._process.pid

    def get_ended_pids(self) -> list[int]:
        """Those of its processes that had ended when it began to end the others; none as long as all are at work."""
        with self._lock:
            self._read_ended()
        return [int(pid) for pid in self._heard.split()]

    def add_process(self, pid: int) -> None:
        """One process more: when it ends, by itself or not, all of the cluster does."""
        with self._lock:
            self._held.append(pid)
            self._send_pids([pid])

    def end_cluster(self, within_s: float) -> None:
        """End the cluster; back when that is done. Raises subprocess.TimeoutExpired."""
        with self._lock:
            self._given_up = True
        self._close()
        self._process.send_signal(signal.SIGCONT)  # it may have been stopped
        while self._process.wait(within_s) < 0:  # killed, in the middle of it or before
            self._replace()
            self._close()
        self._read_ended()
        self._process.stdout.close()
