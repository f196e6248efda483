"""A parameter server: one rank holds the weights, and replicas do not wait for each other.

    replica                      server
       | <-- number, weights ----  serve: the next batch
       | -- gradient ----------->  apply, once the staleness bound permits
       | <-- number, weights ----  serve, once the bound permits; number -1: no more batches

Source: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 (Downpour SGD).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.world import Message, Pending, World
from mpi4dl_nb.engines.program.message_buffers import SendQueue
from mpi4dl_nb.engines.program.update import OptimiserStep
from mpi4dl_nb.engines.train.asynchrony import Asynchrony, RankLog, ReplicaEvent, VersionTracker
from mpi4dl_nb.engines.train.optimisers import make_on_rank
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.replica import (
    BODY,
    HEADER,
    Feed,
    Replica,
    flatten_tensors,
    unflatten_like,
    with_gradients_only,
)

_NAP_S = 2e-4
_NO_MORE = -1


class ParameterStore:
    """The weights, with their optimiser. `aware`: the learning rate is divided by the staleness where that is above 1.

    Source: Zhang, Gupta, Lian and Liu, Staleness-aware Async-SGD, IJCAI 2016, section 3.
    """

    def __init__(self, weights: Mapping[str, Tensor], recipe: Recipe, aware: bool) -> None:
        """Take over `weights`: all that are trained, by the graph's names."""
        for weight in weights.values():
            weight.requires_grad_()
        self.weights, self.divisor = weights, 1
        optimiser = make_on_rank(recipe.optimiser, recipe.parameters, weights)
        self.descent = OptimiserStep(weights, optimiser, recipe.rules)
        if aware:
            # As hooks of the optimiser's step, so that the scheduler always sees the undivided rates.
            rates: list[Any] = []

            def divide_rates(*_: object) -> None:
                rates[:] = [group["lr"] for group in optimiser.param_groups]
                for group in optimiser.param_groups:
                    group["lr"] = group["lr"] / self.divisor

            def restore_rates(*_: object) -> None:
                for group, rate in zip(optimiser.param_groups, rates, strict=True):
                    group["lr"] = rate

            optimiser.register_step_pre_hook(divide_rates)
            optimiser.register_step_post_hook(restore_rates)

    def apply(self, gradients: Mapping[str, Tensor], staleness: int) -> None:
        """Run one update with `gradients`, by the graph's names. Raises PlanError if the scheduler is at its end."""
        self.descent.check_schedule()
        for name, gradient in gradients.items():
            self.weights[name].grad = gradient
        self.divisor = max(1, staleness)
        self.descent.step(self.descent.compute_gradient_stats(self.weights))


def list_trained_weights(recipe: Recipe) -> list[list[str]]:
    """Return the weights that each rank of a replica trains, in the rank's order."""
    return [[name for name in program.weights if name in recipe.graph.trainable] for program in recipe.programs]


def assign_gradients(held: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the gradients that each rank of a replica sends: those of weights that no earlier rank holds.

    >>> assign_gradients([["a", "b"], ["b", "c"]])
    [['a', 'b'], ['c']]
    """
    # Spatial parallelism gives several ranks the same weight, and all of them have its whole gradient.
    seen: set[str] = set()
    assigned = []
    for names in held:
        assigned.append([name for name in names if name not in seen])
        seen.update(names)
    return assigned


class ParameterClient(Replica):
    """One rank of a replica: it receives weights from the server, and sends gradients to it."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> None:
        super().__init__(world, with_gradients_only(recipe), asynchrony, feed)
        self.server = asynchrony.replicas * recipe.plan.ranks
        self.sent = assign_gradients(list_trained_weights(recipe))[self.group.rank]

    def train(self) -> None:
        """Train on batches until the server has no more."""
        batch = self._push_pull([])
        while batch != _NO_MORE:
            self.train_batch(batch, self.feed(batch))
            weights = [self.training.weights[name] for name in self.sent]
            gradients = flatten_tensors([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])
            batch = self._push_pull([Message(self.server, BODY, gradients)] if self.sent else [])

    def _push_pull(self, sends: Sequence[Message]) -> int:
        """Send `sends`, receive the server's weights, and return the number of the next batch."""
        weights = self.trained
        header, body = torch.empty(1, dtype=torch.int64), flatten_tensors(weights)
        receives = [Message(self.server, HEADER, header), Message(self.server, BODY, body)]
        self.world.exchange(sends, receives).wait()
        with torch.no_grad():
            for weight, fresh in zip(weights, unflatten_like(body, weights), strict=True):
                weight.copy_(fresh)
        return int(header)


class ParameterServer:
    """The server's rank, after the ranks of all replicas.

    A replica is in one of three states: waiting for weights, at work on a batch, or arrived: its gradient is complete
    and waits to be applied. Each of the replica's ranks that is assigned gradients sends its part of them.

        waiting -- _send_weights --> at_work -- (received) --> arrived -- _apply --> waiting
    """

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony) -> None:
        self.world, self.asynchrony, self.size = world, asynchrony, recipe.plan.ranks
        dtype = getattr(torch, recipe.plan.held_in)
        names = [name for name in recipe.graph.weights if name in recipe.graph.trainable]
        # Copies on the host: the server has no device of its own, and `recipe.state` belongs to the user's model.
        weights = {name: recipe.state[name].detach().to(device="cpu", dtype=dtype, copy=True) for name in names}
        self.keeper = ParameterStore(weights, recipe, asynchrony.staleness_aware)
        self.held = list_trained_weights(recipe)
        self.sent = assign_gradients(self.held)
        self.ledger = VersionTracker(asynchrony.max_staleness)
        self.waiting = deque(range(asynchrony.replicas))
        self.at_work: dict[int, Pending] = {}
        self.arrived: list[int] = []
        self.batches: dict[int, int] = {}
        self.rows: dict[int, list[Tensor]] = {}
        self.granted = 0
        self.log = RankLog(None)
        self._outbox = SendQueue()

    def run(self) -> RankLog:
        """Serve until every replica has received the message that there are no more batches."""
        while self.waiting or self.at_work or self.arrived:
            # All three in every round, so that no replica in one of the states starves those in another.
            here = [replica for replica, pending in self.at_work.items() if pending.is_completed()]
            for replica in here:
                del self.at_work[replica]
            self.arrived += here
            is_idle = not (self._apply() or here)
            while self.waiting and (self._is_exhausted or self.ledger.can_read):
                self._send_weights(self.waiting.popleft())
                is_idle = False
            if is_idle:
                time.sleep(_NAP_S)
            # The sends complete without blocking the loop: a slow replica must not delay the others.
            self._outbox.poll()
        self._outbox.wait()
        self.log.weights = {name: weight.detach() for name, weight in self.keeper.weights.items()}
        return self.log

    def _apply(self) -> bool:
        """Apply the first gradient to arrive that may be applied, and return whether there was one."""
        # One at a time: an update raises the version, so the next `can_apply` must see it.
        replica = next((replica for replica in self.arrived if self.ledger.can_apply(replica)), None)
        if replica is None:
            return False
        self.arrived.remove(replica)
        read = self.ledger.readers[replica]
        staleness = self.ledger.apply(replica)
        # Each rank has sent one flat row with the gradients that it is assigned.
        gradients: dict[str, Tensor] = {}
        for names, row in zip(self.sent, self.rows.pop(replica), strict=True):
            parts = unflatten_like(row, [self.keeper.weights[name] for name in names])
            gradients.update(zip(names, parts, strict=True))
        self.keeper.apply(gradients, staleness)
        self.log.staleness.append(staleness)
        self.log.deeds.append(ReplicaEvent("update", replica, self.batches[replica], read))
        self.waiting.append(replica)
        return True

    @property
    def _is_exhausted(self) -> bool:
        return self.granted == self.asynchrony.budget

    def _send_weights(self, replica: int) -> None:
        batch = _NO_MORE if self._is_exhausted else self.granted
        ranks = range(replica * self.size, (replica + 1) * self.size)
        # The rows are copies: a later update must not change weights that are still on their way.
        header = torch.tensor([batch])
        for rank, names in zip(ranks, self.held, strict=True):
            body = flatten_tensors([self.keeper.weights[name] for name in names])
            self._outbox.add(self.world.exchange([Message(rank, HEADER, header), Message(rank, BODY, body)], []))
        if batch != _NO_MORE:
            self.granted += 1
            self.ledger.read(replica)
            self.batches[replica] = batch
            # The gradient comes in rows of the weights' sizes, one from each rank that is assigned some.
            rows = [flatten_tensors([self.keeper.weights[name] for name in names]) for names in self.sent]
            self.rows[replica] = rows
            receives = [Message(rank, BODY, row) for rank, row in zip(ranks, rows, strict=True) if row.numel()]
            self.at_work[replica] = self.world.exchange([], receives)
