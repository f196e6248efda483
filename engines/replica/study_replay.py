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
    versions = [_copy_weights(keeper.weights)]
    for deed in study.deeds:
        replica = replicas[deed.replica]
        weights = _get_trained(replica, recipe)
        _load_weights(weights, versions[deed.read])
        replica.step(feed(deed.subject))
        gradients = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
        keeper.apply(gradients, staleness=len(versions) - 1 - deed.read)
        versions.append(_copy_weights(keeper.weights))
    return versions[-1]


def _copy_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def _load_weights(weights: Mapping[str, Tensor], version: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(version[name])


class _OfferExchange:
    """The offers and answers between peers, by sender and receiver of the offer. Each pair has at most one pending."""

    def __init__(self) -> None:
        self.offers: dict[tuple[int, int], Tensor] = {}
        self.answers: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def is_ready(self, deed: ReplicaEvent) -> bool:
        """Return whether the message that an event depends on has been sent."""
        if deed.kind == "answer":
            return (deed.subject, deed.replica) in self.offers
        return deed.kind != "close" or (deed.replica, deed.subject) in self.answers

    def apply_event(self, deed: ReplicaEvent, weights: Sequence[Tensor]) -> None:
        """Apply an offer, an answer or a close."""
        own = flatten_tensors(weights)
        if deed.kind == "offer":
            self.offers[deed.replica, deed.subject] = own
        elif deed.kind == "answer":
            offered = self.offers.pop((deed.subject, deed.replica))
            self.answers[deed.subject, deed.replica] = own, offered
            add_half_difference(weights, offered, own)
        else:
            add_half_difference(weights, *self.answers.pop((deed.replica, deed.subject)))


def _replay_peers(
    study: ReplicaStudy, replicas: Sequence[ReferenceTraining], recipe: Recipe, feed: Feed
) -> list[dict[str, Tensor]]:
    """Replay each peer's events in order, each one as soon as the message that it depends on has been sent."""
    post, trained = _OfferExchange(), [_get_trained(process, recipe) for process in replicas]
    queues = [deque(deed for deed in study.deeds if deed.replica == number) for number in range(len(replicas))]
    while any(queues):
        ready = next((queue for queue in queues if queue and post.is_ready(queue[0])), None)
        if ready is None:
            raise PlanError("The study's deeds wait for each other: it is not whole. Take it from train_replicas.")
        deed = ready.popleft()
        if deed.kind == "step":
            replicas[deed.replica].step(feed(deed.subject))
        else:
            post.apply_event(deed, list(trained[deed.replica].values()))
    return [_copy_weights(weights) for weights in trained]
