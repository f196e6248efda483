"""Measure plans on the ranks of a cluster: some interleaved, timed steps on random images, and their peak memory."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import Mpi4dlError
from mpi4dl_nb.engines.formatting import FactTable, format_bytes, format_number, format_seconds
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast, compute_throughput
from mpi4dl_nb.engines.program.worker import Inputs
from mpi4dl_nb.engines.server import rank_functions
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import cut_inputs
from mpi4dl_nb.engines.train.verify import make_batches
from mpi4dl_nb.status_line import ProgressCallback


@dataclass(frozen=True, repr=False)
class Measurement(FactTable):
    """Seconds of each timed step, and peak bytes of tensors by rank."""

    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def facts(self) -> dict[str, object]:
        return {
            "median time of a step": format_seconds(self.median_s),
            "steps": len(self.seconds),
            "memory of the fullest rank": format_bytes(max(self.peak_bytes)) if self.peak_bytes else "not counted",
        }

    @property
    def median_s(self) -> float:
        """Median time of a step, in seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, repr=False)
class Candidate(FactTable):
    """A plan with its predicted cost and, if it was measured, its measured cost or the reason for its failure.

    >>> from mpi4dl_nb import Candidate, Plan, forecast, resnet20_v1
    >>> plan = Plan(split_size=2, spatial_size=0)
    >>> predicted = Candidate(forecast(resnet20_v1(), plan, (2, 3, 64, 64), "Summit"))
    >>> predicted.predicted_bytes > 10**6, predicted.peak_bytes
    (True, None)
    """

    forecast: Forecast
    measured: Measurement | None = None
    failure: str = ""

    @property
    def facts(self) -> dict[str, object]:
        measured = {} if self.images_per_s is None else {"measured": f"{format_number(self.images_per_s)} images/s"}
        memory = (
            {}
            if not self.measured or not self.measured.peak_bytes
            else {"measured memory": format_bytes(self.peak_bytes)}
        )
        return {
            "plan": self.plan.summary,
            **({"failed": self.failure} if self.failure else {}),
            **measured,
            "predicted": f"{format_number(self.predicted_images_per_s)} images/s",
            **memory,
            "predicted memory": format_bytes(self.predicted_bytes),
        }

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.forecast.plan

    @property
    def predicted_images_per_s(self) -> float:
        """Images per second by simulation."""
        return self.forecast.images_per_s

    @property
    def images_per_s(self) -> float | None:
        """Images per second as measured; None if not measured."""
        return self.forecast.images / self.measured.median_s if self.measured else None

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak memory of the fullest rank, in bytes."""
        return self.forecast.peak_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak memory of the fullest rank, in bytes; None if not measured."""
        return max(self.measured.peak_bytes, default=None) if self.measured else None

    def compute_pace(self, neutral_batch: int | None) -> float:
        """Return the measured throughput in images per second, as limited by `neutral_batch`; 0 if not measured."""
        return compute_throughput(self.forecast.images, self.measured.median_s, neutral_batch) if self.measured else 0.0


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
                programs = compile_plan(recipe.graph, recipe.plan)
                whole = make_batches(recipe, 0, steps=1)[0]
                recipes = [(recipe.restrict_to_rank(program),) for program in programs]
                self.cluster.call(rank_functions.create, self.name, (), self.name, per_rank=recipes)
                self._inputs = [(cut_inputs(program, whole),) for program in programs]
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


def sort_candidates(
    candidates: Iterable[Candidate], neutral_batch: int | None = None, by: str = "speed"
) -> tuple[Candidate, ...]:
    """Sort candidates, the best first `by` speed or memory (see `search`).

    The measured ones are sorted by measurement, then the others by prediction, and those that failed are last.
    """

    def get_sort_key(each: Candidate) -> tuple[float, ...]:
        pace, predicted = -each.compute_pace(neutral_batch), each.forecast.get_sort_key(by, neutral_batch)
        if by == "memory":
            measured_bytes = each.peak_bytes or each.predicted_bytes
            return bool(each.failure), not each.measured, measured_bytes, pace, *predicted
        return bool(each.failure), pace, *predicted

    return tuple(sorted(candidates, key=get_sort_key))


def replace_measured(candidates: Iterable[Candidate], measured: Iterable[Candidate]) -> list[Candidate]:
    """Replace those candidates whose plans were measured (again)."""
    by_plan = {candidate.plan: candidate for candidate in measured}
    return [by_plan.get(candidate.plan, candidate) for candidate in candidates]
