"""The load of each rank under a plan: weights, activations saved for backward, messages sent, and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.predict.forecast import Forecast
from engines.predict.rank_memory import predict_rank_memory
from engines.program.program import Program
from engines.program.traffic import Traffic, count_traffic

__all__ = ["RankLoad", "count_load", "count_loads", "with_memory", "with_time"]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load of one rank.

    `weight_bytes` are those of its weights and buffers, and `sent` is the traffic of a training step, forward and
    backward. `kept_bytes` are the activations saved for backward at the peak of the step, halos included, and
    `peak_bytes` all tensors at that time. `busy_s` are the seconds of its own work in a step, and `wait_s` the rest of
    the step. Fields are None until they are counted or predicted.
    """

    weight_bytes: int
    sent: Traffic
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    busy_s: float | None = None
    wait_s: float | None = None


def count_load(program: Program, graph: ModelGraph) -> RankLoad:
    """Return what is cheap to count: the weights and messages of a rank's program."""
    owned = {**graph.weights, **graph.buffers}
    weights = sum(owned[name].bytes for name in (*program.weights, *program.buffers))
    return RankLoad(weights, sum(count_traffic(program).values(), start=Traffic(0, 0)))


def with_memory(load: RankLoad, program: Program, graph: ModelGraph, plan: Plan) -> RankLoad:
    """Return the load with its memory, which takes a moment. Raises TraceError as `predict_rank_memory` does."""
    memory = predict_rank_memory(program, graph, plan)
    return replace(
        load, kept_bytes=memory.at_peak["activations"] + memory.at_peak["halos"], peak_bytes=memory.peak_bytes
    )


def with_time(loads: Sequence[RankLoad], found: Forecast) -> list[RankLoad]:
    """Return the loads of all ranks with times, rounded to two digits, since no forecast is more precise.

    Ranks that were not simulated have the times of the simulated ones.
    """
    uses, seconds = found.timeline.time_shares, found.seconds
    made = []
    for rank, load in enumerate(loads):
        use = uses[rank % len(uses)]  # whole replicas are simulated, and the others do the same
        busy = (use.work + use.communication) * seconds
        made.append(replace(load, busy_s=_round_seconds(busy), wait_s=_round_seconds(max(0.0, seconds - busy))))
    return made


def _round_seconds(seconds: float) -> float:
    """
    >>> _round_seconds(0.012345), _round_seconds(0.0)
    (0.012, 0.0)
    """
    return float(f"{seconds:.2g}")


def count_loads(programs: Sequence[Program], graph: ModelGraph, plan: Plan) -> list[RankLoad]:
    """Return the loads of all ranks, with memory, in rank order."""
    return [with_memory(count_load(program, graph), program, graph, plan) for program in programs]
