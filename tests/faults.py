"""Random faults befall a training on 5 ranks: `python -m tests.faults --count 100`, or `--minutes 30` of a fault each.

Ranks raise, are killed, leave, are stopped by a signal, or the notebook is interrupted, at random instructions. Nothing
may hang, the right rank is named, and the weights are in the end those of a training without faults. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from engines.checkpoint.interrupts import StoppedError
from mpi4dl_nb.cluster import Cluster
from mpi4dl_nb.launch.ending import MARK
from mpi4dl_nb.training import Training
from tests.faulty import DEADLY, KINDS, PLAN, SHAPE, Fault, Heard, batches, inject, model

HANG_AFTER_S = 3.0
STEPS = 3  # between two faults, at least
EVERY = 2  # steps between two checkpoints


class Trial:
    """A training, its course so far, and what the faults did."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int, pause_s: float) -> None:
        self.training, self.heard = Training(model(), PLAN, cluster, SHAPE), Heard()
        self.folder, self.draw, self.pause_s = folder, random.Random(seed), pause_s
        self.told_s: dict[str, list[float]] = defaultdict(list)
        self.healed_s: dict[str, list[float]] = defaultdict(list)
        self.wrong: list[str] = []
        self.rounds = 0
        self._told = 0.0
        self._watch(cluster)

    def _watch(self, cluster: Cluster) -> None:
        """Note when a failure is told: then it is healed."""
        heal = cluster.heal

        def watched(fewer: bool = False) -> Cluster:
            self._told = self._told or time.time()
            return heal(fewer)

        cluster.heal = watched  # type: ignore[method-assign]

    def round(self, kinds: Sequence[str]) -> Fault:
        """Some steps, and a fault among them."""
        data = batches(STEPS, self.rounds)
        fault = Fault.drawn(self.draw, tuple(kinds), self.training, STEPS, self.folder / "note")
        self.training.cluster.call(inject, self.training.name, fault)
        self._told, before, healed = 0.0, self.training.steps, len(self.heard.healed)
        done = 0
        while done < STEPS:
            try:
                self._fit(data[done:])
            except (StoppedError, KeyboardInterrupt):
                self._told = time.time()
            done = self.training.steps - before
        self.rounds += 1
        self._judge(fault, self.heard.healed[healed:])
        return fault

    def in_time(self) -> bool:
        """Nobody waited for longer than is promised."""
        stopped = self.told_s.get("stop", [])
        others = [seconds for kind, found in self.told_s.items() if kind != "stop" for seconds in found]
        return (not others or (statistics.median(others) <= 1 and max(others) <= 5)) and all(
            seconds <= HANG_AFTER_S + 2 for seconds in stopped
        )

    def _fit(self, data: Sequence[Any]) -> None:
        self.training.fit(
            _Paced(data, self.pause_s), progress=False, save=self.folder, save_every=EVERY, on_failure="heal",
            monitor=self.heard,
        )  # fmt: skip

    def _judge(self, fault: Fault, healed: Sequence[Any]) -> None:
        happened_s = float(fault.note.read_text())
        self.told_s[fault.kind].append(self._told - happened_s)
        self.wrong += [f"{fault}: nothing was told of it"] * (self._told < happened_s)
        texts = [event.text for event in healed]
        if fault.kind == "interrupt":
            self.wrong += [f"{fault}: {texts}"] * bool(texts)
            return
        self.wrong += [f"{fault}: {texts}"] * (len(texts) != 1 or f": Rank {fault.rank}" not in texts[0])
        with suppress(IndexError, ValueError):
            self.healed_s["restart" if fault.kind in DEADLY else "in place"].append(float(texts[0].split()[2]))


def _left() -> list[str]:
    """What still runs of any cluster on this machine, whoever is its parent by now: others must not have one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if MARK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


class _Paced:
    """Batches that come slowly, so that a long trial leaves the machine to others."""

    def __init__(self, data: Sequence[Any], pause_s: float) -> None:
        self.data, self.pause_s = data, pause_s

    def __iter__(self) -> Any:
        for batch in self.data:
            time.sleep(self.pause_s)
            yield batch


def undisturbed(cluster: Cluster, rounds: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after as many rounds without a fault, and the losses."""
    training, heard = Training(model(), PLAN, cluster, SHAPE), Heard()
    for number in range(rounds):
        training.fit(batches(STEPS, number), progress=False, monitor=heard)
    return training.state_dict(), heard.losses


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor."""
    return max(float((found[n] - t).double().norm() / t.double().norm().clamp_min(1e-30)) for n, t in wanted.items())


def standing(cluster: Cluster) -> dict[str, list[float]]:
    """Megabytes and open files of each rank."""

    def look(host: Any) -> tuple[float, int]:
        process = psutil.Process()
        return process.memory_info().rss / 1e6, process.num_fds()

    found = cluster.call(look)
    return {"rss_mb": [round(mb, 1) for mb, _ in found], "files": [files for _, files in found]}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(seconds), 3), "worst_s": round(max(seconds), 3), "n": len(seconds)}


def _rounds(trial: Trial, args: argparse.Namespace, say: Callable[..., None]) -> None:
    """As many faults as are asked for, or one a minute for as long as is asked for."""
    if not args.minutes:
        for number in range(args.count):
            fault = trial.round(args.kinds)
            say(fault=number, kind=fault.kind, rank=fault.rank, told_s=round(trial.told_s[fault.kind][-1], 3))
        return
    start_s = time.time()
    while (minute := (time.time() - start_s) / 60) < args.minutes:
        fault = trial.round(args.kinds)
        say(minute=round(minute, 1), kind=fault.kind, **standing(trial.training.cluster))
        while time.time() - start_s < (minute + 1) * 60:
            trial._fit(batches(STEPS, trial.rounds))
            trial.rounds += 1


def main() -> int:
    """0 where nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    def say(**facts: object) -> None:
        print(json.dumps(facts), flush=True)

    cluster = Cluster(PLAN.ranks, hang_after_s=HANG_AFTER_S)
    with tempfile.TemporaryDirectory() as folder, cluster:
        trial = Trial(cluster, Path(folder), args.seed, args.pause_s)
        before = standing(cluster)
        _rounds(trial, args, say)
        after = standing(cluster)
        weights, losses = undisturbed(cluster, trial.rounds)
        difference = apart(trial.training.state_dict(), weights)
    left = _left()
    same = max(map(abs, map(float.__sub__, trial.heard.losses, losses)), default=0.0) if len(losses) else 0.0
    right = not trial.wrong and not left and max(difference, same) < 1e-9 and len(trial.heard.losses) == len(losses)
    right = right and trial.in_time()
    say(
        faults=dict(Counter({kind: len(found) for kind, found in trial.told_s.items()})),
        told={kind: _spread(found) for kind, found in trial.told_s.items()},
        told_but_stopped=_spread([s for kind, found in trial.told_s.items() if kind != "stop" for s in found] or [0]),
        healed={how: _spread(found) for how, found in trial.healed_s.items()},
        steps=len(losses), done_again=trial.heard.steps - len(losses), difference=difference, wrong=trial.wrong,
        before=before, after=after, left=left, right=right,
    )  # fmt: skip
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
