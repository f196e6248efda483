"""What each rank has to carry under a plan: weights, activations kept for backward, what it sends, and its time."""

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
    """One rank's. `weight_bytes` are of its weights and buffers, `sent` of a training step, forward and back.

    `kept_bytes` are the activations that wait for backward at the fullest moment of the step, borrowed pixels among
    them, and `peak_bytes` all tensors at that moment. `busy_s` are seconds of its own work in a step, `wait_s` the rest
    of the step. None until they have been counted, or predicted.
    """

    weight_bytes: int
    sent: Traffic
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    busy_s: float | None = None
    wait_s: float | None = None


def count_load(program: Program, graph: ModelGraph) -> RankLoad:
    """What is counted at once: the weights and the messages of a rank's program."""
    owned = {**graph.weights, **graph.buffers}
    weights = sum(owned[name].bytes for name in (*program.weights, *program.buffers))
    return RankLoad(weights, sum(count_traffic(program).values(), start=Traffic(0, 0)))


def with_memory(load: RankLoad, program: Program, graph: ModelGraph, plan: Plan) -> RankLoad:
    """What takes a moment: the program walked through its memory. Raises TraceError as `rank_memory` does."""
    memory = predict_rank_memory(program, graph, plan)
    return replace(
        load, kept_bytes=memory.at_peak["activations"] + memory.at_peak["halos"], peak_bytes=memory.peak_bytes
    )


def with_time(loads: Sequence[RankLoad], found: Forecast) -> list[RankLoad]:
    """All ranks' loads with their times, to two digits: no forecast is better. Other replicas do as those simulated."""
    uses, seconds = found.timeline.time_shares, found.seconds
    made = []
    for rank, load in enumerate(loads):
        use = uses[rank % len(uses)]
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
    """All that is known of each rank, in rank order."""
    return [with_memory(count_load(program, graph), program, graph, plan) for program in programs]
