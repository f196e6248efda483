"""The supervisor process, which starts and monitors a rank: `python -m mpi4dl_nb.engines.comm.supervisor COMMAND ...`.

MPI takes the supervisor for the rank. When the rank has ended, or stalls, the supervisor writes a line with what the
rank itself can no longer report; mpiexec forwards the line to the notebook, from any host. The supervisor then exits as
the rank did, but with a signal if the rank exited with an error code, which MPI would not notice. If the supervisor's
parent (mpiexec, or its daemon on another host) is gone, it kills the rank, so that no process is left over.
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
from functools import partial
from pathlib import Path

from mpi4dl_nb.engines.comm.status_board import BOARD, RankStatus, StatusBoard

MARK = "\x1empi4dl_nb "
"""The prefix of a line with a rank's event; the rest is JSON."""

_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""The environment variables in which MPI libraries pass a process its rank."""

_LOOK_S, _REST_S = 0.5, 1.0  # seconds between two checks, and without progress until the rank counts as stalled
_BEAT_S = 1.0  # seconds between heartbeats while the rank has work: without them the supervisor counts as stopped
_STOPPED = "T"
# Loaded here, because a forked child must not load a library before exec.
_LINUX = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Supervisor:
    """The parent of a rank's process. `reported` is the last stall that was reported."""

    def __init__(self, command: Sequence[str]) -> None:
        # mpiexec -- supervisor (what MPI takes for the rank)
        #                `-- rank: writes its status to a file that both have mapped, dies with the supervisor
        self.rank = next((int(os.environ[name]) for name in _RANK_NAMES if name in os.environ), 0)
        self.parent = os.getppid()
        self.reported: tuple[RankStatus | None, bool] | None = None
        self.reported_s = 0.0
        with tempfile.TemporaryFile() as file:
            self.board = StatusBoard.from_file(file.fileno())
            self.board.report(b"")
            self.process = subprocess.Popen(
                command,
                pass_fds=[file.fileno(), *_find_launcher_socket()],
                env={**os.environ, BOARD: str(file.fileno())},
                preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509 (there are no threads here)
            )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # SIGINT for the rank is sent to the rank's own process
        signal.signal(signal.SIGTERM, lambda number, frame: self.process.terminate())

    def watch(self) -> int:
        """Wait for the rank to end, and return its exit code, negative if a signal has ended it."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(_LOOK_S)
            # A process whose parent has died belongs to another one: mpiexec or its daemon is gone.
            if os.getppid() != self.parent:
                self.process.kill()
            self._report_progress()

    def _report_progress(self) -> None:
        """Report a stall once, even of an idle rank, and once that the rank continues.

        The receiver decides whether a stalled rank should have progressed. The supervisor sends heartbeats, except
        after it has reported an idle rank as stalled.
        """
        now = self.board.read()
        state = ""  # the letter of ps: R runs, S sleeps, D waits for I/O, T is stopped
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
            state = status.rpartition(")")[2].split()[0]
        rests = time.monotonic() - self.board.since_s >= _REST_S
        # A stopped process (SIGSTOP) is reported at once, any other stall only after `_REST_S`.
        stall = (now, state == _STOPPED) if rests or state == _STOPPED else None
        if stall != self.reported:
            self.reported = stall
            self.report_event("still", state=state) if stall else self.report_event("moves")
        elif (stall is None or stall[0] is not None) and time.monotonic() - self.reported_s >= _BEAT_S:
            self._write({"rank": self.rank, "event": "watches"})

    def report_event(self, event: str, **facts: object) -> None:
        """Write an event with the rank's status, as one line that other output cannot split."""
        now, for_s = self.board.read(), round(time.monotonic() - self.board.since_s, 3)
        status = {"text": now.text, "step": now.step, "waits": now.waits} if now else {"text": ""}
        self._write({"rank": self.rank, "event": event, **status, "for_s": for_s, **facts})

    def _write(self, line: dict[str, object]) -> None:
        self.reported_s = time.monotonic()
        # One write of less than PIPE_BUF bytes is atomic: the rank writes to the same pipe.
        os.write(1, f"\n{MARK}{json.dumps(line)}\n".encode())


def _find_launcher_socket() -> list[int]:
    """Return the descriptor of the socket by which a launcher of MPICH's kind (Hydra, Slurm) talks to MPI, if any."""
    with suppress(KeyError, ValueError, OSError):  # the variable may be left over from another launcher
        descriptor = int(os.environ["PMI_FD"])
        os.fstat(descriptor)
        return [descriptor]
    return []


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, whose pid is given, dies; a child runs this before exec.

    Only Linux can. A parent that died before the kernel was told is noticed here.
    """
    if _LINUX:
        _LINUX.prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def main(command: Sequence[str]) -> None:
    """Run a command as a rank."""
    process = _Supervisor(command)
    code = process.watch()
    process.report_event("ended", code=code)
    # Exit as the rank did, but with a signal for any failure: MPI does not notice a process that exits with a code.
    if code:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core dump: the rank may have written one
        signal_number = -code if code < 0 else signal.SIGKILL
        if signal_number != signal.SIGKILL:
            signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)


if __name__ == "__main__":
    main(sys.argv[1:])
