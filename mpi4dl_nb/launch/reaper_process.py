"""End a cluster: its processes, found by a marker in their environment, and the folders that it left.

This file is also two programs, started by its path (see `PROGRAM` and `mpi4dl_nb/__main__.py`), so it imports none
of our modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import IO, NoReturn

import psutil

PROGRAM = (sys.executable, "-P", __file__)
"""Command that runs this file: with `hold`, the process that watches a cluster, with `keep`, a launcher's parent."""

MARK = "MPI4DL_NB_CLUSTER"
"""Environment variable of every process of a cluster, with the cluster's name, which is unique for all time."""

_LOOK_S, _ORDERLY_S, _FORCED_S, _GRACE_S = 0.25, 5.0, 3.0, 2.0


def get_start_time(pid: int) -> float:
    """Return the start time of a process on a monotonic clock, which together with its pid identifies the process.

    Raises psutil.NoSuchProcess if there is no such process, or if it is a zombie.
    """
    if not Path("/proc/self/stat").exists():
        return psutil.Process(pid).create_time()
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    if state in b"ZX":
        raise psutil.ZombieProcess(pid)
    return float(fields[18])


def is_running(process: psutil.Process) -> bool:
    """Return whether a process is still running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_cluster(name: str, others: Iterable[psutil.Process] = ()) -> None:
    """End all processes of the cluster of that name and their descendants, and the processes `others`.

    They are terminated first; those that remain after some seconds are killed.
    """
    family = {*_find_marked(name), *others}
    for process in tuple(family):
        with contextlib.suppress(psutil.Error):
            family |= set(process.children(recursive=True))
    # The first search is for descendants that have changed their environment, such as programs started by a rank, and
    # must come before anything has ended: orphans have no parent to be found by.
    for within_s, force in ((_ORDERLY_S, False), (_FORCED_S, True)):
        deadline = time.monotonic() + within_s
        asked: set[psutil.Process] = set()
        # Search again in every round: a process may start children while it is being ended.
        while (left := {*filter(is_running, family)} | {*_find_marked(name)}) and time.monotonic() < deadline:
            for process in left - asked:
                with contextlib.suppress(psutil.Error):
                    if force:
                        process.kill()
                    else:
                        process.terminate()
                        process.resume()  # a stopped process does not handle SIGTERM before it continues
            family, asked = family | left, asked | left
            time.sleep(0.05)


def _find_marked(name: str) -> Iterator[psutil.Process]:
    """Iterate over this user's processes with the marker, except for this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.uids().real == os.getuid() and process.pid != os.getpid()
            if mine and process.environ().get(MARK) == name:
                yield process


def remove_paths(paths: Iterable[str | Path]) -> None:
    """Remove files, and folders with their contents; missing paths and errors are ignored."""
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _watch_cluster(name: str, notebook: int, paths: Iterable[str]) -> None:
    """End the cluster when its notebook releases it or dies, or when one of the processes it depends on has ended.

    `notebook` is the pid of the parent, as passed by the parent: it may be dead by now, while its workers still keep
    its pipes open.

    The pids to watch arrive as lines on standard input, which the notebook closes to release the cluster. The pids that
    had ended before the others were ended are written to standard output.
    """
    # The three ends of a cluster, in the order in which they are noticed here:
    #
    #     released                 end of input: the notebook has closed the pipe
    #     getppid() != notebook    the notebook has died; its forks may still hold the pipe open
    #     not is_running           the controller or mpiexec has ended, without which the ranks are of no use
    watched: list[psutil.Process] = []
    released = False
    with contextlib.suppress(psutil.NoSuchProcess):
        while not released and os.getppid() == notebook and all(map(is_running, watched)):
            pids = _read_pids(_LOOK_S)
            released = pids is None
            watched += [psutil.Process(pid) for pid in pids or ()]
    with contextlib.suppress(OSError):  # the notebook may be dead
        os.write(1, b"".join(b"%d\n" % process.pid for process in watched if not is_running(process)))
    end_cluster(name)
    deadline = time.monotonic() + _GRACE_S  # the notebook may still read their last output
    while not released and os.getppid() == notebook and time.monotonic() < deadline:
        released = _read_pids(_LOOK_S) is None
    remove_paths(paths)


def _read_pids(within_s: float) -> list[int] | None:
    """Return the pids that have arrived; None at the end of the input."""
    if not select.select([0], [], [], within_s)[0]:
        return []
    text = os.read(0, 4096)
    return [int(line) for line in text.split()] if text else None


def _run_launcher(name: str, paths: Iterable[str], command: Sequence[str]) -> NoReturn:
    """Run a launcher of ranks, with the cluster's name in its environment; clean up after it and exit with its code.

    Signals from other processes are forwarded. Signals from the terminal reach the launcher by themselves.
    """
    forwarded = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the parent may ignore SIGCHLD, which then never arrives
    # Block the signals before the launcher starts, and fetch them by `sigwaitinfo`: none is lost in between, and the
    # sender (`si_code`) is known.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    # If this process is killed, the kernel terminates the launcher, which ends its ranks.
    set_parent_death_signal, library, parent = 1, ctypes.CDLL(None), os.getpid()  # PR_SET_PDEATHSIG of Linux

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        library.prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(0)

    launcher = subprocess.Popen(command, preexec_fn=begin)  # noqa: PLW1509 (there are no threads here)
    while launcher.poll() is None:
        received = signal.sigwaitinfo({*forwarded, signal.SIGCHLD})
        if received.si_signo in forwarded and received.si_code <= 0:  # sent by a process, not by the terminal
            launcher.send_signal(received.si_signo)
    end_cluster(name)
    remove_paths(paths)
    code = launcher.returncode
    if code < 0:  # a signal has ended the launcher: end by the same one, provided that it ends a process
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


# A process that ends the cluster when the notebook releases it, or dies in whatever way.


_CHECK_S = 1.0


# Two processes that look after each other; both must be killed at once to leave a cluster behind, and the next start
# finds even that one by its record (run_directory.py).
#
#     notebook ── pids to watch, as lines ──> reaper process ── SIGTERM, SIGKILL ──> all with the cluster's MARK
#        ^  │                                    │   ^
#        │  └── waits for it, starts another ────┼───┘
#        └───── pids that had ended ─────────────┘
#
# The end of the pipe is the only message that arrives even if the notebook is killed: the kernel closes it.


def get_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe of a process that was started with `subprocess.PIPE`."""
    if pipe is None:
        raise ValueError("The process was started without this pipe.")
    return pipe


class Reaper:
    """Holds the processes of a cluster, and the paths that are removed after them.

    The reaper process outlives the notebook by a moment. If it is killed, another one replaces it; if it is stopped, it
    is continued.
    """

    def __init__(self, name: str, paths: Sequence[Path]) -> None:
        self._command = [*PROGRAM, "hold", name, str(os.getpid()), *map(str, paths)]
        self._watched: list[int] = []
        self._ended = b""
        self._lock, self._released = Lock(), False
        self._start()
        Thread(target=self._supervise, name="mpi4dl_nb reaper", daemon=True).start()

    def _start(self) -> None:
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # In a session of its own, so that it is not interrupted together with the notebook.
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True)
        self._input, self._output = get_pipe(self._process.stdin), get_pipe(self._process.stdout)
        os.set_blocking(self._output.fileno(), False)
        self._send_pids(self._watched)

    def _send_pids(self, pids: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # killed: its replacement gets all pids
            self._input.write(b"".join(b"%d\n" % pid for pid in pids))
            self._input.flush()

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
                if self._released:
                    return
                if code is not None and code < 0:
                    self._replace()

    def _replace(self) -> None:
        self._close()
        self._read_ended()
        self._output.close()
        self._start()

    def _read_ended(self) -> None:
        if not self._output.closed:
            self._ended += self._output.read() or b""

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def _wait(self, within_s: float) -> int:
        """Wait for the reaper process, which is continued if it is stopped meanwhile, and return its exit code."""
        deadline_s = time.monotonic() + within_s
        while True:
            self._process.send_signal(signal.SIGCONT)
            try:
                return self._process.wait(_CHECK_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline_s:
                    raise

    @property
    def pid(self) -> int:
        """The pid of the current reaper process."""
        return self._process.pid

    def get_ended_pids(self) -> list[int]:
        """Return the processes that had ended before the reaper ended the others; empty while all are running."""
        with self._lock:
            self._read_ended()
        return [int(pid) for pid in self._ended.split()]

    def add_process(self, pid: int) -> None:
        """Add a process: when it ends, for whatever reason, the whole cluster is ended."""
        with self._lock:
            self._watched.append(pid)
            self._send_pids([pid])

    def end_cluster(self, within_s: float) -> None:
        """End the cluster and wait for it. Raises subprocess.TimeoutExpired."""
        with self._lock:
            self._released = True
        self._close()
        while self._wait(within_s) < 0:  # killed by a signal, possibly half-way: a replacement finishes
            self._replace()
            self._close()
        self._read_ended()
        self._output.close()


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        at = sys.argv.index("--")
        _run_launcher(sys.argv[2], sys.argv[3:at], sys.argv[at + 1 :])
    _watch_cluster(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
