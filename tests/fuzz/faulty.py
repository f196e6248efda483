"""What the judge has to find: each case but the first two is wrong in another way. For the judge's own test."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mpi4dl_nb.engines.errors import ImageError
from tests.fuzz import judge
from tests.fuzz.judge import Case, Outside, Random

judge.SECONDS = 1


def _refuse(text: object, cause: Exception | None = None) -> None:
    raise ImageError(f"{text} is damaged.") from cause


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """One that is read."""
    yield Case("good", folder, lambda: None)


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """By its number."""
    canary = outside.write_file("canary", b"x")
    (folder / "link").symlink_to(canary)
    ways: dict[str, Callable[[], object]] = {
        "read": canary.stat,
        "refused": lambda: _refuse(folder),
        "untyped": lambda: list[int]()[1],
        "nameless": lambda: _refuse("it"),
        "no memory": lambda: _refuse(folder, MemoryError()),
        "canary": (folder / "link").read_bytes,
        "canary, refused": lambda: (canary.open("rb").close(), _refuse(folder)),
        "memory": lambda: np.empty(judge.MOST_BYTES + 1, np.uint8).nbytes,
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "hang": lambda: time.sleep(60),
        "exit": lambda: sys.exit(0),
        "read again": lambda: None,
    }
    told = list(ways)[number]
    return Case(told, folder, ways[told])
