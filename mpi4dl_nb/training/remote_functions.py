"""Functions that run on the ranks for a `Training`, which each rank stores by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engines.comm.rank_server import allow_during_step
from engines.program.worker import Inputs
from engines.train import checkpoint_load as loading
from engines.train import checkpoint_save as saving
from engines.train.oracle import TrainingRecord
from engines.train.train_loop import RankStepStats, run_step
from engines.train.training import RankTraining, Recipe, StepReport
from engines.train.verify import record_rank_run
from mpi4dl_nb.training.loops import end_rank_loop, get_rank_training

if TYPE_CHECKING:
    from engines.comm.rank_server import RankServer

__all__ = ["add_size", "create", "drop", "get_tensors", "has_training", "load", "record_reference", "save", "step"]

# Each function takes the rank's own RankServer first, which holds its trainings by the names that the notebook gave
# them. `steps` is the notebook's count of updates: a rank that has done more or fewer refuses.


def create(host: RankServer, name: str, recipe: Recipe) -> None:
    host.trainings[name] = RankTraining(host.world, recipe)


def add_size(host: RankServer, name: str, recipe: Recipe) -> None:
    get_rank_training(host, name).add_size(recipe)


def has_training(host: RankServer, name: str) -> bool:
    return name in host.trainings


def step(host: RankServer, name: str, images: int, steps: int, inputs: Inputs) -> tuple[StepReport, RankStepStats]:
    return run_step(get_rank_training(host, name, steps), inputs, images)


def record_reference(host: RankServer, recipe: Recipe, parts: list[Inputs]) -> TrainingRecord:
    return record_rank_run(RankTraining(host.world, recipe), parts)


@allow_during_step
def get_tensors(host: RankServer, name: str, steps: int) -> dict[str, dict[str, Tensor]]:
    return get_rank_training(host, name, steps).copy_tensors()


def save(host: RankServer, name: str, folder: Path, feed: Any, keep: int, steps: int) -> Path:
    training = get_rank_training(host, name, steps)
    training.abort_step()
    return saving.save(training, folder, feed, keep)


def load(host: RankServer, name: str, path: Path) -> None:
    loading.load(get_rank_training(host, name), path)


def drop(host: RankServer, name: str) -> None:
    end_rank_loop(host, name)
    host.trainings.pop(name, None)
