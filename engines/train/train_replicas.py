"""Train replicas, synchronous or asynchronous, and replay what asynchronous ones did in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.compiler.whole_loss import with_whole_loss
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, to_user_name
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.asynchrony import Asynchrony, RankLog, ReplicaEvent, ReplicaStudy
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.replica import (
    Feed,
    PeerReplica,
    Replica,
    add_half_difference,
    flatten_tensors,
    with_gradients_only,
)
from mpi4dl_nb.engines.train.replica_server import ParameterClient, ParameterServer, ParameterStore

# Synchronous replicas, which wait for each other at every update: the baseline of the asynchronous modes.


def with_global_loss(graph: ModelGraph, plan: Plan) -> ModelGraph:
    """Return the graph of one replica with the loss of all replicas together.

    Raises PlanError if that loss cannot be derived from this graph.
    """
    # A loss that was rewritten for micro-batches holds for any number of them, except where it multiplies a sum by that
    # number (`scaled`): there it has the number of one replica.
    if plan.micro_batches == 1 or (graph.whole and not graph.whole.scaled):
        return graph
    rewritten = graph if graph.whole else with_whole_loss(graph, _raise_no_model, plan.micro_batches)
    if rewritten.whole is None or rewritten.whole.unknown or graph.whole:
        raise PlanError(
            "The replicas of this loss cannot be joined after it was traced for one of them: only cross-entropy and "
            "means of losses of each element can. Use Plan(data_parallel=...) in an ordinary training."
        )
    return rewritten


def _raise_no_model() -> ModelGraph:
    raise TraceError("The model is not here any more: it was traced for one replica.")


class SynchronousReplica(Replica):
    """One rank of a plan with replicas, in ordinary training."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> None:
        plan = replace(recipe.plan, data_parallel=asynchrony.replicas)
        together = replace(recipe, plan=plan, graph=with_global_loss(recipe.graph, plan))
        super().__init__(world, together, asynchrony, feed)  # as one replica with the ranks of all
        self.number = self.log.replica = world.rank // recipe.plan.ranks

    def train(self) -> None:
        """Train on the batches of all replicas, step by step."""
        replicas = self.asynchrony.replicas
        for step in range(self.asynchrony.steps):
            batches = [self.feed(step * replicas + replica) for replica in range(replicas)]
            whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            self.delay()
            self.record_batch(step * replicas + self.number, self.training.step(self.training.cut(whole)).losses)
            self.log.staleness += [0] * self.is_log_rank


# Train replicas of a plan asynchronously, to study the effects. This is not meant for production training.
#
# The steps differ from those of one process, so there is nothing to which `verify` could compare them. What is exact,
# and tested, is that one process can replay what the replicas did (`replay`).


def train_replicas(world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> ReplicaStudy:
    """Train `asynchrony.replicas` copies of the recipe's plan, and return the same study on every rank. Collective.

    `feed(number)` returns a batch: the whole inputs of one step of the plan, the same on every rank. Numbers may
    slightly exceed `asynchrony.budget`. The recipe's plan is that of one replica. Ranks that are not needed stay idle.

    Raises PlanError, on every rank, if there are too few ranks, and LossError if a loss is not finite. On a failure the
    caller has to release the other ranks (`world.revoke()`), as in any work of ranks.
    """
    asynchrony.check(recipe.plan, world.size)
    replica = world.rank // recipe.plan.ranks
    role: Replica | ParameterServer | None = None
    if replica < asynchrony.replicas:
        kind = {"synchronous": SynchronousReplica, "server": ParameterClient, "peers": PeerReplica}[asynchrony.mode]
        role = kind(world, recipe, asynchrony, feed)
    elif world.rank == asynchrony.replicas * recipe.plan.ranks and asynchrony.mode == "server":
        role = ParameterServer(world, recipe, asynchrony)
    # The clocks of all replicas start here: making a role compiles the plan, which takes some ranks longer than others.
    world.barrier()
    log = role.run() if role else RankLog(None)
    images = recipe.step_specs["images"].shape[0]
    return ReplicaStudy.of(asynchrony, images, world.all_gather(log))


# Replay of a study with the plain model in one process, which has to yield the replicas' weights.


def replay(study: ReplicaStudy, model: nn.Module, loss: Loss, recipe: Recipe, feed: Feed) -> list[dict[str, Tensor]]:
    """Return the final weights by the plain model's names: a server's, or those of each peer.

    `model` has to be as it was before the study. Raises PlanError for a synchronous study, which one process can train
    in the ordinary way.
    """
    dtype, count = getattr(torch, recipe.plan.precision), recipe.plan.micro_batches
    seeds = [None if recipe.draws is None else recipe.seed + n for n in range(study.asynchrony.replicas)]
    if study.mode == "synchronous":
        raise PlanError(
            "A synchronous study needs no replay: train in one process, with "
            "mpi4dl_nb.engines.train.oracle.train_reference."
        )
    variant = with_gradients_only(recipe) if study.mode == "server" else recipe
    replicas = [
        ReferenceTraining(
            model, loss, variant.optimiser, dtype, seed, count, variant.rules, whole_loss=recipe.has_whole_loss
        )
        for seed in seeds
    ]
    ends = (
        [_replay_server(study, replicas, recipe, feed)]
        if study.mode == "server"
        else _replay_peers(study, replicas, recipe, feed)
    )
    return [{to_user_name(name): weight for name, weight in end.items()} for end in ends]


def _get_trained(process: ReferenceTraining, recipe: Recipe) -> dict[str, Tensor]:
    """Return the weights of one process that ranks train, by the graph's names."""
    named = process.weights
    return {spec.key: named[spec.name] for spec in recipe.parameters if spec.key in recipe.graph.trainable}


def _replay_server(
    study: ReplicaStudy, replicas: Sequence[ReferenceTraining], recipe: Recipe, feed: Feed
) -> dict[str, Tensor]:
    keeper = ParameterStore(_copy_weights(_get_trained(replicas[0], recipe)), recipe, study.asynchrony.staleness_aware)
    # The server applied the gradients one after another. So each one has only to be computed from the same version of
    # the weights as then; when it was computed does not matter.
    versions = [_copy_weights(keeper.weights)]
    for deed in study.deeds:
        replica = replicas[deed.replica]
        weights = _get_trained(replica, recipe)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(versions[deed.read][name])
        replica.step(feed(deed.subject))
        gradients = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        keeper.apply(gradients, staleness=len(versions) - 1 - deed.read)
        versions.append(_copy_weights(keeper.weights))
    return versions[-1]


def _copy_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def _replay_peers(
    study: ReplicaStudy, replicas: Sequence[ReferenceTraining], recipe: Recipe, feed: Feed
) -> list[dict[str, Tensor]]:
    """Replay each peer's events in order, each one as soon as the message that it depends on has been sent."""
    trained = [_get_trained(process, recipe) for process in replicas]
    queues = [deque(deed for deed in study.deeds if deed.replica == replica) for replica in range(len(replicas))]
    # The study has each peer's events in order, but no common order of all peers. Any order in which messages are sent
    # before they are used gives the same weights, because between messages a peer depends on nobody:
    #
    #   peer 0    step   offer 1   step   close 1        close needs peer 1's answer
    #   peer 1    step   step      answer 0   step       answer needs peer 0's offer
    #
    # By sender and receiver of the offer; each pair has at most one pending.
    offers: dict[tuple[int, int], Tensor] = {}
    answers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def is_ready(deed: ReplicaEvent) -> bool:
        if deed.kind == "answer":
            return (deed.subject, deed.replica) in offers
        return deed.kind != "close" or (deed.replica, deed.subject) in answers

    while any(queues):
        ready = next((queue for queue in queues if queue and is_ready(queue[0])), None)
        if ready is None:
            raise PlanError("The study's deeds wait for each other: it is not whole. Take it from train_replicas.")
        deed = ready.popleft()
        weights = list(trained[deed.replica].values())
        match deed.kind:
            case "step":
                replicas[deed.replica].step(feed(deed.subject))
            case "offer":
                offers[deed.replica, deed.subject] = flatten_tensors(weights)
            case "answer":
                answer, offered = flatten_tensors(weights), offers.pop((deed.subject, deed.replica))
                answers[deed.subject, deed.replica] = answer, offered
                add_half_difference(weights, offered, answer)
            case "close":
                add_half_difference(weights, *answers.pop((deed.replica, deed.subject)))
    return [_copy_weights(weights) for weights in trained]
