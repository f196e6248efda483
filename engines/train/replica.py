"""One rank of one replica: the ordinary training of a plan, on the ranks of this replica alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.comm.device import choose_device, compute_threads_per_rank, count_local_ranks
from engines.comm.world import SubGroup, World
from engines.train.asynchrony import Asynchrony, RankLog
from engines.train.training import RankTraining, Recipe

__all__ = ["BODY", "HEADER", "Feed", "Replica", "flatten_tensors", "unflatten_like", "with_gradients_only"]

Feed = Callable[[int], Mapping[str, Tensor]]
"""Returns the whole inputs of one replica's step for a batch number (0, 1, ...), the same on every rank."""

HEADER, BODY = 2, 3
"""Tags of messages between replicas, and with a server: between ranks that have no program in common."""


class Replica:
    """This rank's part of its replica, and its log. `world` are all ranks, and `group` those of the replica."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> None:
        size = recipe.plan.ranks
        self.world, self.asynchrony, self.feed, self.number = world, asynchrony, feed, world.rank // size
        self.group = SubGroup(world, range(self.number * size, (self.number + 1) * size))
        # By the rank in the whole world, so that replicas on one host get other GPUs. Each replica has its own seed,
        # as all would draw the same dropout masks otherwise.
        device, seed = str(choose_device(recipe.device, world.rank)), recipe.seed + self.number
        self.training = RankTraining(self.group, replace(recipe, device=device, seed=seed))
        # The training itself knows only the ranks of this replica, but all replicas share the cores.
        self.training.threads = compute_threads_per_rank(count_local_ranks(world.size))
        self.log = RankLog(self.number)
        self._start_s = time.perf_counter()

    @property
    def is_log_rank(self) -> bool:
        """Whether this rank logs what all ranks of the replica have in common."""
        return self.group.rank == 0

    @property
    def trained(self) -> list[Tensor]:
        """This rank's trained weights, in the graph's order."""
        return [weight for weight in self.training.weights.values() if weight.requires_grad]

    def run(self) -> RankLog:
        """Train this replica, and return its log with the final weights."""
        self._start_s = time.perf_counter()
        self.train()
        self.log.weights = self.training.copy_tensors()["weights"]
        return self.log

    def train(self) -> None:
        """Train on batches until there are no more."""
        raise NotImplementedError

    def train_batch(self, number: int, batch: Mapping[str, Tensor]) -> None:
        """Run one step on a batch, and sleep for as long as the study says."""
        losses = self.training.step(self.training.cut(batch)).losses
        self.delay()
        self.record_batch(number, losses)

    def delay(self) -> None:
        """Sleep for as long as this replica does in each step."""
        time.sleep(self.asynchrony.slow.get(self.number, 0.0))

    def record_batch(self, number: int, losses: Mapping[int, float]) -> None:
        """Record that a batch is done."""
        self.log.turns.append((number, losses, time.perf_counter() - self._start_s))


class GradientsOnly(torch.optim.Optimizer):
    """An optimiser that leaves the weights unchanged: only their gradients are needed."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def with_gradients_only(recipe: Recipe) -> Recipe:
    """Return the same training with an optimiser that changes no weights, so that a step only computes gradients."""
    return replace(recipe, optimiser=GradientsOnly, clip_norm=None, scheduler=None)


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all elements of the tensors into one flat row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]) if tensors else torch.empty(0)


def unflatten_like(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat row into views with the shapes of `tensors`."""
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
