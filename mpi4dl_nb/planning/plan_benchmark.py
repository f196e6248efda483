"""Measure plans on the ranks of a cluster: some interleaved, timed steps on random images, and their peak memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.engines.predict.candidates import Measurement
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import cut_inputs
from mpi4dl_nb.engines.train.verify import make_batches
from mpi4dl_nb.status_line import ProgressCallback


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
        """Run two training steps on all ranks and time the second one. Raises RankError if a rank has died.

        The first step refills the caches that other plans have evicted. The first turn creates the training; the `last`
        one counts bytes instead.
        """
        if self.failure:
            return
        try:
            if not self._inputs:
                recipe = self.recipe()
                whole = make_batches(recipe, 0, steps=1)[0]
                recipes = [(recipe.restrict_to_rank(program),) for program in recipe.programs]
                self.cluster.call(rank_functions.create, self.name, (), self.name, per_rank=recipes)
                self._inputs = [(cut_inputs(program, whole),) for program in recipe.programs]
            if last:
                peaks = self.cluster.call(rank_functions.measure_bytes, self.name, per_rank=self._inputs)
                self.peak_bytes = tuple(peaks)
            else:
                # A step is over when the slowest rank is.
                self._seconds.append(max(self.cluster.call(rank_functions.time_step, self.name, per_rank=self._inputs)))
        except Mpi4dlError as error:
            if self.cluster.dead:  # no other plan can be measured either
                raise
            self.failure = str(error)


def run_interleaved(
    trials: Sequence[PlanTrial], steps: int, report: ProgressCallback = lambda done, of: None, count_bytes: bool = True
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
                report(turn * len(trials) + index + 1, rounds * len(trials))
    finally:
        for trial in trials:
            try:
                trial.cluster.call(rank_functions.drop, trial.name)
            except Mpi4dlError as error:  # lost ranks hold nothing to free
                trial.failure = trial.failure or str(error)
