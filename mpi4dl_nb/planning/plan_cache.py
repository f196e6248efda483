"""A cache of the compiled plans of one model, with their costs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from threading import Lock, RLock
from typing import overload

from mpi4dl_nb.cluster.cluster import Cluster
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.graph.model_state import ModelState
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast, RankLoad, count_load, forecast_programs, with_memory, with_time
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.rank_memory import RankMemory, predict_rank_memory
from mpi4dl_nb.engines.predict.rank_tally import build_tallies
from mpi4dl_nb.engines.predict.tallies import RankTally
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.train.recipe import Task

KEPT = 24  # plans; the programs of a large model take some megabytes
KEPT_SHAPES = 8  # of batches


@dataclass(frozen=True)
class CompiledPlan:
    """A plan that fits the model, with the program and the load of each rank.

    `forecast` is that of a step on `machine`; None if there is no machine to predict for. `tallies` and `memory` are
    those of the ranks of the first replica, which all others repeat; empty until they are counted.
    """

    plan: Plan
    graph: ModelGraph
    programs: tuple[Program, ...]
    loads: tuple[RankLoad, ...]
    machine: Machine | None = None
    forecast: Forecast | None = None
    tallies: tuple[RankTally, ...] = field(default=(), repr=False, compare=False)
    memory: tuple[RankMemory, ...] = field(default=(), repr=False, compare=False)

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
    """Compiles plans for one model and caches the most recent ones.

    Threads may share it: one of them works at a time, and the others wait. `is_asked` is called between two ranks;
    once it is false, the work ends and None is returned. The state of the optimiser counts as memory.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.traces = task, task.traces
        self._found: dict[tuple[Plan, ModelState], CompiledPlan] = {}
        self._by_shape = {tuple(self.traces.image_shape): self}
        self._working, self._storing = RLock(), Lock()

    def with_shape(self, image_shape: Sequence[int]) -> PlanCache:
        """Return the cache for batches of another shape of the same model. Raises ImageError for an invalid shape."""
        shape = tuple(image_shape)
        if shape not in self._by_shape:
            cache = PlanCache(self.task.with_shape(shape))
            cache._by_shape, cache._working = self._by_shape, self._working
            self._by_shape[shape] = cache
            for old in list(self._by_shape)[1:-KEPT_SHAPES]:  # the first one is that of the user
                del self._by_shape[old]
        return self._by_shape[shape]

    def has_compiled(self, plan: Plan) -> bool:
        """Return whether `get_compiled` returns at once. Raises PlanError if the batch cannot be cut as planned."""
        return self.traces.has_graph(plan) and self._make_key(plan) in self._found

    def has_counted(self, plan: Plan, machine: Machine | None) -> bool:
        """Return whether `predict_costs` returns at once."""
        with suppress(PlanError):  # the batch cannot be cut as planned
            return self.has_compiled(plan) and self.get_compiled(plan).is_counted(machine)
        return False

    @overload
    def get_compiled(self, plan: Plan) -> CompiledPlan: ...
    @overload
    def get_compiled(self, plan: Plan, is_asked: Callable[[], bool]) -> CompiledPlan | None: ...
    def get_compiled(self, plan: Plan, is_asked: Callable[[], bool] = lambda: True) -> CompiledPlan | None:
        """Return the compiled plan. Raises PlanError or TraceError if the plan does not fit the model."""
        if known := self._find(plan):  # without waiting for a thread that is at work
            return known
        with self._working:
            compiled = self._find(plan) or self._compile(plan, is_asked)
            if compiled is not None:
                self._keep(compiled)
            return compiled

    def _find(self, plan: Plan) -> CompiledPlan | None:
        with self._storing:
            key = self._make_key(plan)
            compiled = self._found.pop(key, None)
            if compiled is not None:
                self._found[key] = compiled  # at the end, as the one that was used last
            return compiled

    def _make_key(self, plan: Plan) -> tuple[Plan, ModelState]:
        return plan, self.traces.get_state()

    def _compile(self, plan: Plan, is_asked: Callable[[], bool]) -> CompiledPlan | None:
        if not is_asked():
            return None
        graph, programs, loads = self.traces.get_graph(plan), [], []
        compiler = Compiler(graph, plan)
        for rank in range(plan.ranks):
            if not is_asked():
                return None
            programs.append(compiler.compile_rank(rank))
            loads.append(count_load(programs[-1], graph))
        return CompiledPlan(plan, graph, tuple(programs), tuple(loads))

    @overload
    def predict_costs(self, plan: Plan, machine: Machine | None = None) -> CompiledPlan: ...
    @overload
    def predict_costs(
        self, plan: Plan, machine: Machine | None, is_asked: Callable[[], bool]
    ) -> CompiledPlan | None: ...
    def predict_costs(
        self, plan: Plan, machine: Machine | None = None, is_asked: Callable[[], bool] = lambda: True
    ) -> CompiledPlan | None:
        """Return the plan with each rank's memory, and its time on a machine.

        Raises TraceError or PlanError if the costs cannot be computed; memory that was computed before is kept.
        """
        if (known := self._find(plan)) and known.is_counted(machine):  # without waiting for a thread that is at work
            return known
        with self._working:
            compiled = self.get_compiled(plan, is_asked)
            if compiled is None or compiled.is_counted(machine):
                return compiled
            if not compiled.is_weighed:
                tallies, memory = [], []
                programs = compiled.programs[: compiled.plan.replica_ranks]  # all replicas are alike: one is counted
                states = self.task.count_optimiser_states()
                for program, tally in zip(programs, build_tallies(programs, compiled.graph), strict=True):
                    if not is_asked():
                        return None
                    tallies.append(tally)
                    memory.append(predict_rank_memory(program, compiled.graph, compiled.plan, states, tally))
                pairs = zip(compiled.loads, cycle(memory), strict=False)
                loads = tuple(with_memory(load, rank_memory) for load, rank_memory in pairs)
                compiled = replace(compiled, loads=loads, tallies=tuple(tallies), memory=tuple(memory))
                self._keep(compiled)  # the memory stays known, even if no time can be computed
            if machine is None:
                compiled = compiled.untimed
            else:
                first = compiled.programs[: plan.replica_ranks]
                foreseen = forecast_programs(compiled.graph, plan, machine, first, compiled.tallies, compiled.memory)
                loads = tuple(with_time(compiled.loads, foreseen))
                compiled = replace(compiled, loads=loads, machine=machine, forecast=foreseen)
            self._keep(compiled)
            return compiled

    def _keep(self, found: CompiledPlan) -> None:
        # A dict keeps the order of insertion, and a plan that is found is put at the end again: the first ones are
        # those that were not used for the longest time.
        with self._storing:
            self._found[self._make_key(found.plan)] = found
            for old in list(self._found)[:-KEPT]:
                del self._found[old]


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


def describe_place(cluster: Cluster | None) -> str:
    """Return where the ranks of a cluster run, or will run once they are started.

    >>> describe_place(None)
    'on this computer, one MPI process per rank'
    >>> describe_place(Cluster(2, backend="loopback"))
    "on this computer, as threads of this notebook's process"
    """
    if cluster is not None and cluster.is_one_process:
        return "on this computer, as threads of this notebook's process"
    hosts = None if cluster is None else cluster.hosts
    return f"on {hosts or 'this computer'}, one MPI process per rank"
