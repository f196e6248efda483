"""Replay of a study with the plain model in one process, which has to yield the replicas' weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engines.errors import PlanError
from engines.layer.graph import to_user_name
from engines.oracle import ReferenceTraining
from engines.replica.peers import add_half_difference
from engines.replica.replica import Feed, flatten_tensors, with_gradients_only
from engines.replica.server import ParameterStore
from engines.replica.study import ReplicaEvent, ReplicaStudy
from engines.training import Loss, Recipe

__all__ = ["replay"]


def replay(study: ReplicaStudy, model: nn.Module, loss: Loss, recipe: Recipe, feed: Feed) -> list[dict[str, Tensor]]:
    """Return the final weights by the plain model's names: a server's, or those of each peer.

    `model` has to be as it was before the study. Raises PlanError for a synchronous study, which one process can train
    in the ordinary way.
    """
    dtype, count = getattr(torch, recipe.plan.precision), recipe.plan.micro_batches
    seeds = [None if recipe.draws is None else recipe.seed + n for n in range(study.asynchrony.replicas)]
    if study.mode == "synchronous":
        raise PlanError("A synchronous study needs no replay: train in one process (engines.oracle.train_reference).")
    own = with_gradients_only(recipe) if study.mode == "server" else recipe
    replicas = [
        ReferenceTraining(model, loss, own.optimiser, dtype, seed, count, own.rules, whole_loss=recipe.has_whole_loss)
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
    queues = [deque(deed for deed in study.deeds if deed.replica == number) for number in range(len(replicas))]
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
                own, offered = flatten_tensors(weights), offers.pop((deed.subject, deed.replica))
                answers[deed.subject, deed.replica] = own, offered
                add_half_difference(weights, offered, own)
            case "close":
                add_half_difference(weights, *answers.pop((deed.replica, deed.subject)))
    return [_copy_weights(weights) for weights in trained]
