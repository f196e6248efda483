"""Ends a cluster: its processes, found by a mark in their environment, and what it left in folders.

It is also two programs, started by its path (see reaper.py, exec_launcher.py). So it imports nothing of ours.
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
from typing import NoReturn

import psutil  # its processes are never mistaken for later ones with the same pid

__all__ = ["MARK", "end_cluster", "get_start_time", "is_running", "remove_paths"]

MARK = "MPI4DL_NB_CLUSTER"
"""In the environment of every process of a cluster: the cluster's name, which no other one ever had."""

_LOOK_S, _ORDERLY_S, _FORCED_S, _GRACE_S = 0.25, 5.0, 3.0, 2.0


def get_start_time(pid: int) -> float:
    """When a process began, on a clock that nobody sets; together with its pid it names one process only.

    Raises psutil.NoSuchProcess where there is none, or only its exit code is left of it.
    """
    if not Path("/proc/self/stat").exists():
        return psutil.Process(pid).create_time()
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise psutil.NoSuchProcess(pid) from None
    if state in "ZX":
        raise psutil.ZombieProcess(pid)
    return float(fields[18])


def is_running(process: psutil.Process) -> bool:
    """Whether it still runs; one of which only the exit code is left does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_cluster(name: str, others: Iterable[psutil.Process] = ()) -> None:
    """End all processes of the cluster of that name, with what they have started, and these others.

    They are asked first; whatever is left after some seconds is killed.
    """
    family = {*_find_marked(name), *others}
    for process in tuple(family):
        with contextlib.suppress(psutil.Error):
            family |= set(process.children(recursive=True))
    for within_s, force in ((_ORDERLY_S, False), (_FORCED_S, True)):
        deadline, asked = time.monotonic() + within_s, set()
        while (left := {*filter(is_running, family)} | {*_find_marked(name)}) and time.monotonic() < deadline:
            for process in left - asked:
                _terminate(process, force)
            family, asked = family | left, asked | left
            time.sleep(0.05)


def _terminate(process: psutil.Process, force: bool) -> None:
    with contextlib.suppress(psutil.Error):
        if force:
            process.kill()
        else:
            process.terminate()
            process.resume()  # a stopped process does not hear that it is to end


def _find_marked(name: str) -> Iterator[psutil.Process]:
    """This user's processes with the mark; not the one that looks."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.uids().real == os.getuid() and process.pid != os.getpid()
            if mine and process.environ().get(MARK) == name:
                yield process


def remove_paths(paths: Iterable[str | Path]) -> None:
    """Files, and folders with all that is in them; what is not there, or resists, is left."""
    for path in map(Path, paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _watch_cluster(name: str, notebook: int, paths: Iterable[str]) -> None:
    """End the cluster when its notebook lets go of it or dies, or one of the processes it depends on has ended.

    `notebook` is the parent's pid, told by itself: it may be dead by now, while workers of it keep its pipes open.

    Their pids come in lines on the standard input, which the notebook closes to let go. On the standard output it says
    which ones had ended before it ends the others.
    """
    held, let_go = [], False
    with contextlib.suppress(psutil.NoSuchProcess):
        while not let_go and os.getppid() == notebook and all(map(is_running, held)):
            pids = _read_pids(_LOOK_S)
            let_go = pids is None
            held += [psutil.Process(pid) for pid in pids or ()]
    with contextlib.suppress(OSError):  # the notebook may be gone
        os.write(1, b"".join(b"%d\n" % each.pid for each in held if not is_running(each)))
    end_cluster(name)
    deadline = time.monotonic() + _GRACE_S  # the notebook may want to read what they said last
    while not let_go and os.getppid() == notebook and time.monotonic() < deadline:
        let_go = _read_pids(_LOOK_S) is None
    remove_paths(paths)


def _read_pids(within_s: float) -> list[int] | None:
    """The pids that have come; None at the end of the input."""
    if not select.select([0], [], [], within_s)[0]:
        return []
    text = os.read(0, 4096)
    return [int(line) for line in text.split()] if text else None


def _run_launcher(name: str, paths: Iterable[str], command: Sequence[str]) -> NoReturn:
    """Run a launcher of ranks, in whose environment the name is, to its end; clean up after it, and leave as it did.

    A signal that another process sends is passed on. Of one that comes from the terminal the launcher has heard itself.
    """
    told = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever has started this one may have it ignored: never told then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*told, signal.SIGCHLD})
    # Should this process be killed, the launcher is asked to end, and with it its ranks.
    set_parent_death_signal, library = 1, ctypes.CDLL(None)  # PR_SET_PDEATHSIG of Linux

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        library.prctl(set_parent_death_signal, signal.SIGTERM)

    launcher = subprocess.Popen(command, preexec_fn=begin)  # noqa: PLW1509 (there are no threads here)
    while launcher.poll() is None:
        heard = signal.sigwaitinfo({*told, signal.SIGCHLD})
        if heard.si_signo in told and heard.si_code <= 0:  # not from the system
            launcher.send_signal(heard.si_signo)
    end_cluster(name)
    remove_paths(paths)
    _exit_with(launcher.returncode)


def _exit_with(code: int) -> NoReturn:
    """With that exit code; where it is negative by that signal, as far as it ends a process."""
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        at = sys.argv.index("--")
        _run_launcher(sys.argv[2], sys.argv[3:at], sys.argv[at + 1 :])
    _watch_cluster(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
