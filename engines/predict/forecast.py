"""What a plan will cost, before a rank starts: seconds, a timeline and bytes, from the programs that would run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.layout import compute_threads
from engines.plan import Plan
from engines.predict.cost import CostModel
from engines.predict.machine import Machine
from engines.predict.rank_memory import RankMemory, predict_tallied_memory
from engines.predict.rank_tally import build_tally
from engines.predict.simulate import simulate
from engines.program.compile import Compiler
from engines.program.timeline import Timeline

__all__ = ["Forecast", "compute_throughput", "count_copies", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """One training step under a plan on a machine. `images` are those of a step.

    Replicas do the same at the same time, so `timeline` and `memory` are of those ranks that were simulated: the first
    ones of the plan, at least one replica's.
    """

    plan: Plan
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    images: int

    @property
    def ranks(self) -> int:
        """Of the plan, simulated or not."""
        return self.plan.ranks

    @property
    def simulated(self) -> Plan:
        """The plan of those ranks that were simulated: for figures of `timeline`."""
        return replace(self.plan, data_parallel=len(self.memory) // self.plan.replica_ranks)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.seconds

    @property
    def images_per_s(self) -> float:
        """As training would go on."""
        return self.images / self.seconds

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return max(memory.peak_bytes for memory in self.memory)

    def compute_throughput(self, neutral_batch: int | None = None) -> float:
        """As the function."""
        return compute_throughput(self.images, self.seconds, neutral_batch)


def compute_throughput(images: int, seconds: float, neutral_batch: int | None = None) -> float:
    """Images per second of steps of so many images, as far as they count.

    Where updates of `neutral_batch` images leave the accuracy as it is, and larger ones do not, the images beyond it
    do not count: neither those of a step that is larger, nor those by which the last of some steps is.

    >>> (
    ...     compute_throughput(8, 2.0),
    ...     compute_throughput(8, 2.0, neutral_batch=4),
    ...     compute_throughput(8, 2.0, neutral_batch=12),
    ... )
    (4.0, 2.0, 3.0)
    """
    if neutral_batch is None:
        return images / seconds
    return neutral_batch / (math.ceil(neutral_batch / images) * seconds)


def forecast(
    graph: ModelGraph, plan: Plan, machine: Machine | CostModel, optimiser_states: int = 1, copies: int | None = None
) -> Forecast:
    """The cost of a step of the traced micro-batch's model.

    One replica is compiled and counted, and as many `copies` of it are simulated as the machine can tell apart (see
    `copies_of`; a number that is given is taken instead). `Prices` are a machine whose prices are kept for more plans.
    `optimiser_states` as in `rank_memory`; that halos may overlap with computing is left out of account.
    Raises PlanError or TraceError where the plan does not fit the model.
    """
    prices = CostModel.from_machine(machine)
    machine, copies = prices.machine, copies or count_copies(plan, prices.machine)
    compiler = Compiler(graph, replace(plan, overlap_halos=False))
    programs = [compiler.compile_rank(rank) for rank in range(plan.replica_ranks)]
    tallies = [build_tally(program, graph) for program in programs]
    threads = [compute_threads(plan, program.rank, machine.cores or 1, machine.node_ranks) for program in programs]
    again, away = plan.checkpoint_activations, plan.offload_activations
    timeline = simulate(programs, tallies, prices, threads, again, copies, away)
    one = [
        predict_tallied_memory(p, counted, plan, optimiser_states) for p, counted in zip(programs, tallies, strict=True)
    ]
    memory = (replace(each, rank=each.rank + copy * len(one)) for copy in range(copies) for each in one)
    return Forecast(plan, timeline, tuple(memory), plan.micro_batches * graph.inputs["images"].shape[0])


def count_copies(plan: Plan, machine: Machine) -> int:
    """How many replicas have to be simulated for all ranks' times to be known.

    One, where each rank has its own device and replicas lie alike on the nodes: each within one, or each on whole ones.
    Otherwise so many that together they fill whole nodes, behind which it begins again; where the last ones of all do
    not fill theirs they are taken to wait for its link as long as the others, which is at most too long. Where all
    ranks share the cores of one host, all of them.

    >>> from engines.predict.machine import Link
    >>> machine = Machine("nodes of 6", "an example", {}, node_ranks=6, between=Link(1e-6, 1e10))
    >>> [count_copies(Plan(split_size=n, spatial_size=0, data_parallel=32), machine) for n in (1, 3, 4, 5, 12)]
    [1, 1, 3, 6, 1]
    """
    size, node = plan.replica_ranks, machine.node_ranks
    if not node or not (machine.cores or machine.between):
        return plan.data_parallel if machine.cores else 1
    if node % size == 0 and not machine.cores:
        return 1
    return min(plan.data_parallel, math.lcm(size, node) // size)
