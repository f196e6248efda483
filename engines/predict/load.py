"""What each rank has to carry under a plan: weights, activations kept for backward, what it sends, and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.predict.forecast import Forecast
from engines.predict.memory import rank_memory
from engines.program.program import Program
from engines.program.traffic import Traffic, traffic

__all__ = ["Load", "load_of", "loads_of", "with_memory", "with_time"]


@dataclass(frozen=True, slots=True)
class Load:
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


def load_of(program: Program, graph: ModelGraph) -> Load:
    """What is counted at once: the weights and the messages of a rank's program."""
    owned = {**graph.weights, **graph.buffers}
    weights = sum(owned[name].bytes for name in (*program.weights, *program.buffers))
    return Load(weights, sum(traffic(program).values(), start=Traffic(0, 0)))


def with_memory(load: Load, program: Program, graph: ModelGraph, plan: Plan) -> Load:
    """What takes a moment: the program walked through its memory. Raises TraceError as `rank_memory` does."""
    memory = rank_memory(program, graph, plan)
    return replace(
        load, kept_bytes=memory.at_peak["activations"] + memory.at_peak["halos"], peak_bytes=memory.peak_bytes
    )


def with_time(loads: Sequence[Load], found: Forecast) -> list[Load]:
    """All ranks' loads with their times, to two digits: no forecast is better. Other replicas do as those simulated."""
    uses, seconds = found.timeline.uses, found.seconds
    made = []
    for rank, load in enumerate(loads):
        use = uses[rank % len(uses)]
        busy = (use.work + use.communication) * seconds
        made.append(replace(load, busy_s=_rounded(busy), wait_s=_rounded(max(0.0, seconds - busy))))
    return made


def _rounded(seconds: float) -> float:
    """
    >>> _rounded(0.012345), _rounded(0.0)
    (0.012, 0.0)
    """
    return float(f"{seconds:.2g}")


def loads_of(programs: Sequence[Program], graph: ModelGraph, plan: Plan) -> list[Load]:
    """All that is known of each rank, in rank order."""
    return [with_memory(load_of(program, graph), program, graph, plan) for program in programs]
