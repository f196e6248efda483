"""Predicts the cost of a plan before a rank starts: seconds, a timeline and bytes, from the programs that would run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import FactTable, describe_unknown, format_bytes, format_number, format_seconds
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import compute_threads
from mpi4dl_nb.engines.predict.cost import CostModel
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machines import find_other_precision
from mpi4dl_nb.engines.predict.rank_memory import RankMemory, compile_replica, predict_rank_memory
from mpi4dl_nb.engines.predict.simulate import simulate
from mpi4dl_nb.engines.predict.tallies import RankTally
from mpi4dl_nb.engines.program.program import Program, Traffic, count_traffic
from mpi4dl_nb.engines.program.timeline import Timeline

ORDERS = {"speed": "most images per second", "memory": "least memory of the fullest rank"}
"""What plans may be ordered `by`, and which of them is then the best."""


def check_order(by: str) -> None:
    """Raise PlanError unless plans can be ordered `by` that."""
    if by not in ORDERS:
        raise PlanError(describe_unknown(f"by={by!r} is unknown", by, ORDERS))


@dataclass(frozen=True, repr=False)
class Forecast(FactTable):
    """The forecast of one training step under a plan on a machine. `images` is the number of images in a step.

    Times are those of a machine that computes in `timed_in`, or in the plan's precision if that is empty.
    All replicas do the same at the same time, so `timeline` and `memory` cover only the simulated ranks: the first
    ranks of the plan, at least one replica.
    """

    plan: Plan
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    images: int
    timed_in: str = ""

    caption = "Forecast of a step"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "plan": self.plan.summary,
            "time of a step": format_seconds(self.seconds) + self.time_note,
            "images": f"{self.images:,} a step, {format_number(self.images_per_s)} a second",
            "memory of the fullest rank": format_bytes(self.peak_bytes),
            "time of a rank": self.timeline.facts["time of a rank"],
        }

    @property
    def time_note(self) -> str:
        """In brackets, that times are not those of the plan's precision; empty if they are."""
        return f" (as in {self.timed_in}, for {self.plan.precision} is not known)" if self.timed_in else ""

    @property
    def ranks(self) -> int:
        """The number of ranks of the plan, simulated or not."""
        return self.plan.ranks

    @property
    def simulated(self) -> Plan:
        """The plan of the simulated ranks only, for figures of `timeline`."""
        return replace(self.plan, data_parallel=len(self.memory) // self.plan.replica_ranks)

    @property
    def seconds(self) -> float:
        """The seconds of a step."""
        return self.timeline.seconds

    @property
    def images_per_s(self) -> float:
        """The throughput of training with such steps."""
        return self.images / self.seconds

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of the fullest rank."""
        return max(memory.peak_bytes for memory in self.memory)

    def can_fit(self, rank_bytes: int | None) -> bool:
        """Return whether no rank needs more than `rank_bytes` (None: unlimited)."""
        return rank_bytes is None or self.peak_bytes <= rank_bytes

    def compute_throughput(self, neutral_batch: int | None = None) -> float:
        """Return the images per second, as the function `compute_throughput`."""
        return compute_throughput(self.images, self.seconds, neutral_batch)

    def get_sort_key(self, by: str = "speed", neutral_batch: int | None = None) -> tuple[float, float]:
        """Return a pair of numbers that is the smaller the better the plan is, `by` speed or memory.

        Of plans that need the same memory the faster one is better, and of equally fast ones that with less memory.
        """
        memory, speed = float(self.peak_bytes), -self.compute_throughput(neutral_batch)
        return (memory, speed) if by == "memory" else (speed, memory)


def compute_throughput(images: int, seconds: float, neutral_batch: int | None = None) -> float:
    """Return the images per second of steps of `images` images, as far as the images count.

    If updates of `neutral_batch` images leave the accuracy unchanged, and larger updates do not, images beyond that
    number do not count: neither those of a larger step, nor those by which the last of several steps exceeds the
    number.

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


def forecast(graph: ModelGraph, plan: Plan, machine: Machine | CostModel, optimiser_states: int = 1) -> Forecast:
    """Return the forecast of a step of the traced micro-batch's model.

    One replica is compiled and counted, and as many copies of it are simulated as the machine can tell apart (see
    `count_copies`). A `CostModel` is a machine whose costs are cached for further plans.
    `optimiser_states` as in `predict_rank_memory`.
    A machine that is known by name computes in the plan's precision, if its speed in that is known. Raises PlanError or
    TraceError if the plan does not fit the model.
    """
    return forecast_programs(graph, plan, machine, *compile_replica(graph, plan, optimiser_states))


def forecast_programs(
    graph: ModelGraph,
    plan: Plan,
    machine: Machine | CostModel,
    programs: Sequence[Program],
    tallies: Sequence[RankTally],
    memory: Sequence[RankMemory],
) -> Forecast:
    """Return the `forecast` of a plan whose first replica is compiled, tallied and weighed already.

    `programs`, `tallies` and `memory` are those of the ranks of the first replica, in rank order.
    Raises PlanError if the machine has no speed for a kernel of the model.
    """
    prices = CostModel.from_machine(machine).adapt_to_precision(plan.precision)
    machine, copies = prices.machine, count_copies(plan, prices.machine)
    threads = [compute_threads(plan, program.rank, machine.cores or 1, machine.node_ranks) for program in programs]
    recompute, offload = plan.checkpoint_activations, plan.offload_activations
    timeline = simulate(programs, tallies, prices, threads, recompute, copies, offload)
    peaks = (replace(peak, rank=peak.rank + copy * len(memory)) for copy in range(copies) for peak in memory)
    images = plan.micro_batches * graph.inputs["images"].shape[0]
    return Forecast(plan, timeline, tuple(peaks), images, find_other_precision(machine, plan.precision))


def count_copies(plan: Plan, machine: Machine) -> int:
    """Return how many replicas must be simulated so that the times of all ranks are known.

    One replica is enough if each rank has its own device and all replicas are placed alike on the nodes: each within
    one node, or each on whole nodes. Otherwise the smallest number of replicas that fill whole nodes, after which the
    placement repeats. If the last replicas do not fill their nodes, they are assumed to wait for the link as long as
    the others, which at most overestimates the time. If all ranks share the cores of one host, all replicas are
    simulated.

    >>> from mpi4dl_nb.engines.predict.machine import Link
    >>> machine = Machine("nodes of 6", "an example", {}, node_ranks=6, between=Link(1e-6, 1e10))
    >>> [count_copies(Plan(split_size=n, spatial_size=0, data_parallel=32), machine) for n in (1, 3, 4, 5, 12)]
    [1, 1, 3, 6, 1]
    """
    # Nodes of 6, replicas of 4: the third replica ends where a node ends, and the fourth is placed like the first.
    #
    #   nodes      |0 0 0 0 0 0|1 1 1 1 1 1|2 2 ...
    #   replicas   |0 0 0 0|1 1 1 1|2 2 2 2|3 3 ...
    size, node = plan.replica_ranks, machine.node_ranks
    if not node or not (machine.cores or machine.between):
        return plan.data_parallel if machine.cores else 1
    if node % size == 0 and not machine.cores:
        return 1
    return min(plan.data_parallel, math.lcm(size, node) // size)


# The load of each rank under a plan: weights, activations saved for backward, messages sent, and time.


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one rank.

    `weight_bytes` are those of its weights and buffers, and `sent` is the traffic of a training step, forward and
    backward. `kept_bytes` are the activations saved for backward at the peak of the step, halos included, `halo_bytes`
    the halos alone, and `peak_bytes` all tensors at that time. `busy_s` are the seconds of its own work in a step, and
    `wait_s` the rest of the step. Fields are None until they are counted or predicted.
    """

    weight_bytes: int
    sent: Traffic
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    busy_s: float | None = None
    wait_s: float | None = None
    halo_bytes: int | None = None


def count_load(program: Program, graph: ModelGraph, plan: Plan | None = None, optimiser_states: int = 1) -> RankLoad:
    """Return the weights and messages of a rank's program and, with its `plan`, its memory, which takes a moment.

    `optimiser_states` is as for `predict_rank_memory`. Raises TraceError as `predict_rank_memory` does.
    """
    owned = {**graph.weights, **graph.buffers}
    weights = sum(owned[name].bytes for name in (*program.weights, *program.buffers))
    load = RankLoad(weights, sum(count_traffic(program).values(), start=Traffic(0, 0)))
    if plan is None:
        return load
    return with_memory(load, predict_rank_memory(program, graph, plan, optimiser_states))


def with_memory(load: RankLoad, memory: RankMemory) -> RankLoad:
    halo_bytes = memory.at_peak["halos"]
    kept_bytes = memory.at_peak["activations"] + halo_bytes
    return replace(load, kept_bytes=kept_bytes, peak_bytes=memory.peak_bytes, halo_bytes=halo_bytes)


def with_time(loads: Sequence[RankLoad], found: Forecast) -> list[RankLoad]:
    """Return the loads of all ranks with times, rounded to two digits, since no forecast is more precise.

    Ranks that were not simulated have the times of the simulated ones.
    """
    uses, seconds = found.timeline.time_shares, found.seconds

    def round_seconds(seconds: float) -> float:
        return float(f"{seconds:.2g}")

    timed = []
    for rank, load in enumerate(loads):
        use = uses[rank % len(uses)]  # whole replicas are simulated, and the others do the same
        busy = (use.work + use.communication) * seconds
        timed.append(replace(load, busy_s=round_seconds(busy), wait_s=round_seconds(max(0.0, seconds - busy))))
    return timed
