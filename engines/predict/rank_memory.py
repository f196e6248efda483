"""Predicts the bytes of one rank before anything runs: simulates its program; tensors live until their last use."""

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
"""`activations` are saved for backward, `halos` are their received parts. `passing` is the temporary memory of a
program step, and gradients in backward. `messages` is the memory of message and all-reduce buffers."""


@dataclass(frozen=True)
class RankMemory:
    """The tensors of one rank at the peak of a training step that is not the first: `at_peak` are bytes by kind.

    `peak_step` is the index of the peak in `program.steps`, and `after` are the bytes held after each step. Buffers
    count as weights.
    """

    rank: int
    at_peak: Mapping[str, int]
    peak_step: int
    after: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak bytes of all kinds together."""
        return sum(self.at_peak.values())


def predict_rank_memory(program: Program, graph: ModelGraph, plan: Plan, optimiser_states: int = 1) -> RankMemory:
    """Return the memory that the rank of `program` needs for a training step.

    `optimiser_states` is how many numbers the optimiser keeps for each weight: momentum 1, Adam 2. Halos that overlap
    with the interior are counted like those that do not. Raises TraceError if the effect of a kernel cannot be
    inferred.
    """
    if plan.overlap_halos:
        program = Compiler(graph, replace(plan, overlap_halos=False)).compile_rank(program.rank)
    return predict_tallied_memory(program, build_tally(program, graph), plan, optimiser_states)


def predict_tallied_memory(program: Program, tally: RankTally, plan: Plan, optimiser_states: int = 1) -> RankMemory:
    """Return the same for a program that has been tallied already."""
    ledger, after = simulate_memory(program, tally, plan, optimiser_states)
    return RankMemory(
        program.rank, {kind: ledger.at_peak.get(kind, 0) for kind in KINDS}, ledger.peak_step, tuple(after)
    )
