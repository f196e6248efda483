"""Command lines: those of every command, with some of their words changed.

They run in this process, on one rank of as many as a line asks for, and end where the ranks' work would begin: what is
read, checked, built and traced before is what is tried. A line either comes so far, or ends with an exit code and one
sentence on the standard error output that begins with the name of an error of this package.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
from PIL import Image

from mpi4dl_nb import __main__ as launcher
from mpi4dl_nb.engines.bench import memory_limit
from mpi4dl_nb.engines.cli import command
from mpi4dl_nb.engines.errors import PlanError
from tests.fuzz.judge import Case, Outside, Random
from tests.fuzz.words import KINDS, LINES, ODD, PARTS, SEVERAL, SIZES, WHOLE

_TYPED = re.compile(r"(rank 0: )?(Plan|Trace|Image|Checkpoint|Rank)Error: \S.*")


def write_whole_cases(folder: Path) -> Iterator[Case]:
    """Each line as it stands."""
    write_files(folder)
    for ranks, line in LINES:
        yield _make_case(folder, ranks, line.split())


def write_damaged_case(folder: Path, number: int, random: Random, outside: Outside) -> Case:
    """One to three of its words are others, or missing, or there twice, and there may be more flags."""
    write_files(folder)
    ranks, line = LINES[number % len(LINES)]
    words = line.split()
    secret = str(outside.write_file("secret.txt", b"--seed\n7\n"))
    for _ in range(int(random.choice([1, 1, 1, 2, 3]))):
        _replace_words(words, ranks, random, (f"@{secret}", f"{secret}:net", f"file://{secret}", f'["{secret}"]'))
    if ranks and random.integers(8) == 0:
        ranks = int(random.integers(1, 6))
    return _make_case(folder, ranks, words)


def _replace_words(words: list[str], ranks: int, random: Random, more: Sequence[str]) -> None:
    flags = [at for at, word in enumerate(words[:-1]) if word.startswith("--") and words[at + 1][:2] != "--"]
    way, at = int(random.integers(12)), int(random.integers(len(words))) if words else 0
    known = list_flags(ranks, tuple(words[:2]))
    if way < 6 and flags:
        at = _choose(flags, random)
        words[at : at + 2] = [f"{words[at]}={_choose_value(words[at], random, more)}"]
    elif way == 6 and words:
        del words[at]
    elif way == 7:
        words.insert(at, _choose_value("", random, more))
    elif known:
        flag = _choose(known, random)
        words.append(flag if random.integers(4) == 0 else f"{flag}={_choose_value(flag, random, more)}")


def _choose(values: Sequence[Any], random: Random) -> Any:
    return values[int(random.integers(len(values)))]


def _choose_value(flag: str, random: Random, more: Sequence[str]) -> str:
    if (kind := KINDS.get(flag, WHOLE)) and random.integers(4):
        return str(_choose(kind, random))
    return str(_choose(_choose([WHOLE, ODD, (*more, *PARTS, *SEVERAL, *SIZES)], random), random))


@cache
def list_flags(ranks: int, words: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a command, as its own help tells."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(StringIO()), cut_work(ranks):
        for count in range(len(words), 0, -1):
            _run_command(ranks, [*words[:count], "--help"])
            if "usage:" in said.getvalue():
                break
    return tuple(sorted(set(re.findall(r"--[a-z][\w-]+", said.getvalue())) - {"--help"}))


def write_files(folder: Path) -> None:
    """What the lines name, and files, pipes and links that are something else."""
    small = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(32, 32, 3))
    for name in ("classes/a", "classes/b", "pictures", "masks"):
        (folder / name).mkdir(parents=True)
        small.convert("L" if name == "masks" else "RGB").save(folder / name / "a.png")
    small.save(folder / "a.png")
    (folder / "t.csv").write_text("path,mask\npictures/a.png,masks/a.png\n")
    (folder / "empty").touch()
    (folder / "noise").write_bytes(np.random.default_rng(0).bytes(1000))
    (folder / "noise.json").write_bytes(b'{"steps": [[1, "a"')
    (folder / "loop").symlink_to("loop")
    for name in ("pipe", "pipe.csv"):
        os.mkfifo(folder / name)


def _make_case(folder: Path, ranks: int, words: Sequence[str]) -> Case:
    told = f"{ranks} ranks: {' '.join(word if len(word) < 80 else f'{word[:20]}... ({len(word)})' for word in words)}"
    return Case(told.encode(errors="replace").decode(), "", partial(run, folder, ranks, words))


# ---- running one, up to where work begins


class Cut(BaseException):
    """Here the ranks' work would begin."""


class Left(BaseException):
    """A command has ended with a code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class OneOfMany:
    """Rank 0 of a world whose other ranks say what it says. It sends no messages."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def can_access(self, device: object) -> bool:
        return False

    def collectives(self, device: object) -> None:
        return None

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    gather = all_gather

    def barrier(self) -> None:
        """All are here."""

    def revoke(self) -> None:
        """Nobody waits."""

    def exit_process(self, code: int) -> NoReturn:
        raise Left(code)

    def __getattr__(self, name: str) -> NoReturn:
        raise Cut


def _cut(*arguments: object, **more: object) -> NoReturn:
    raise Cut


def _raise_left(code: int) -> NoReturn:
    raise Left(code)


_BENCHMARKS = {  # by the file that has them
    "asynchronous": ("asynchronous",),
    "bubble": ("bubble",),
    "communication": ("allreduce", "overlap"),
    "halo": ("halo",),
    "memory": ("memory",),
    "step": ("step", "compiled", "overhead", "throughput"),
}


@contextmanager
def cut_work(ranks: int) -> Iterator[None]:
    """Within it a command ends by `Cut` where its work would begin, or that of the processes which it starts."""
    from mpi4dl_nb.engines.comm import mpi

    with ExitStack() as stack:
        for owner, name in ((command, "verify"), (memory_limit, "run_in_subprocess"), (launcher, "exec_launcher")):
            stack.enter_context(patch.object(owner, name, _cut))
        for file, names in _BENCHMARKS.items():
            for name in names:
                stack.enter_context(patch(f"mpi4dl_nb.engines.bench.{file}.bench_{name}", _cut))
        stack.enter_context(patch("mpi4dl_nb.engines.cli.train_command.run", _cut))
        stack.enter_context(patch("mpi4dl_nb.engines.cli.predict_command.TiledPredictor.run", _cut))
        stack.enter_context(patch("mpi4dl_nb.engines.bench.read.measure_host_peak_bytes", _cut))
        stack.enter_context(patch("mpi4dl_nb.engines.predict.published_replay.PublishedReplay.simulate_result", _cut))
        stack.enter_context(patch("mpi4dl_nb.engines.bench.gpu_check.launch", _cut))
        stack.enter_context(patch.object(mpi, "MpiWorld", partial(OneOfMany, ranks)))
        stack.enter_context(patch.object(os, "_exit", _raise_left))
        yield


def run(folder: Path, ranks: int, words: Sequence[str]) -> None:
    """Raises PlanError with what a line that is refused has said, and RuntimeError where that is no one sentence."""
    said, before = StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(said), cut_work(ranks), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for the user
            code = _run_command(ranks, list(words))
    finally:
        os.chdir(before)
    lines = [line for line in said.getvalue().splitlines() if line.strip()]
    if code == 0:
        return
    if code not in (1, 2) or len(lines) != 1 or not _TYPED.fullmatch(lines[0]):
        raise RuntimeError(f"code {code}, and said was {lines!r:.300}")
    raise PlanError(lines[0])


def _run_command(ranks: int, words: list[str]) -> object:
    output = sys.stdout
    try:
        return command.main(words) if ranks else launcher.main(words)
    except Cut:
        return 0
    except (Left, SystemExit) as left:
        return left.code or 0
    finally:
        sys.stdout = output
