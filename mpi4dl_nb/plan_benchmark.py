"""Measure plans on the ranks of a cluster: some interleaved, timed steps on random images, and their peak memory."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engines.comm.streams import wait_for_device
from engines.errors import Mpi4dlError
from engines.predict.kernel_effects import LiveBytes
from engines.program.compile import compile_plan
from engines.program.worker import Inputs
from engines.train.training import RankTraining, Recipe, cut_inputs
from engines.train.verify import make_batches

if TYPE_CHECKING:
    from engines.comm.rank_server import RankServer
    from mpi4dl_nb.cluster import Cluster

__all__ = ["Measurement", "PlanTrial", "ProgressCallback", "ignore_progress", "run_interleaved"]

ProgressCallback = Callable[[int, int], None]
"""Called with the amount done and the total."""


def ignore_progress(done: int, of: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Measurement:
    """Seconds of each timed step, and peak bytes of tensors by rank."""

    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def median_s(self) -> float:
        """Median time of a step, in seconds."""
        return statistics.median(self.seconds)


@dataclass
class PlanTrial:
    """Measurement of one plan in progress; `failure` is the reason if it failed."""

    cluster: Cluster
    recipe: Callable[[], Recipe]
    failure: str = ""
    peak_bytes: tuple[int, ...] = ()
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    _seconds: list[float] = field(default_factory=list)
    _inputs: list[tuple[Inputs]] = field(default_factory=list)

    @property
    def measured(self) -> Measurement | None:
        """The measurement; None if it failed."""
        return None if self.failure else Measurement(tuple(self._seconds), self.peak_bytes)

    def run_turn(self, last: bool = False) -> None:
        """Run two training steps on all ranks and time the second one.

        The first step refills the caches that other plans have evicted. The first turn creates the training; the `last`
        one counts bytes instead.
        """
        if self.failure:
            return
        try:
            if not self._inputs:
                recipe = self.recipe()
                programs = compile_plan(recipe.graph, recipe.plan)
                whole = make_batches(recipe, 0, steps=1)[0]
                own = [(recipe.restrict_to_rank(program),) for program in programs]
                self.cluster.call(_create, self.name, per_rank=own)
                self._inputs = [(cut_inputs(program, whole),) for program in programs]
            if last:
                self.peak_bytes = tuple(self.cluster.call(_measure_bytes, self.name, per_rank=self._inputs))
            else:
                # A step is over when the slowest rank is.
                self._seconds.append(max(self.cluster.call(_time_step, self.name, per_rank=self._inputs)))
        except Mpi4dlError as error:
            self.failure = str(error)


def run_interleaved(
    trials: Sequence[PlanTrial], steps: int, seen: ProgressCallback = ignore_progress, count_bytes: bool = True
) -> None:
    """Run the trials in turns, so that all meet the same disturbances, and free them on the ranks in the end.

    Each trial takes `steps` timed turns, and one that counts bytes.
    """
    rounds = steps + count_bytes
    # In turns rather than one plan after another: what disturbs the machine for a while disturbs all plans alike.
    #
    #     plan  A B C   A B C   A B C   A B C
    #           time    time    time    bytes
    try:
        for turn in range(rounds):
            for index, trial in enumerate(trials):
                trial.run_turn(last=turn == steps)
                seen(turn * len(trials) + index + 1, rounds * len(trials))
    finally:
        for trial in trials:
            try:
                trial.cluster.call(_drop, trial.name)
            except Mpi4dlError as error:  # lost ranks hold nothing to free
                trial.failure = trial.failure or str(error)


def _create(host: RankServer, name: str, recipe: Recipe) -> None:
    host.trainings[name] = RankTraining(host.world, recipe)


def _time_step(host: RankServer, name: str, inputs: Inputs) -> float:
    training = host.trainings[name]
    training.step(inputs)  # fills the caches that the other plans have evicted
    host.world.barrier()
    start_s = time.perf_counter()
    training.step(inputs)
    wait_for_device(training.device)
    return time.perf_counter() - start_s


def _measure_bytes(host: RankServer, name: str, inputs: Inputs) -> int:
    """Return the peak bytes of tensors in a step of a newly created training, so that all of them are counted.

    Segments are not compiled here: allocations inside a compiled function cannot be counted.
    """
    made = host.trainings.pop(name).recipe
    recipe = replace(made, plan=replace(made.plan, compile_segments=False))
    with LiveBytes() as live:
        training = host.trainings[name] = RankTraining(host.world, recipe)
        for _ in range(2):
            training.step(inputs)
        live.reset_peak()
        training.step(inputs)
    return live.peak


def _drop(host: RankServer, name: str) -> None:
    host.trainings.pop(name, None)
