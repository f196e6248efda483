"""Synchronous replicas, which wait for each other at every update: the baseline of the asynchronous modes."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from engines.comm.device import compute_threads_per_rank, count_local_ranks
from engines.comm.subgroup import SubGroup
from engines.comm.world import World
from engines.errors import PlanError, TraceError
from engines.layer.graph import ModelGraph
from engines.loss.whole_loss import with_whole_loss
from engines.plan import Plan
from engines.replica.asynchrony import Asynchrony
from engines.replica.replica import Feed
from engines.replica.study import RankLog
from engines.training import RankTraining, Recipe

__all__ = ["SynchronousReplica"]


def with_global_loss(graph: ModelGraph, plan: Plan) -> ModelGraph:
    """Return the graph of one replica with the loss of all replicas together.

    Raises PlanError if that loss cannot be derived from this graph.
    """
    # A loss that was rewritten for micro-batches holds for any number of them, except where it multiplies a sum by that
    # number (`scaled`): there it has the number of one replica.
    if plan.micro_batches == 1 or (graph.whole and not graph.whole.scaled):
        return graph
    found = graph if graph.whole else with_whole_loss(graph, _raise_no_model, plan.micro_batches)
    if found.whole is None or found.whole.unknown or graph.whole:
        raise PlanError(
            "The replicas of this loss cannot be joined after it was traced for one of them: only cross-entropy and "
            "means of losses of each element can. Use Plan(data_parallel=...) in an ordinary training."
        )
    return found


def _raise_no_model() -> ModelGraph:
    raise TraceError("The model is not here any more: it was traced for one replica.")


class SynchronousReplica:
    """One rank of a plan with replicas, in ordinary training."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> None:
        plan = replace(recipe.plan, data_parallel=asynchrony.replicas)
        self.asynchrony, self.feed = asynchrony, feed
        together = replace(recipe, plan=plan, graph=with_global_loss(recipe.graph, plan))
        self.training = RankTraining(SubGroup(world, range(plan.ranks)), together)
        self.training.threads = compute_threads_per_rank(count_local_ranks(world.size))
        self.is_log_rank = world.rank == 0
        self.diary = RankLog(world.rank // recipe.plan.ranks)

    def run(self) -> RankLog:
        """Train on the batches of all replicas, step by step."""
        start_s = time.perf_counter()
        replicas, own = self.asynchrony.replicas, self.diary.replica
        for step in range(self.asynchrony.steps):
            batches = [self.feed(step * replicas + replica) for replica in range(replicas)]
            whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            time.sleep(self.asynchrony.slow.get(own, 0.0))
            losses = self.training.step(self.training.cut(whole)).losses
            self.diary.turns.append((step * replicas + own, losses, time.perf_counter() - start_s))
            self.diary.staleness += [0] * self.is_log_rank
        self.diary.weights = self.training.copy_tensors()["weights"]
        return self.diary
