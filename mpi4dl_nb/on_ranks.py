"""What the ranks of a cluster do for a `Training`, which they keep by its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engines.bench.verify import rank_record
from engines.checkpoint import load as loading
from engines.checkpoint import save as saving
from engines.host import while_walking
from engines.oracle import Record
from engines.program.worker import Inputs
from engines.train import Heard, stepped
from engines.training import RankTraining, Recipe, StepReport
from mpi4dl_nb.courses import end, held

if TYPE_CHECKING:
    from engines.host import Host

__all__ = ["add_size", "create", "drop", "holds", "load", "record", "save", "step", "tensors"]


def create(host: Host, name: str, recipe: Recipe) -> None:
    host.trainings[name] = RankTraining(host.world, recipe)


def add_size(host: Host, name: str, recipe: Recipe) -> None:
    held(host, name).add_size(recipe)


def holds(host: Host, name: str) -> bool:
    return name in host.trainings


def step(host: Host, name: str, images: int, steps: int, inputs: Inputs) -> tuple[StepReport, Heard]:
    return stepped(held(host, name, steps), inputs, images)


def record(host: Host, recipe: Recipe, parts: list[Inputs]) -> Record:
    return rank_record(RankTraining(host.world, recipe), parts)


@while_walking
def tensors(host: Host, name: str, steps: int) -> dict[str, dict[str, Tensor]]:
    return held(host, name, steps).tensors()


def save(host: Host, name: str, folder: Path, feed: Any, keep: int, steps: int) -> Path:
    training = held(host, name, steps)
    training.give_up()
    return saving.save(training, folder, feed, keep)


def load(host: Host, name: str, path: Path) -> None:
    loading.load(held(host, name), path)


def drop(host: Host, name: str) -> None:
    end(host, name)
    host.trainings.pop(name, None)
