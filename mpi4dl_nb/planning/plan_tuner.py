"""Find the best plan for a model, an image size and a cluster: predict all plans, then measure the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor, nn

from mpi4dl_nb.cluster.calibrate_cluster import warn_of_gpus
from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.draw.tuning import describe_measurements, format_table_html
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.candidates import Candidate, sort_candidates
from mpi4dl_nb.engines.predict.explain import Explanation, explain
from mpi4dl_nb.engines.predict.forecast import Forecast, check_order
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.search import generate_plans, search
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.recipe import Recipe, Task, sgd
from mpi4dl_nb.planning.plan_benchmark import PlanTrial, run_interleaved
from mpi4dl_nb.status_line import ProgressCallback, show_counts

_LIKELY_SHARE = 0.5  # of the best predicted speed: some predictions were twice the measured speed


@dataclass(frozen=True)
class TuningResult:
    """All candidates, best first: the measured ones by their measurements, then the others by their predictions.

    `machine` is the calibration of the ranks. `explanation` says what was measured, and what is predicted for each kind
    of parallelism. `refused` holds the plans that cannot run, with the reasons, and `too_large` the forecasts of those
    that do not fit into a rank's memory.

    >>> from mpi4dl_nb import Cluster, PlanTuner, TuningResult, resnet20_v1
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     machine = cluster.calibrate(quick=True, accept_noise=True, progress=False)
    ...     found = PlanTuner(resnet20_v1(), (2, 3, 64, 64), cluster).find(progress=False)
    >>> isinstance(found, TuningResult), found.plan.ranks
    (True, 2)
    """

    candidates: tuple[Candidate, ...]
    machine: Machine
    explanation: Explanation
    refused: tuple[tuple[Plan, str], ...] = ()
    too_large: tuple[Forecast, ...] = ()

    @property
    def best(self) -> Candidate:
        """The best candidate."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """The best plan."""
        return self.best.plan

    def __repr__(self) -> str:
        measured = [candidate for candidate in self.candidates if candidate.measured]
        return f"<Tuned: {len(self.candidates)} plans, {len(measured)} measured; best: {self.plan.summary}>"

    def _repr_html_(self) -> str:
        return format_table_html(self.candidates) + self.explanation._repr_html_()


@dataclass
class PlanTuner:
    """Searches plans for a model and images on a cluster. Graphs are traced once per micro-batch size.

    >>> from mpi4dl_nb import Candidate, Cluster, Plan, PlanTuner, forecast, resnet20_v1
    >>> model, plan, image_shape = resnet20_v1(), Plan(split_size=2, spatial_size=0), (2, 3, 32, 32)
    >>> predicted = Candidate(forecast(model, plan, image_shape, "Summit"))
    >>> with Cluster(2, backend="loopback") as cluster:
    ...     (found,) = PlanTuner(model, image_shape, cluster).measure([predicted], steps=1)
    >>> found.peak_bytes > 10**6
    True
    """

    model: nn.Module
    image_shape: Sequence[int]
    cluster: Cluster
    loss: Loss | None = None
    optimiser: Optimiser = sgd
    labels: TensorSpec | Tensor | None = None
    device: str = "auto"

    @cached_property
    def task(self) -> Task:
        """What is trained; all plans share its traces."""
        return Task.of(self.model, self.image_shape, self.loss, self.optimiser, self.labels, self.device)

    def find(
        self,
        rank_bytes: int | None = None,
        report: ProgressCallback = lambda done, of: None,
        neutral_batch: int | None = None,
        progress: bool = True,
        by: str = "speed",
    ) -> TuningResult:
        """Predict all plans for the ranks of the cluster; no plan is measured.

        `rank_bytes` is the memory that a rank may use; None: an equal share of the machine's memory. `neutral_batch`
        and `by`: as in `tune`. `progress`: show that of the calibration, if the cluster is not calibrated yet. Raises
        PlanError if no plan can run, and TraceError if the model cannot be traced with the loss.
        """
        if neutral_batch is not None and neutral_batch < 1:
            raise PlanError(
                f"neutral_batch={neutral_batch} must be 1 image or more, or None where any number is right."
            )
        check_order(by)
        # What cannot be trained is refused before the calibration, which takes a minute: a model, say, of which neither
        # one image of a batch nor all of them can be traced.
        n, batch = self.cluster.n, self.task.traces.image_shape[0]
        states, traces = self.task.count_optimiser_states(), self.task.traces
        whole = Plan(split_size=1, spatial_size=0)
        try:
            traces.get_graph(replace(whole, parts=batch))
        except (PlanError, TraceError):
            traces.get_graph(whole)
        machine = self.cluster.calibrate(progress=progress)
        warn_of_gpus(self.cluster.call, self.device)
        if rank_bytes is None:
            rank_bytes = machine.get_rank_bytes(n)
        asked = list(generate_plans(n, batch, len(traces.image_shape) - 2))
        # Where a model cannot be traced, `search` reports why.
        result = search(n, batch, traces.get_graph, machine, rank_bytes, states, report, asked, neutral_batch, by)
        explanation = explain((*result.fitting, *result.too_large), result.refused, rank_bytes, neutral_batch, by)
        candidates = tuple(map(Candidate, result.fitting))
        return TuningResult(candidates, machine, explanation, result.refused, result.too_large)

    def measure(
        self,
        candidates: Sequence[Candidate],
        steps: int = 3,
        report: ProgressCallback = lambda done, of: None,
        count_bytes: bool = True,
    ) -> list[Candidate]:
        """Measure candidates by training some steps on the ranks. A plan that fails is returned with its failure.

        Raises PlanError if there is no step to measure.
        """
        _check_steps(steps)
        trials = [PlanTrial(self.cluster, partial(self.make_recipe, candidate.plan)) for candidate in candidates]
        run_interleaved(trials, steps, report, count_bytes)
        pairs = zip(candidates, trials, strict=True)
        return [replace(candidate, measured=trial.measured, failure=trial.failure) for candidate, trial in pairs]

    def make_recipe(self, plan: Plan) -> Recipe:
        """Return the recipe of a training under a plan."""
        return self.task.prepare(plan)


def order_for_measurement(candidates: Sequence[Candidate], explanation: Explanation) -> list[Candidate]:
    """Return candidates, best first, in the order to measure them: the best of each kind that may be fastest go first.

    The errors of predictions are similar within a kind: if its best plan is slower than predicted, so are the others.
    """
    likely = [verdict.plan for verdict in explanation.verdicts if verdict.fits and verdict.share >= _LIKELY_SHARE]
    return sorted(candidates, key=lambda candidate: candidate.plan not in likely)


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise PlanError(f"steps={steps} of each plan are to be measured: use 1 or more steps.")


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
    by: str = "speed",
) -> TuningResult:
    """Find the plan that trains most images per second on all ranks of the cluster, or that needs least memory.

    `rank_bytes=8 * 10**9` asks for the fastest plan whose ranks need at most 8 GB each, and `by="memory"` for the plan
    whose fullest rank needs least; then each plan may recompute activations (`checkpoint_activations`), which takes
    time.
    The other arguments are those of `Training`: the first number of `image_shape` is the batch of one replica, and a
    plan with several replicas or directions takes several batches per step (`Plan.batches`). If an update of more than
    so many images costs accuracy, name that number as `neutral_batch`: plans are then compared by the time for that
    many images, so that one with more images per step gains nothing by it, and one with fewer takes several steps.

    Every plan that makes sense for the ranks is predicted on the machine as calibrated. A cluster that was never
    calibrated is calibrated first, which takes a minute; on a busy machine that is done quickly, with a warning. Of
    those that fit into `rank_bytes` per rank (None: its share of the machine's memory), `top` are trained, interleaved,
    for `steps` steps on random images: the best of each kind of parallelism that is predicted to be at least half as
    good as the best of all, then the others, best first.

    `.plan` of the result is the best plan, and `.explanation` says what was measured, and what is predicted for each
    kind of parallelism; a notebook shows the result as a table with this text. Raises PlanError if no plan can run or
    fits, TraceError, or RankError if the ranks are lost.

    >>> from mpi4dl_nb import Cluster, resnet20_v1, tune
    >>> with Cluster(2) as cluster:
    ...     tuned = tune(resnet20_v1(), (2, 3, 64, 64), cluster, top=1, steps=1, progress=False)
    >>> tuned.plan.ranks
    2
    """
    if top < 0:
        raise PlanError(f"top={top} plans are to be measured: use 0 or more plans.")
    _check_steps(steps)
    check_order(by)
    # Predictions are cheap and rank hundreds of plans, but may be wrong: a few good ones of all kinds are measured.
    #
    #     all plans for n ranks ── trace, compile, simulate ──> fastest first ── `top` of them, trained ──> best first
    tuning = PlanTuner(model, image_shape, cluster, loss, optimiser, labels, device)
    with show_counts("Predicting plans", progress) as report:
        tuned = tuning.find(rank_bytes, report, neutral_batch, progress, by)
    ordered = order_for_measurement(tuned.candidates, tuned.explanation)
    measured: list[Candidate] = []
    if top:
        with show_counts("Measuring steps", progress) as report:
            measured = tuning.measure(ordered[:top], steps, report)
    candidates = sort_candidates([*measured, *ordered[top:]], neutral_batch, by)
    explanation = replace(tuned.explanation, measured=describe_measurements(measured, neutral_batch, by))
    return replace(tuned, candidates=candidates, explanation=explanation)
