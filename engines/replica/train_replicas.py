"""Replicas of a plan that do not wait for each other: to see what that does. Not the way to train in earnest.

Steps here are not those of one process: there is nothing that `verify` could hold them against. What is exact, and
tested, is that one process can do again what the replicas did (`engines.replica.study_replay`).
"""

from __future__ import annotations

from typing import Protocol

from engines.comm.world import World
from engines.replica.asynchrony import Asynchrony
from engines.replica.peers import PeerReplica
from engines.replica.replica import Feed
from engines.replica.server import ParameterClient, ParameterServer
from engines.replica.study import RankLog, ReplicaStudy
from engines.replica.synchronous import SynchronousReplica
from engines.training import Recipe

__all__ = ["train_replicas"]


class _ReplicaRole(Protocol):
    def run(self) -> RankLog: ...


def train_replicas(world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> ReplicaStudy:
    """Train `asynchrony.replicas` copies of the recipe's plan; the same study on every rank. Collective.

    `feed(number)` gives a batch, the whole inputs of one step of the plan, the same on every rank; numbers may go a
    little beyond `asynchrony.budget`. The recipe's plan is that of one replica. Ranks that are not needed look on.

    Raises PlanError, on every rank, where the ranks are too few; LossError where a loss is not a number. Whoever calls
    this tells the other ranks of a failure, as for any work of ranks (`world.abort()`).
    """
    asynchrony.check(recipe.plan, world.size)
    role = _make_role(world, recipe, asynchrony, feed)
    world.barrier()
    diary = role.run() if role else RankLog(None)
    images = recipe.step_specs["images"].shape[0]
    return ReplicaStudy.of(asynchrony, images, world.all_gather(diary))


def _make_role(world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> _ReplicaRole | None:
    """What this rank is."""
    replica = world.rank // recipe.plan.ranks
    if replica < asynchrony.replicas:
        kind = {"synchronous": SynchronousReplica, "server": ParameterClient, "peers": PeerReplica}[asynchrony.mode]
        return kind(world, recipe, asynchrony, feed)
    if world.rank == asynchrony.replicas * recipe.plan.ranks and asynchrony.mode == "server":
        return ParameterServer(world, recipe, asynchrony)
    return None
