"""`python -m tests.survival [--kills 20] [--folder F]`: kill -9 a training again and again; it resumes every time.

A training over MPI saves after every step. It is killed at a random moment, all of it or one rank of it, often while a
checkpoint is being written, and started again with `--resume` until it ends; then the next training begins, until there
were enough kills. What is printed as JSON: how many kills there were, of which kind, and whether each training ended
with the bits of one that was never killed: losses of all steps, weights, buffers, optimiser.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from tests.mpi import TRIES, has_begun, make_mpi_command, make_mpi_environment

RANKS, EPOCHS, STEPS = 3, 2, 6
FLAGS = (
    "--model tests.train.survivor:make_survivor --image-size 24 --batch-size 2 --split-size 2 "
    "--num-spatial-parts 2 --slice-method vertical --optimiser adam "
    f"--num-epochs {EPOCHS} --max-steps {STEPS} --num-workers 1 -v"
).split()
_LOSS = re.compile(r"Step: (\d+), (loss: [^,]+),")
_ENDED_S = 300.0


@dataclass
class Report:
    """`kills` by what was hit and when: while saving is where a half-written checkpoint was left."""

    kills: dict[str, int] = field(default_factory=dict)
    trainings: int = 0
    starts: int = 0
    losses_compared: int = 0
    resumed_at: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """As JSON."""
        return json.dumps({"ok": not self.wrong, "all_kills": sum(self.kills.values()), **asdict(self)})

    def has_kills_left(self, wanted: int) -> bool:
        """Whether there were fewer than that."""
        return sum(self.kills.values()) < wanted


class Run:
    """One start of the training, in a process group of its own; it writes what it prints into a file."""

    def __init__(self, folder: Path) -> None:
        saves = ["--save", folder / "saved", "--save-every", 1, "--resume"]
        command = make_mpi_command(RANKS, "-m", "mpi4dl_nb.engines", "train", *FLAGS, *saves)
        self.folder, self.saved = folder, folder / "saved"
        with (folder / "printed").open("w") as printed, (folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(command, env=make_mpi_environment(), stdout=printed, stderr=errors)

    @property
    def printed(self) -> str:
        """So far."""
        return (self.folder / "printed").read_text()

    @property
    def errors(self) -> str:
        """The end of what it said of errors."""
        return (self.folder / "errors").read_text()[-1000:]

    @property
    def losses(self) -> list[str]:
        """The losses of its steps, as printed, the last line only if it is complete."""
        return [
            match[2] for line in self.printed.splitlines(keepends=True) if (match := _LOSS.match(line)) and "\n" in line
        ]

    @property
    def ranks(self) -> list[psutil.Process]:
        """Its MPI processes."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [each for each in below if "mpi4dl_nb.engines" in each.cmdline()]
        except psutil.Error:
            return []

    def kill(self, everything: bool, dice: random.Random) -> None:
        """SIGKILL for one rank, or for all of them and mpiexec at once."""
        ranks = self.ranks
        targets = [*ranks, psutil.Process(self.process.pid)] if everything else [dice.choice(ranks)] if ranks else []
        for target in targets:
            try:
                target.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.end()
        psutil.wait_procs(ranks, timeout=_ENDED_S)

    def end(self) -> int:
        """Wait until it is over; the exit code."""
        return self.process.wait(_ENDED_S)


def read_outcome(run: Run) -> tuple[bytes, ...]:
    """The tensors that a training has ended with."""
    last = list_checkpoints(run.saved)[-1]
    return tuple((last / name).read_bytes() for name in ("model.safetensors", "training.safetensors"))


def run_without_kills(folder: Path) -> tuple[list[str], tuple[bytes, ...]]:
    """What a training does that nobody kills: its losses, and its end. Raises RuntimeError if it cannot."""
    folder.mkdir(parents=True)
    run = Run(folder)
    if run.end() or len(run.losses) != EPOCHS * STEPS:
        raise RuntimeError((folder / "errors").read_text())
    return run.losses, read_outcome(run)


def kill_trainings(folder: Path, kills: int, seed: int) -> Report:
    """Kill trainings so often; each is held against one that was not killed."""
    dice, report, start_s = random.Random(seed), Report(), time.monotonic()
    expected = run_without_kills(folder / "straight")
    while report.has_kills_left(kills):
        report.trainings += 1
        _run_one_training(folder / f"training{report.trainings}", kills, dice, report, expected)
    report.seconds = round(time.monotonic() - start_s, 1)
    return report


def _run_one_training(
    folder: Path, kills: int, dice: random.Random, report: Report, expected: tuple[list[str], tuple[bytes, ...]]
) -> None:
    """From its first step to its last, with as many kills as it takes, or as are left."""
    folder.mkdir()
    code, killed, not_begun = 1, True, 0
    while code and (killed or 0 < not_begun < TRIES):
        run = Run(folder)
        report.starts += 1
        killed = report.has_kills_left(kills) and _kill_some_time(run, dice, report)
        code = run.end()
        not_begun = 0 if has_begun(run.errors) else not_begun + 1
        _compare_losses(run, report, expected[0])
    if code:
        report.wrong.append(run.errors)
    elif read_outcome(run) != expected[1]:
        report.wrong.append(f"{folder.name} ended with other tensors")


def _compare_losses(run: Run, report: Report, expected: Sequence[str]) -> None:
    """Hold the losses that a start printed against those of the training that was not killed."""
    resumed = re.search(r"Resumed after (\d+) steps", run.printed)
    first = int(resumed[1]) if resumed else 0
    if resumed:
        report.resumed_at.append(first)
    for step, loss in enumerate(run.losses, first):
        report.losses_compared += 1
        if loss != expected[step]:
            report.wrong.append(f"step {step}: {loss} instead of {expected[step]}")
    if re.search(r"^CheckpointError: ", run.errors, re.MULTILINE):
        report.wrong.append(run.errors)


def _kill_some_time(run: Run, dice: random.Random, report: Report) -> bool:
    """At a random moment of the training, or of the writing of some checkpoint; False if it ends before."""
    saving, everything = dice.random() < 0.5, dice.random() < 0.5
    steps = dice.randrange(1, 6)
    while run.process.poll() is None and len(run.losses) < steps:
        time.sleep(0.02)
    delay_s = dice.uniform(0, 0.02 if saving else 1.0)
    while saving and run.process.poll() is None and not list(run.saved.glob(".partial-*")):
        pass
    time.sleep(delay_s)
    if run.process.poll() is not None:
        return False
    run.kill(everything, dice)
    writing = any(run.saved.glob(".partial-*"))
    kind = f"{'all ranks' if everything else 'one rank'}, {'while saving' if writing else 'while training'}"
    report.kills[kind] = report.kills.get(kind, 0) + 1
    return True


def main(arguments: Sequence[str]) -> int:
    """0 if everything survived."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--kills", type=int, default=20)
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--folder", type=Path, help="where it works; a temporary one unless given")
    chosen = flags.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="survival-", dir=chosen.folder))
    try:
        report = kill_trainings(folder, chosen.kills, chosen.seed)
    finally:
        shutil.rmtree(folder)
    print(report.line, flush=True)
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
