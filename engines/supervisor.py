"""Starts a rank's process, watches it, and tells what becomes of it: `python -m engines.supervisor COMMAND ...`.

It is what MPI takes for the rank. When the rank has ended, or does not go on, it writes a line that says what the rank
itself can't say any more; mpiexec carries it to the notebook, from whatever host. It then ends as the rank did, and by
a signal where the rank left with a code, which MPI would not notice. Without the one that has started it (mpiexec, or
its daemon on another host) it ends the rank: none is left behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engines.status_board import BOARD, RankStatus, StatusBoard

__all__ = ["MARK", "RANK_NAMES", "main", "set_parent_death_signal"]

MARK = "\x1empi4dl_nb "
"""What a line begins with that tells of a rank: the rest is JSON."""

RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Where MPIs write which rank a process is."""

_LOOK_S, _REST_S = 0.5, 1.0  # it is looked after this often; so long in one place, and it does not go on
_BEAT_S = 1.0  # the guard of a rank that has work is heard this often: one that is silent watches no more
_STOPPED = "T"
_PR_SET_PDEATHSIG = 1  # of Linux
# Loaded before a child is forked, which must not load anything.
_LINUX = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Supervisor:
    """Has a rank's process as its child. `told` is what was last told of a rank that does not go on."""

    def __init__(self, command: Sequence[str]) -> None:
        self.rank = next((int(os.environ[name]) for name in RANK_NAMES if name in os.environ), 0)
        self.parent = os.getppid()
        self.told: tuple[RankStatus | None, bool] | None = None
        self.said_s = 0.0
        with tempfile.TemporaryFile() as file:
            self.board = StatusBoard.from_file(file.fileno())
            self.board.report(b"")
            self.process = subprocess.Popen(
                command, pass_fds=[file.fileno()], env={**os.environ, BOARD: str(file.fileno())},
                preexec_fn=set_parent_death_signal,  # noqa: PLW1509 (there are no threads here)
            )  # fmt: skip
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever means the rank sends it there
        signal.signal(signal.SIGTERM, lambda number, frame: self.process.terminate())

    def watch(self) -> int:
        """Its exit code, negative where a signal has ended it, once it has ended."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(_LOOK_S)
            if os.getppid() != self.parent:
                self.process.kill()
            self._report_progress()

    def _report_progress(self) -> None:
        """Tell once of a rank that does not go on, even where it has nothing to do, and once that it does.

        Whoever has given it something to do knows that it should. As long as it was not told that the rank has nothing
        to do, the guard says from time to time that it still watches.
        """
        now, state = self.board.read(), _get_process_state(self.process.pid)
        rests = time.monotonic() - self.board.since_s >= _REST_S
        found = (now, state == _STOPPED) if rests or state == _STOPPED else None
        if found != self.told:
            self.told = found
            self.report_event("still", state=state) if found else self.report_event("moves")
        elif (found is None or found[0] is not None) and time.monotonic() - self.said_s >= _BEAT_S:
            self._write({"rank": self.rank, "event": "watches"})

    def report_event(self, event: str, **facts: object) -> None:
        """A line of its own, in one piece, whatever ranks write at the same time."""
        now, for_s = self.board.read(), round(time.monotonic() - self.board.since_s, 3)
        place = {"text": now.text, "step": now.step, "waits": now.waits} if now else {"text": ""}
        self._write({"rank": self.rank, "event": event, **place, "for_s": for_s, **facts})

    def _write(self, line: dict[str, object]) -> None:
        self.said_s = time.monotonic()
        os.write(1, f"\n{MARK}{json.dumps(line)}\n".encode())


def set_parent_death_signal() -> None:
    """Done by a child before it begins: should the one that has started it be killed, it ends too."""
    if _LINUX:
        _LINUX.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _get_process_state(pid: int) -> str:
    """A letter, as in ps: R computes, S sleeps, D waits for a file, T is stopped; none where the system doesn't say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _exit_like(code: int) -> None:
    """End as the rank did: MPI notices a process that a signal has ended, and not one that left with a code."""
    if code:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank may have left a core already
        number = -code if code < 0 else signal.SIGKILL
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def main(command: Sequence[str]) -> None:
    """Run a command as a rank."""
    guard = _Supervisor(command)
    code = guard.watch()
    guard.report_event("ended", code=code)
    _exit_like(code)


if __name__ == "__main__":
    main(sys.argv[1:])
