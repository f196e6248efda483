"""The training that faults befall: a model, its plan and data, and what a watcher hears of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.training_events import Recovered, StepResult, TrainingEvent
from mpi4dl_nb.training.training import Training

PLAN = Plan(split_size=2, spatial_size=1, num_spatial_parts=4, parts=2, precision="float64")
SHAPE = (2, 3, 32, 32)


def make_model() -> nn.Module:
    """Halos, sums over tiles, and a stage behind them."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def make_batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Of noise."""
    made = torch.Generator().manual_seed(seed)
    return [(torch.rand(SHAPE, generator=made), torch.randint(0, 4, (SHAPE[0],), generator=made)) for _ in range(count)]


class Heard:
    """A watcher: what was healed, and the losses that count."""

    stops = False

    def __init__(self) -> None:
        self.healed: list[Recovered] = []
        self.losses: list[float] = []
        self.steps = 0

    def begin(self, training: Training, total: int | None) -> None:
        """Losses of several calls of `fit` follow on each other."""
        self.before = len(self.losses)

    def handle_event(self, event: TrainingEvent) -> None:
        """Losses of steps that are done again are forgotten."""
        if isinstance(event, StepResult):
            self.losses.append(event.loss)
            self.steps += 1
        if isinstance(event, Recovered):
            self.healed.append(event)
            del self.losses[self.before + event.steps :]

    def end(self, outcome: object) -> None:
        """Whatever it is."""
