"""Bytes of one rank before anything runs: its program walked, each tensor held until its last use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engines.layer.graph import ModelGraph
from engines.plan import Plan
from engines.predict.memory_simulation import simulate_memory
from engines.predict.rank_tally import build_tally
from engines.predict.tallies import RankTally
from engines.program.compile import Compiler
from engines.program.program import Program

__all__ = ["KINDS", "RankMemory", "predict_rank_memory", "predict_tallied_memory"]

KINDS = ("weights", "gradients", "optimiser", "inputs", "activations", "halos", "passing", "messages")
"""`activations` are kept for backward, `halos` the borrowed part of them; `passing` is what a step of the program makes
and lets go of, and gradients on their way back; `messages` the memory that messages and sums travel through."""


@dataclass(frozen=True)
class RankMemory:
    """Tensors of one rank at the fullest moment of a training step, after the first: `at_peak` bytes by kind.

    `peak_step` is that moment: the position in `program.steps`. `after` are the bytes that are held after each step.
    Buffers count as weights.
    """

    rank: int
    at_peak: Mapping[str, int]
    peak_step: int
    after: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """All kinds together."""
        return sum(self.at_peak.values())


def predict_rank_memory(program: Program, graph: ModelGraph, plan: Plan, optimiser_states: int = 1) -> RankMemory:
    """What the rank of `program` needs for a training step.

    `optimiser_states` is how many numbers the optimiser keeps for each weight: momentum 1, Adam 2. Halos that overlap
    with the interior are counted as those that do not. Raises TraceError where a kernel cannot be asked what it makes.
    """
    if plan.overlap_halos:
        program = Compiler(graph, replace(plan, overlap_halos=False)).compile_rank(program.rank)
    return predict_tallied_memory(program, build_tally(program, graph), plan, optimiser_states)


def predict_tallied_memory(program: Program, tally: RankTally, plan: Plan, optimiser_states: int = 1) -> RankMemory:
    """The same, where its program is counted already."""
    ledger, after = simulate_memory(program, tally, plan, optimiser_states)
    return RankMemory(
        program.rank, {kind: ledger.at_peak.get(kind, 0) for kind in KINDS}, ledger.peak_step, tuple(after)
    )
