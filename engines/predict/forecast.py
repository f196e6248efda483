"""What a plan will cost, before a rank starts: seconds, a timeline and bytes, from the programs that would run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.layout import threads_of
from engines.plan import Plan
from engines.predict.count import tally
from engines.predict.machine import Machine
from engines.predict.memory import RankMemory, memory_of
from engines.predict.simulate import simulate
from engines.program.compile import compile_plan
from engines.program.timeline import Timeline

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True)
class Forecast:
    """One training step under a plan on a machine. `images` are those of a step."""

    plan: Plan
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    images: int

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


def forecast(graph: ModelGraph, plan: Plan, machine: Machine, optimiser_states: int = 1) -> Forecast:
    """The cost of a step of the traced micro-batch's model.

    `optimiser_states` as in `rank_memory`; that halos may overlap with computing is left out of account.
    Raises PlanError or TraceError where the plan does not fit the model.
    """
    programs = compile_plan(graph, replace(plan, overlap_halos=False))
    tallies = [tally(program, graph) for program in programs]
    threads = [threads_of(plan, program.rank, machine.cores or 1) for program in programs]
    timeline = simulate(programs, tallies, machine, threads, plan.checkpoint_activations)
    memory = (memory_of(p, counted, plan, optimiser_states) for p, counted in zip(programs, tallies, strict=True))
    return Forecast(plan, timeline, tuple(memory), plan.micro_batches * graph.inputs["images"].shape[0])
