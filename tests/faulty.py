"""A training that faults befall: what ranks do to themselves in the midst of it, and how it is told of."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.host import Host
from engines.plan import Plan
from engines.report import Event, Healed, Told
from mpi4dl_nb.training import Training

KINDS = ("raise", "kill", "exit", "stop", "interrupt")
DEADLY = ("kill", "exit", "stop")

PLAN = Plan(split_size=2, spatial_size=1, num_spatial_parts=4, parts=2, precision="float64")
SHAPE = (2, 3, 32, 32)


def model() -> nn.Module:
    """Halos, sums over tiles, and a stage behind them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def batches(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of noise."""
    made = torch.Generator().manual_seed(seed)
    return [(torch.rand(SHAPE, generator=made), torch.randint(0, 4, (SHAPE[0],), generator=made)) for _ in range(count)]


@dataclass(frozen=True)
class Fault:
    """`rank` comes to harm as it begins the instruction `at`, counted from now; it leaves a note when in `note`.

    The others have `pause_s` to go on, before.
    """

    kind: str
    rank: int
    at: int
    note: Path
    notebook: int = 0
    pause_s: float = 0.0

    @classmethod
    def drawn(cls, draw: random.Random, kinds: tuple[str, ...], training: Training, steps: int, note: Path) -> Fault:
        """Some time in the next steps."""
        rank = draw.randrange(training.cluster.n)
        at = draw.randrange(steps * len(training.programs[rank].steps))
        note.unlink(missing_ok=True)
        return cls(draw.choice(kinds), rank, at, note, os.getpid())


def inject(host: Host, name: str, fault: Fault) -> None:
    """Have the fault happen to a rank. Called on all of them."""
    if host.world.rank != fault.rank:
        return
    worker = host.trainings[name].worker
    step, left = worker.step, [fault.at]

    def faulty() -> Any:
        if left[0] == 0:
            worker.step = step
            time.sleep(fault.pause_s)
            fault.note.write_text(repr(time.time()))
            _happen(fault)
        left[0] -= 1
        return step()

    worker.step = faulty


def _happen(fault: Fault) -> None:
    match fault.kind:
        case "raise":
            raise ValueError("a fault")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "interrupt":
            os.kill(fault.notebook, signal.SIGINT)


class Heard:
    """A watcher: what was healed, and the losses that count."""

    stops = False

    def __init__(self) -> None:
        self.healed: list[Healed] = []
        self.losses: list[float] = []
        self.steps = 0

    def begin(self, training: Training, total: int | None) -> None:
        """Losses of several calls of `fit` follow on each other."""
        self.before = len(self.losses)

    def heard(self, event: Event) -> None:
        """Losses of steps that are done again are forgotten."""
        if isinstance(event, Told):
            self.losses.append(event.loss)
            self.steps += 1
        if isinstance(event, Healed):
            self.healed.append(event)
            del self.losses[self.before + event.steps :]

    def end(self, outcome: object) -> None:
        """Whatever it is."""
