"""Finds the plan for a model, an image and a cluster: all plans are predicted, the best of them measured for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from engines.errors import PlanError
from engines.layer.graph import ModelGraph, TensorSpec
from engines.optimiser_trial import count_states
from engines.optimisers import collect_parameter_specs
from engines.plan import Plan
from engines.predict.explain import Explanation, explain
from engines.predict.forecast import Forecast, compute_throughput
from engines.predict.machine import Machine
from engines.predict.search import search
from engines.training import Loss, Optimiser, Recipe, prepare, sgd, trace_model
from mpi4dl_nb.plan_benchmark import Measurement, PlanTrial, ProgressCallback, ignore_progress, run_interleaved

if TYPE_CHECKING:
    from mpi4dl_nb.cluster import Cluster

__all__ = [
    "Candidate",
    "PlanSearchResult",
    "PlanTuner",
    "TuningResult",
    "count_optimiser_states",
    "make_progress_bar",
    "replace_measured",
    "sort_candidates",
    "tune",
]


@dataclass(frozen=True)
class Candidate:
    """A plan, what it is predicted to cost, and what it was measured to cost, or why it could not be."""

    forecast: Forecast
    measured: Measurement | None = None
    failure: str = ""

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.forecast.plan

    @property
    def predicted_images_per_s(self) -> float:
        """By simulation."""
        return self.forecast.images_per_s

    @property
    def images_per_s(self) -> float | None:
        """As measured, None where it was not."""
        return self.forecast.images / self.measured.median_s if self.measured else None

    @property
    def predicted_bytes(self) -> int:
        """Of the fullest rank."""
        return self.forecast.peak_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest rank as measured, None where it was not."""
        return max(self.measured.peak_bytes) if self.measured else None

    def compute_pace(self, neutral_batch: int | None) -> float:
        """Images per second that count, as measured; 0 where nothing was."""
        return compute_throughput(self.forecast.images, self.measured.median_s, neutral_batch) if self.measured else 0.0


@dataclass(frozen=True)
class TuningResult:
    """All candidates, best first: the measured ones by what was measured, behind them the others by prediction.

    `refused` are plans that cannot run, and why; `explanation` says what was predicted of each kind of parallelism.
    """

    candidates: tuple[Candidate, ...]
    machine: Machine
    explanation: Explanation
    refused: tuple[tuple[Plan, str], ...] = ()

    @property
    def best(self) -> Candidate:
        """The first one."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.best.plan

    def __repr__(self) -> str:
        measured = [each for each in self.candidates if each.measured]
        return f"<Tuned: {len(self.candidates)} plans, {len(measured)} measured; best: {self.plan.summary}>"

    def _repr_html_(self) -> str:
        from mpi4dl_nb.draw.tuning import format_table_html

        return format_table_html(self.candidates) + self.explanation._repr_html_()


@dataclass(frozen=True)
class PlanSearchResult:
    """All plans that fit, the fastest first, why these, and those that cannot run."""

    candidates: tuple[Candidate, ...]
    explanation: Explanation
    refused: tuple[tuple[Plan, str], ...]


@dataclass
class PlanTuner:
    """A model and images whose plans are looked for, on a cluster; graphs are traced once for each micro-batch."""

    model: nn.Module
    image_shape: Sequence[int]
    cluster: Cluster
    loss: Loss | None = None
    optimiser: Optimiser = sgd
    labels: TensorSpec | Tensor | None = None
    device: str = "auto"
    _graphs: dict[tuple[int, int, str], ModelGraph] = field(default_factory=dict)

    def get_graph(self, plan: Plan) -> ModelGraph:
        """The traced micro-batch of a plan."""
        key = plan.parts, plan.local_dp, plan.precision
        if key not in self._graphs:
            loss = self.loss or nn.CrossEntropyLoss()
            self._graphs[key] = trace_model(self.model, plan, self.image_shape, loss, self.labels, self.device)
        return self._graphs[key]

    def find(
        self, rank_bytes: int | None = None, seen: ProgressCallback = ignore_progress, neutral_batch: int | None = None
    ) -> PlanSearchResult:
        """All plans for the cluster's ranks, predicted.

        `rank_bytes`: what a rank may use, an equal share of the machine's memory if it is None. `neutral_batch`: as in
        `tune`. Raises PlanError where no plan can run.
        """
        if neutral_batch is not None and neutral_batch < 1:
            raise PlanError(
                f"neutral_batch={neutral_batch} must be 1 image or more, or None where any number is right."
            )
        machine = self.cluster.calibrate()
        if rank_bytes is None:
            rank_bytes = machine.get_rank_bytes(self.cluster.n)
        states = count_optimiser_states(self.optimiser, self.model, self.loss)
        found = search(
            self.cluster.n, self.image_shape[0], self.get_graph, machine, rank_bytes, states, seen,
            neutral_batch=neutral_batch,
        )  # fmt: skip
        return PlanSearchResult(tuple(map(Candidate, found.fitting)), explain(found, rank_bytes), found.refused)

    def measure(
        self,
        candidates: Sequence[Candidate],
        steps: int = 3,
        seen: ProgressCallback = ignore_progress,
        count_bytes: bool = True,
    ) -> list[Candidate]:
        """The same ones, trained for some steps on the ranks. A plan that fails is told with its failure."""
        trials = [PlanTrial(self.cluster, self._make_recipe_factory(each.plan)) for each in candidates]
        run_interleaved(trials, steps, seen, count_bytes)
        return [
            replace(each, measured=trial.measured, failure=trial.failure)
            for each, trial in zip(candidates, trials, strict=True)
        ]

    def _make_recipe_factory(self, plan: Plan) -> Callable[[], Recipe]:
        return lambda: prepare(
            self.model, plan, self.image_shape, self.loss, self.optimiser, self.labels, self.device,
            graph=self.get_graph(plan),
        )  # fmt: skip


def tune(
    model: nn.Module,
    image_shape: Sequence[int],
    cluster: Cluster,
    loss: Loss | None = None,
    optimiser: Optimiser = sgd,
    labels: TensorSpec | Tensor | None = None,
    device: str = "auto",
    top: int = 4,
    steps: int = 3,
    rank_bytes: int | None = None,
    progress: bool = True,
    neutral_batch: int | None = None,
) -> TuningResult:
    """The plan that trains most images per second on all ranks of the cluster.

    Every plan that makes sense for them is predicted on the machine as calibrated; of those that fit into `rank_bytes`
    of each rank (None: its share of the machine's memory), the `top` ones are trained for `steps` steps of random
    images, in turns. Where updates of more than `neutral_batch` images would cost accuracy, what counts is the time for
    so many: a plan whose step has more gains nothing by it, one with fewer takes several steps for an update.
    The rest as in `Training`. `.plan` is the best, and `.explanation` says in words what was predicted of each kind of
    parallelism; the result shows itself as a table, with these words.
    Raises PlanError where no plan can run or fits, TraceError, or RankError where the ranks are lost.

    >>> from engines.models import resnet20_v1
    >>> from mpi4dl_nb import Cluster, tune
    >>> with Cluster(2) as cluster:
    ...     tuned = tune(resnet20_v1(), (2, 3, 64, 64), cluster, top=1, steps=1, progress=False)
    >>> tuned.plan.ranks
    2
    """
    if top < 0 or steps < 1:
        raise PlanError(f"top={top} plans are to be measured for steps={steps}: use 0 or more plans, 1 or more steps.")
    tuning = PlanTuner(model, image_shape, cluster, loss, optimiser, labels, device)
    with make_progress_bar("plans predicted", progress) as seen:
        found = tuning.find(rank_bytes, seen, neutral_batch)
    measured: list[Candidate] = []
    if top:
        with make_progress_bar("steps measured", progress) as seen:
            measured = tuning.measure(found.candidates[:top], steps, seen)
    candidates = sort_candidates([*measured, *found.candidates[top:]], neutral_batch)
    return TuningResult(candidates, cluster.calibrate(), found.explanation, found.refused)


@contextmanager
def make_progress_bar(unit: str, progress: bool = True) -> Iterator[ProgressCallback]:
    """A bar of how far it is, which is gone in the end."""
    with tqdm(unit=f" {unit}", disable=not progress, leave=False) as shown:

        def report_progress(done: int, of: int) -> None:
            shown.total = of
            shown.update(done - shown.n)

        yield report_progress


def sort_candidates(candidates: Iterable[Candidate], neutral_batch: int | None = None) -> tuple[Candidate, ...]:
    """The measured ones by what was measured, then the others by prediction; those that failed last."""

    def get_sort_key(each: Candidate) -> tuple[bool, float, float]:
        return bool(each.failure), -each.compute_pace(neutral_batch), -each.forecast.compute_throughput(neutral_batch)

    return tuple(sorted(candidates, key=get_sort_key))


def count_optimiser_states(optimiser: Optimiser, model: nn.Module, loss: object = None) -> int:
    """How many numbers an optimiser keeps for each weight of a model and its loss after a step. Raises PlanError.

    >>> count_optimiser_states(sgd, nn.Conv2d(3, 8, 3))
    1
    """
    return count_states(optimiser, collect_parameter_specs(model, loss, torch.float32))


def replace_measured(candidates: Iterable[Candidate], measured: Iterable[Candidate]) -> list[Candidate]:
    """The candidates, with those in the place of others whose plans were measured (again)."""
    by_plan = {each.plan: each for each in measured}
    return [by_plan.get(each.plan, each) for each in candidates]
