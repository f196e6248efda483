"""The live tensors of ranks while they train, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.predict.kernel_effects import LiveBytes
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches


def get_live_values(worker: Worker) -> dict[str, Tensor]:
    """The values of the current micro-batch that the rank holds now, by name."""
    state = worker._get_micro_batch(None)
    return {name: state.fetch(tensor) for name, tensor in {**state.leaves, **state.values}.items()}


@dataclass(frozen=True)
class Measured:
    program: Program
    peak_bytes: int
    peak_step: int
    after: tuple[int, ...]


def measure_live_bytes(recipe: Recipe) -> list[Measured]:
    """Of each rank in its third step: gradients and the optimiser's state are there from the second one on."""
    batch = make_batches(recipe, 0, steps=1)[0]

    def work(world):
        own = RankTraining(world, recipe).cut(batch)
        with LiveBytes() as live:
            training = RankTraining(world, recipe)
            for _ in range(2):
                training.step(own)
            training.start(own)
            live.reset_peak()
            return _measure_steps(training, live)

    return run_ranks(recipe.plan.ranks, work)


def _measure_steps(training: RankTraining, live: LiveBytes) -> Measured:
    after, peak_step = [], 0
    for index in range(len(training.program.steps)):
        before = live.peak
        training.worker.step()
        peak_step = index if live.peak > before else peak_step
        after.append(live.now)
    return Measured(training.program, live.peak, peak_step, tuple(after))
