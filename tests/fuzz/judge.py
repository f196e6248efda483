"""The judge of every fuzzer: whatever is done to a file, it is read, or an error of this package names it.

A fuzzer is a module of this folder with two functions. Both write into an empty folder and say how it is read:

- `write_whole_cases(folder)`: undamaged cases, one of each kind. They must be read.
- `write_damaged_case(folder, number, random, outside)`: case `number`, damaged by what `random` says and nothing else.

Each case is held to four things: its error is typed and names the file; it takes no more than `SECONDS`, and no more
than `MOST_BYTES` of memory, kept or given back; and it opens none of the files of `outside`, to which links, paths and
entities of the case may lead. The kernel tells of these (inotify), so that no library opens one unseen.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import shutil
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mpi4dl_nb.engines.errors import Mpi4dlError

SECONDS = 10  # for one case; the signal is not caught, since a decoder that hangs does not come back to Python
MOST_BYTES = 1 << 30  # of address space, more than was there before the first case
_STOP_BYTES = 4 << 30  # the same, at which the kernel says no: the machine is not ours alone
_OPENED = 0x20  # inotify's IN_OPEN
_EVENT = struct.Struct("iIII")

Random = np.random.Generator


@dataclass(frozen=True)
class Case:
    """What was written into a folder.

    `told` says what it is and what was done to it. `read` reads it as a user would, and its errors must say `names`.
    """

    told: str
    names: Path | str
    read: Callable[[], object]


class Outside:
    """Files that were not given. `list_opened` says which of them were opened since it was last asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libc, self._names = ctypes.CDLL(None, use_errno=True), dict[int, str]()
        self._events = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def write_file(self, name: str, data: bytes) -> Path:
        """The path of a watched file of that name; written where it is asked for first."""
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            watch = self._libc.inotify_add_watch(self._events, os.fsencode(path), _OPENED)
            if watch < 0:
                raise OSError(ctypes.get_errno(), "inotify watches no file", str(path))
            self._names[watch] = name
        return path

    def list_opened(self) -> list[str]:
        """Names of the files that were opened, each once."""
        try:
            found = os.read(self._events, 1 << 16)
        except BlockingIOError:
            return []
        names, at = set(), 0
        while at < len(found):
            watch, _, _, length = _EVENT.unpack_from(found, at)
            names.add(self._names[watch])
            at += _EVENT.size + length
        return sorted(names)


class Fuzzer(Protocol):
    """A module that writes cases."""

    def write_whole_cases(self, folder: Path) -> Iterable[Case]:
        """Undamaged ones."""

    def write_damaged_case(self, folder: Path, number: int, random: Random, outside: Outside) -> Case:
        """The same whichever cases there were before."""


@dataclass
class Verdict:
    """`outcome` is read, refused or wrong, and `why` is told of what is wrong."""

    outcome: str
    why: str = ""
    seconds: float = 0.0
    outside: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


def check_case(case: Case, outside: Outside) -> Verdict:
    """Read a case; the process ends by SIGALRM where that takes too long."""
    outside.list_opened()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        signal.alarm(SECONDS)
        start = time.monotonic()
        outcome, why = _read_case(case)
        seconds = time.monotonic() - start
        signal.alarm(0)
    found = outside.list_opened()
    if found:
        outcome, why = "wrong", f"what was not given was opened: {', '.join(found)}"
    told = sorted({f"{each.category.__name__}: {each.message}" for each in warned})
    return Verdict(outcome, why[:300], round(seconds, 3), found, told)


def _read_case(case: Case) -> tuple[str, str]:
    try:
        case.read()
    except Mpi4dlError as error:
        if str(case.names) not in str(error):
            return "wrong", f"names no file: {error}"
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                return "wrong", f"asked for more memory than there is: {cause}"
            cause = cause.__cause__
        return "refused", ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # decoders written in Rust panic with one that is no Exception
        return "wrong", f"{type(error).__name__}: {error}"
    return "read", ""


def read_memory(name: str) -> int:
    """Bytes of this process, by the kernel's account."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def check_all(fuzzer: Fuzzer, numbers: Iterable[int], seed: int, place: Path) -> Iterator[dict[str, object]]:
    """What is to be told: of each case first what it is, and then what came of it.

    Ends after a case that took too much memory: from then on this process could not tell another one.
    """
    logging.disable()  # tifffile logs what it finds, besides raising it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outside = Outside(place / "outside")
    _check_whole_cases(fuzzer, place, outside)
    address, resident = read_memory("VmSize"), read_memory("VmRSS")
    resource.setrlimit(resource.RLIMIT_AS, (address + _STOP_BYTES, resource.RLIM_INFINITY))
    for number in numbers:
        # A new name for each: what is kept of a file is known by its path, its time and its size.
        with _make_folder(place / f"case{number}") as folder:
            case = fuzzer.write_damaged_case(folder, number, np.random.default_rng([seed, number]), outside)
            yield {"case": number, "told": case.told}
            found = check_case(case, outside)
        grown = {"address_bytes": read_memory("VmPeak") - address, "resident_bytes": read_memory("VmHWM") - resident}
        if max(grown.values()) > MOST_BYTES:
            found.outcome, found.why = "wrong", f"took {max(grown.values()):,} bytes of memory. {found.why}"
        yield {"case": number, "told": case.told} | vars(found) | grown
        if max(grown.values()) > MOST_BYTES:
            return


def _check_whole_cases(fuzzer: Fuzzer, place: Path, outside: Outside) -> None:
    """Before memory is measured, so that everything is imported. Raises RuntimeError where one is not read."""
    with _make_folder(place / "whole") as folder:
        for case in fuzzer.write_whole_cases(folder):
            found = check_case(case, outside)
            if found.outcome != "read" or found.warned:
                case.read()  # which raises what is wrong, with where
                raise RuntimeError(f"{case.told}, which is not damaged: {json.dumps(vars(found))}")


@contextmanager
def _make_folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)
