"""The cost of plans before a cluster is started: a forecast, and a cache of compiled plans for one model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from engines.graph.model_graph import ModelGraph
from engines.graph.trace_cache import Loss, TraceCache
from engines.plan import Plan
from engines.predict import forecast as predicted
from engines.predict.forecast import Forecast, RankLoad, count_load, with_time
from engines.predict.machine import Machine
from engines.predict.machines import resolve_machine
from engines.predict.sizes import Sizes
from engines.program.compile import compile_plan
from engines.program.program import Program
from engines.train.training import Optimiser, sgd
from mpi4dl_nb.cluster import Cluster
from mpi4dl_nb.plan_tuner import count_optimiser_states
from mpi4dl_nb.status_line import LATER_S, show_status

__all__ = ["CompiledPlan", "PlanCache", "describe_cluster_fit", "forecast", "pause_gc"]

KEPT = 24  # plans; the programs of a large model take some megabytes


@dataclass(frozen=True)
class CompiledPlan:
    """A plan that fits the model, with the program and the load of each rank.

    `forecast` is that of a step on `machine`; None if there is no machine to predict for.
    """

    plan: Plan
    graph: ModelGraph
    programs: tuple[Program, ...]
    loads: tuple[RankLoad, ...]
    machine: Machine | None = None
    forecast: Forecast | None = None

    @property
    def is_weighed(self) -> bool:
        """Whether the memory of each rank is known too."""
        return all(load.peak_bytes is not None for load in self.loads)

    @property
    def untimed(self) -> CompiledPlan:
        """The same without times on any machine."""
        bare = (replace(load, busy_s=None, wait_s=None) for load in self.loads)
        return replace(self, loads=tuple(bare), machine=None, forecast=None)

    def is_counted(self, machine: Machine | None) -> bool:
        """Return whether memory is known, and the time on this machine, if there is one."""
        return self.is_weighed and self.machine is machine


class PlanCache:
    """Compiles plans for one model and caches the most recent ones."""

    def __init__(self, traces: TraceCache) -> None:
        self.traces = traces
        self._found: dict[Plan, CompiledPlan] = {}

    def is_quick(self, plan: Plan) -> bool:
        """Return whether the plan needs no trace, which takes seconds. Raises PlanError if the batch does not fit."""
        return self.traces.has_graph(plan)

    def get_compiled(self, plan: Plan) -> CompiledPlan:
        """Return the compiled plan. Raises PlanError or TraceError if the plan does not fit the model."""
        found = self._found.pop(plan, None)
        if found is None:
            graph = self.traces.get_graph(plan)
            programs = compile_plan(graph, plan)
            found = CompiledPlan(plan, graph, programs, tuple(count_load(program, graph) for program in programs))
        self._keep(found)
        return found

    def predict_costs(
        self, plan: Plan, machine: Machine | None = None, is_asked: Callable[[], bool] = lambda: True
    ) -> CompiledPlan | None:
        """Return the plan with each rank's memory, and its time on a machine; None once `is_asked()` is false.

        Raises TraceError or PlanError if the costs cannot be computed; memory that was computed before is kept.
        """
        found = self.get_compiled(plan)
        if found.is_counted(machine):
            return found
        loads = list(found.loads)
        for number, program in enumerate(() if found.is_weighed else found.programs):
            if not is_asked():
                return None
            loads[number] = count_load(program, found.graph, plan)
        found = replace(found, loads=tuple(loads))
        self._keep(found)  # the memory stays known, even if no time can be computed
        if machine is None:
            found = found.untimed
        else:
            made = predicted.forecast(found.graph, plan, machine)
            found = replace(found, loads=tuple(with_time(found.loads, made)), machine=machine, forecast=made)
        self._keep(found)
        return found

    def _keep(self, found: CompiledPlan) -> None:
        # A dict keeps the order of insertion, and `get_compiled` takes a plan out before it is put in again: the first
        # ones are those that were not used for the longest time.
        self._found[found.plan] = found
        for old in list(self._found)[:-KEPT]:
            self._found.pop(old, None)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable garbage collection within this context: during compilation it would take longer than compiling itself."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def describe_cluster_fit(needed: int | None, cluster: Cluster | None) -> tuple[str, str, bool]:
    """Compare the needed ranks with the cluster's: as text, as the label of a button, and whether the button helps.

    `needed` is None if no plan works yet.

    >>> describe_cluster_fit(6, None)
    ('6 ranks needed, none running.', 'Start 6 ranks', True)
    >>> describe_cluster_fit(6, Cluster(5, backend="loopback").start())[1]
    'Resize to 6 ranks'
    """
    running = cluster.n if cluster is not None and cluster.state != "not started" else None
    there = "none running." if running is None else f"{running} running."
    if needed is None:
        return f"Ranks: {there}", "Start ranks", False
    text = f"{needed} ranks needed, {there}"
    if cluster is not None and cluster.dead:
        return f"{text} {cluster.dead}", f"Restart with {needed} ranks", True
    if running == needed:
        return text, f"{needed} ranks run", False
    return text, f"{'Start' if running is None else 'Resize to'} {needed} ranks", True


# The forecast of one plan.


def forecast(
    model: nn.Module | Sizes,
    plan: Plan,
    image_shape: Sequence[int],
    machine: Machine | str,
    loss: Loss | None = None,
    optimiser: Optimiser = sgd,
) -> Forecast:
    """Predict a training step under a plan on a machine, which may be elsewhere: time, timeline, memory of each rank.

    `image_shape` is (N, C, H, W) of one batch. `machine` is the result of `cluster.calibrate()`, or the name of a known
    machine, such as "Summit". Raises PlanError, TraceError or ImageError.

    >>> from mpi4dl_nb import Plan, forecast, resnet20_v1
    >>> foreseen = forecast(resnet20_v1(), Plan(split_size=2, num_spatial_parts=4), (2, 3, 64, 64), "Summit")
    >>> foreseen.ranks, len(foreseen.memory), 0 < foreseen.seconds < 1
    (5, 5, True)
    """
    sizes = Sizes.of(model, loss)
    states = count_optimiser_states(optimiser, sizes.model, sizes.loss)
    with show_status(f"Tracing {sizes.name} for {plan.summary} ...", LATER_S) as line:
        graph = sizes.graph(plan, image_shape)
        line.update(f"Compiling and simulating {plan.summary} ...")
        return predicted.forecast(graph, plan, resolve_machine(machine), states)
