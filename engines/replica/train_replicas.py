"""Train replicas of a plan asynchronously, to study the effects. This is not meant for production training.

The steps differ from those of one process, so there is nothing to which `verify` could compare them. What is exact, and
tested, is that one process can replay what the replicas did (`engines.replica.study_replay`).
"""

from __future__ import annotations

from engines.comm.world import World
from engines.replica.asynchrony import Asynchrony
from engines.replica.peers import PeerReplica
from engines.replica.replica import Feed
from engines.replica.server import ParameterClient, ParameterServer
from engines.replica.study import RankLog, ReplicaStudy
from engines.replica.synchronous import SynchronousReplica
from engines.training import Recipe

__all__ = ["train_replicas"]


def train_replicas(world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> ReplicaStudy:
    """Train `asynchrony.replicas` copies of the recipe's plan, and return the same study on every rank. Collective.

    `feed(number)` returns a batch: the whole inputs of one step of the plan, the same on every rank. Numbers may
    slightly exceed `asynchrony.budget`. The recipe's plan is that of one replica. Ranks that are not needed stay idle.

    Raises PlanError, on every rank, if there are too few ranks, and LossError if a loss is not finite. On a failure the
    caller has to release the other ranks (`world.abort()`), as in any work of ranks.
    """
    asynchrony.check(recipe.plan, world.size)
    replica = world.rank // recipe.plan.ranks
    role: SynchronousReplica | ParameterClient | PeerReplica | ParameterServer | None = None
    if replica < asynchrony.replicas:
        kind = {"synchronous": SynchronousReplica, "server": ParameterClient, "peers": PeerReplica}[asynchrony.mode]
        role = kind(world, recipe, asynchrony, feed)
    elif world.rank == asynchrony.replicas * recipe.plan.ranks and asynchrony.mode == "server":
        role = ParameterServer(world, recipe, asynchrony)
    # The clocks of all replicas start here: making a role compiles the plan, which takes some ranks longer than others.
    world.barrier()
    diary = role.run() if role else RankLog(None)
    images = recipe.step_specs["images"].shape[0]
    return ReplicaStudy.of(asynchrony, images, world.all_gather(diary))
