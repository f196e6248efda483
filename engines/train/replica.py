"""One rank of one replica: alone, or as a peer that averages its weights with those of other replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.device import choose_device, compute_threads_per_rank, count_local_ranks
from mpi4dl_nb.engines.comm.world import Message, SubGroup, World
from mpi4dl_nb.engines.program.message_buffers import SendQueue
from mpi4dl_nb.engines.train.asynchrony import Asynchrony, RankLog, ReplicaEvent
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining

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

    def step(self, closure: Any = None) -> Any:
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


# Peers without a server: each replica updates its own weights and averages them with others, without waiting.
#
#     lower                          higher
#       | -- offer: its weights x --> |
#       | (continues its steps)       | after its next step: y becomes (x + y) / 2
#       | <-- answer: y before that - |
#       | after its next step: its weights move by (y - x) / 2
#
# Whatever steps are taken meanwhile, the two moves cancel in the sum of both weights. Only the lower replica of a pair
# offers, and a replica with an open offer does not answer: otherwise two replicas that offer to each other would swap
# their weights instead of averaging them. All ranks of a replica agree at the end of a step on which messages have
# arrived. The states of optimisers and batch norms are not averaged.
#
# Sources: pairs and their roles: Lian, Zhang, Zhang and Liu, Asynchronous Decentralized Parallel Stochastic Gradient
# Descent, ICML 2018, section 3; equal and opposite moves: Zhang, Choromanska and LeCun, Deep learning with Elastic
# Averaging SGD, NIPS 2015, section 2.

_NAP_S = 1e-3
_WEIGHTS, _FAREWELL = 0, 1  # the kinds of messages


def add_half_difference(weights: Sequence[Tensor], toward: Tensor, away: Tensor) -> None:
    """Add half of `toward - away`, two flat rows, to the weights."""
    # Of a pair with weights x and y, one adds (x - y) / 2 and the other (y - x) / 2: the sum of all replicas' weights
    # stays the same, and without steps in between both hold (x + y) / 2.
    with torch.no_grad():
        for weight, part in zip(weights, unflatten_like((toward - away) / 2, weights), strict=True):
            weight.add_(part)


class _IncomingWeights:
    """A pending message from a rank: a header, and a row of weights.

    The header holds the kind of message, and the number of steps of each replica as far as the sender knows it.
    """

    def __init__(self, world: World, rank: int, known: Tensor, row: Tensor) -> None:
        self.header, self.row = torch.empty(1 + known.numel(), dtype=torch.int64), torch.empty_like(row)
        # Posted long before it is needed: the sender never waits for this replica to be ready.
        self._pending = world.exchange([], [Message(rank, HEADER, self.header), Message(rank, BODY, self.row)])
        self._here = False

    @property
    def has_arrived(self) -> bool:
        """Whether the message has arrived."""
        self._here = self._here or self._pending.is_completed()
        return self._here


@dataclass(frozen=True, slots=True)
class _OpenOffer:
    """An open offer of this replica: the weights, the step at which they were sent, and the pending answer."""

    peer: int
    row: Tensor
    step: int
    answer: _IncomingWeights


class PeerReplica(Replica):
    """One rank of a replica that averages weights with the same rank of other replicas."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony, feed: Feed) -> None:
        super().__init__(world, recipe, asynchrony, feed)
        self.known = torch.zeros(asynchrony.replicas, dtype=torch.int64)
        self.offer: _OpenOffer | None = None
        self.higher = range(self.number + 1, asynchrony.replicas)  # the replicas to which this one offers its weights
        self.offers = 0
        self._outbox = SendQueue()
        self.letters = {peer: self._post_receive(peer) for peer in range(self.number)}

    @property
    def steps(self) -> int:
        """The number of steps that this replica has taken."""
        return int(self.known[self.number])

    def train(self) -> None:
        """Train on this replica's own batches until all replicas together have taken enough."""
        while self.known.sum() < self.asynchrony.budget:
            # Replica r takes batches r, r + replicas, ...: no two take the same one, without asking each other.
            batch = self.steps * self.asynchrony.replicas + self.number
            self.train_batch(batch, self.feed(batch))
            self.known[self.number] += 1
            self._record_event("step", batch)
            self.process_arrivals()
            if not self.offer and self.higher and self.steps % self.asynchrony.average_every == 0:
                peer = self.higher[self.offers % len(self.higher)]
                self.offers += 1
                self.offer = _OpenOffer(peer, flatten_tensors(self.trained), self.steps, self._post_receive(peer))
                self._send(peer, _WEIGHTS, self.offer.row)
                self._record_event("offer", peer)
        self._finish()

    def process_arrivals(self) -> None:
        """Handle the messages that have arrived on every rank of the replica."""
        letters = self.letters | ({self.offer.peer: self.offer.answer} if self.offer else {})
        # A message may have arrived on some ranks only. If these acted on it alone, the ranks would hold parts of
        # different weights. So they vote, with the same list of messages at the same point of their work.
        votes = torch.tensor([float(letter.has_arrived) for letter in letters.values()])
        size = self.group.size
        if letters and size > 1:
            all_reduce(self.group, votes, range(size)).wait()
        arrived = [peer for peer, vote in zip(letters, votes.tolist(), strict=True) if vote == size]
        # The answer first: once the own offer is closed, this replica may answer others within the same step.
        if self.offer and self.offer.peer in arrived:
            offer = self.offer
            self.known = torch.maximum(self.known, offer.answer.header[1:])
            add_half_difference(self.trained, offer.answer.row, offer.row)
            self._record_event("close", offer.peer)
            if self.is_log_rank:
                self.log.staleness.append(self.steps - offer.step)
            self.offer = None
        for peer in arrived:
            if self.offer or peer >= self.number:
                continue
            letter, row = self.letters.pop(peer), flatten_tensors(self.trained)
            self.known = torch.maximum(self.known, letter.header[1:])
            if int(letter.header[0]) == _FAREWELL:
                continue
            # `row` is a copy from before the move: the offering replica must move by the same difference, reversed. And
            # the answer is sent before the move, because the send reads `row` while this replica goes on.
            self._send(peer, _WEIGHTS, row)
            add_half_difference(self.trained, letter.row, row)
            self._record_event("answer", peer)
            self.letters[peer] = self._post_receive(peer)
        self._outbox.poll()

    def _finish(self) -> None:
        """Close the open offer, send a farewell to higher replicas, and answer lower ones until they send theirs."""
        #   lower                                             higher
        #     | (waits for the answer to its open offer)        | (answers offers)
        #     | -- farewell --------------------------------->  | posts no further receive for this one
        #
        # The answer always comes, as the receiver of an offer goes on answering until it has the farewell. The highest
        # replica never has an offer of its own, so the waits cannot form a circle.
        announced = False
        while self.letters or self.offer or not announced:
            # The last message to each higher replica, which then posts no further receive for this one.
            if not self.offer and not announced:
                for peer in self.higher:
                    self._send(peer, _FAREWELL, flatten_tensors(self.trained))
                announced = True
            self.process_arrivals()
            time.sleep(_NAP_S)
        self._outbox.wait()

    def _get_peer_rank(self, peer: int) -> int:
        """Return the rank that holds the same part of another replica."""
        return peer * self.group.size + self.group.rank

    def _post_receive(self, peer: int) -> _IncomingWeights:
        return _IncomingWeights(self.world, self._get_peer_rank(peer), self.known, flatten_tensors(self.trained))

    def _send(self, peer: int, kind: int, row: Tensor) -> None:
        header, rank = torch.tensor([kind, *self.known.tolist()]), self._get_peer_rank(peer)
        self._outbox.add(self.world.exchange([Message(rank, HEADER, header), Message(rank, BODY, row)], []))

    def _record_event(self, kind: str, subject: int) -> None:
        if self.is_log_rank:
            self.log.deeds.append(ReplicaEvent(kind, self.number, subject))
