"""A parameter server: one rank holds the weights, and replicas do not wait for each other.

    replica            server
       | <-- batch, weights --  grant
       | -- gradient ------->   apply, when it may be
       | <-- batch, weights --  grant, when it may be; a batch of -1: there are no more

Source: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1 (Downpour SGD).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engines.comm.world import Message, Pending, World
from engines.optimisers import make_on_rank
from engines.program.outbox import Outbox
from engines.program.update import Descent
from engines.replica.asynchrony import Asynchrony
from engines.replica.replica import BODY, HEADER, Feed, Replica, flat, holdings, into, without_updates
from engines.replica.staleness import Ledger
from engines.replica.study import Deed, RankDiary
from engines.training import Recipe

__all__ = ["Client", "Keeper", "Server"]

_NAP_S = 2e-4
_NO_MORE = -1


class Keeper:
    """Weights and what moves them. `aware`: the learning rate is divided by the staleness where that is above 1.

    Source: Zhang, Gupta, Lian and Liu, Staleness-aware Async-SGD, IJCAI 2016, section 3.
    """

    def __init__(self, weights: Mapping[str, Tensor], recipe: Recipe, aware: bool) -> None:
        """`weights` are all that are trained, by the graph's names."""
        for weight in weights.values():
            weight.requires_grad_()
        self.weights, self.divisor = weights, 1
        optimiser = make_on_rank(recipe.optimiser, recipe.parameters, weights)
        self.descent = Descent(weights, optimiser, recipe.rules)
        if aware:
            optimiser.register_step_pre_hook(lambda *_: self._slow_down(optimiser))
            optimiser.register_step_post_hook(lambda *_: self._speed_up(optimiser))

    def apply(self, gradients: Mapping[str, Tensor], staleness: int) -> None:
        """One update. `gradients` are by the graph's names."""
        for name, gradient in gradients.items():
            self.weights[name].grad = gradient
        self.divisor = max(1, staleness)
        self.descent.step(self.descent.told(self.weights))

    def _slow_down(self, optimiser: torch.optim.Optimizer) -> None:
        self._rates = [group["lr"] for group in optimiser.param_groups]
        for group in optimiser.param_groups:
            group["lr"] = group["lr"] / self.divisor

    def _speed_up(self, optimiser: torch.optim.Optimizer) -> None:
        for group, rate in zip(optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate


def shares(held: Sequence[Sequence[str]]) -> list[list[str]]:
    """The gradients that each rank of a replica sends: of weights that no rank before it holds.

    >>> shares([["a", "b"], ["b", "c"]])
    [['a', 'b'], ['c']]
    """
    seen: set[str] = set()
    found = []
    for names in held:
        found.append([name for name in names if name not in seen])
        seen.update(names)
    return found


class Client:
    """One rank of a replica: weights from the server, gradient to the server."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> None:
        self.replica = Replica(world, without_updates(recipe), asynchrony)
        self.world, self.feed = world, feed
        self.server = asynchrony.replicas * recipe.plan.ranks
        self.sent = shares(holdings(recipe))[self.replica.world.rank]

    def run(self) -> RankDiary:
        """Take batches until there are no more."""
        self.replica.start_clock()
        number = self._fetched([])
        while number != _NO_MORE:
            self.replica.take(number, self.feed(number))
            number = self._fetched([Message(self.server, BODY, self._gradient())] if self.sent else [])
        return self.replica.told()

    def _gradient(self) -> Tensor:
        weights = (self.replica.training.weights[name] for name in self.sent)
        return flat([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])

    def _fetched(self, sends: Sequence[Message]) -> int:
        """Send what there is to send, and take over the server's weights; the number of the next batch."""
        weights = self.replica.trained
        header, body = torch.empty(1, dtype=torch.int64), flat(weights)
        receives = [Message(self.server, HEADER, header), Message(self.server, BODY, body)]
        self.world.exchange(sends, receives).wait()
        with torch.no_grad():
            for weight, fresh in zip(weights, into(body, weights), strict=True):
                weight.copy_(fresh)
        return int(header)


class Server:
    """The rank behind all replicas.

    A replica is waiting for weights, at work, or has arrived with a gradient that waits to be applied; its gradient
    comes in pieces, from each of its ranks that has one to send.
    """

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony) -> None:
        self.world, self.asynchrony, self.size = world, asynchrony, recipe.plan.ranks
        dtype = getattr(torch, recipe.plan.held_in)
        names = [name for name in recipe.graph.weights if name in recipe.graph.trainable]
        weights = {name: recipe.state[name].detach().to(device="cpu", dtype=dtype, copy=True) for name in names}
        self.keeper = Keeper(weights, recipe, asynchrony.staleness_aware)
        self.held = holdings(recipe)
        self.sent = shares(self.held)
        self.ledger = Ledger(asynchrony.max_staleness)
        self.waiting = deque(range(asynchrony.replicas))
        self.at_work: dict[int, Pending] = {}
        self.arrived: list[int] = []
        self.batches: dict[int, int] = {}
        self.rows: dict[int, list[Tensor]] = {}
        self.granted = 0
        self.diary = RankDiary(None)
        self._outbox = Outbox()

    def run(self) -> RankDiary:
        """Serve until every replica has been told that there are no more batches."""
        while self.waiting or self.at_work or self.arrived:
            if not (self._collect() + self._apply() + self._grant()):
                time.sleep(_NAP_S)
            self._outbox.look()
        self._outbox.wait()
        self.diary.weights = {name: weight.detach() for name, weight in self.keeper.weights.items()}
        return self.diary

    def _collect(self) -> int:
        """Note whose gradient is here; how many."""
        here = [replica for replica, pending in self.at_work.items() if pending.done()]
        for replica in here:
            del self.at_work[replica]
        self.arrived += here
        return len(here)

    def _apply(self) -> int:
        """Apply the gradients that may be applied, in the order in which they came; how many."""
        ready = [replica for replica in self.arrived if self.ledger.may_apply(replica)][:1]
        for replica in ready:
            self.arrived.remove(replica)
            self._update(replica)
            self.waiting.append(replica)
        return len(ready)

    def _update(self, replica: int) -> None:
        read = self.ledger.readers[replica]
        staleness = self.ledger.apply(replica)
        gradients: dict[str, Tensor] = {}
        for names, row in zip(self.sent, self.rows.pop(replica), strict=True):
            parts = into(row, [self.keeper.weights[name] for name in names])
            gradients.update(zip(names, parts, strict=True))
        self.keeper.apply(gradients, staleness)
        self.diary.staleness.append(staleness)
        self.diary.deeds.append(Deed("update", replica, self.batches[replica], read))

    def _grant(self) -> int:
        """Give weights and batches to replicas that wait for them, while they may read; how many."""
        count = 0
        while self.waiting and self._may_answer:
            self._answer(self.waiting.popleft())
            count += 1
        return count

    @property
    def _no_more(self) -> bool:
        return self.granted == self.asynchrony.budget

    @property
    def _may_answer(self) -> bool:
        return self._no_more or self.ledger.may_read

    def _answer(self, replica: int) -> None:
        number = _NO_MORE if self._no_more else self.granted
        ranks = range(replica * self.size, (replica + 1) * self.size)
        header = torch.tensor([number])
        for rank, names in zip(ranks, self.held, strict=True):
            body = flat([self.keeper.weights[name] for name in names])
            self._outbox.add(self.world.exchange([Message(rank, HEADER, header), Message(rank, BODY, body)], []))
        if number != _NO_MORE:
            self.granted += 1
            self.ledger.read(replica)
            self.batches[replica] = number
            self._await(replica, ranks)

    def _await(self, replica: int, ranks: Sequence[int]) -> None:
        """Be ready for a replica's gradient."""
        rows = [flat([self.keeper.weights[name] for name in names]) for names in self.sent]
        self.rows[replica] = rows
        receives = [Message(rank, BODY, row) for rank, row in zip(ranks, rows, strict=True) if row.numel()]
        self.at_work[replica] = self.world.exchange([], receives)
