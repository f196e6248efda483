"""One replica of an asynchronous training, and the record of what all replicas did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engines.comm.device import choose_device, compute_threads_per_rank, count_local_ranks
from engines.comm.world import SubGroup, World
from engines.program.compile import compile_plan
from engines.train.asynchrony import Asynchrony
from engines.train.training import RankTraining, Recipe

__all__ = [
    "BODY",
    "HEADER",
    "Feed",
    "RankLog",
    "Replica",
    "ReplicaEvent",
    "ReplicaStep",
    "ReplicaStudy",
    "flatten_tensors",
    "list_trained_weights",
    "unflatten_like",
    "with_gradients_only",
]


# The record of a training with replicas: losses, their times, and the staleness of updates.


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """A batch taken by a replica: the loss before its update, and the time of completion in seconds since the start."""

    replica: int
    batch: int
    loss: float
    end_s: float


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """An event that changed weights. The events in order suffice to repeat the training in one process.

    `update`: the server applied the gradient that `replica` computed on batch `subject` from weights of version `read`.
    `step`: a peer took batch `subject`. `offer`: it sent its weights to peer `subject`. `answer`: it averaged its
    weights with those that `subject` had offered, and sent back its own from before. `close`: it moved its weights by
    the answer to its own offer.
    """

    kind: str
    replica: int
    subject: int
    read: int = -1


@dataclass
class RankLog:
    """The log of one rank at the end of a training; `replica` is None for a server or an idle rank.

    `turns` are (batch, losses on this rank by micro-batch, seconds since the start). `staleness` and `deeds` are filled
    by one rank of a replica, or by the server; `weights` by all ranks.
    """

    replica: int | None
    turns: list[tuple[int, Mapping[int, float], float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    deeds: list[ReplicaEvent] = field(default_factory=list)
    weights: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaStudy:
    """The record of one training with replicas; the same on every rank.

    `turns` are ordered by time. `staleness` holds, for each update of a server's weights, the number of other updates
    since its replica had read them; for each average of two peers, the number of steps that the offering peer has taken
    meanwhile. `deeds` are in the server's order, or in each peer's. `weights` are by the graph's names: the server's,
    or those of each replica if replicas have weights of their own.
    """

    asynchrony: Asynchrony
    images_per_batch: int
    turns: tuple[ReplicaStep, ...]
    staleness: tuple[int, ...]
    deeds: tuple[ReplicaEvent, ...]
    weights: tuple[Mapping[str, Tensor], ...]

    @classmethod
    def of(cls, asynchrony: Asynchrony, images_per_batch: int, diaries: Sequence[RankLog]) -> ReplicaStudy:
        """Merge the logs of all ranks."""
        replicas = [[d for d in diaries if d.replica == number] for number in range(asynchrony.replicas)]
        turns = []
        for number, group in enumerate(replicas):
            # The ranks of one replica may have losses of different micro-batches, or none.
            losses: dict[int, dict[int, float]] = {}
            ends: dict[int, float] = {}
            for diary in group:
                for batch, known, end_s in diary.turns:
                    losses.setdefault(batch, {}).update(known)
                    ends[batch] = max(end_s, ends.get(batch, 0.0))
            turns += [ReplicaStep(number, b, sum(known.values()) / len(known), ends[b]) for b, known in losses.items()]
        servers = [diary for diary in diaries if diary.replica is None and diary.weights]
        # As many sets of weights as differ: the server's, those of each peer, or one for all synchronous replicas.
        copies = [servers] if servers else replicas if asynchrony.mode == "peers" else replicas[:1]
        return cls(
            asynchrony,
            images_per_batch,
            tuple(sorted(turns, key=lambda turn: turn.end_s)),
            tuple(late for diary in diaries for late in diary.staleness),
            tuple(deed for diary in diaries for deed in diary.deeds),
            tuple({n: w for diary in group for n, w in diary.weights.items()} for group in copies),
        )

    @property
    def mode(self) -> str:
        """The mode: synchronous, server or peers."""
        return self.asynchrony.mode

    @property
    def seconds(self) -> float:
        """The time from the start to the end of the last batch."""
        return self.turns[-1].end_s

    @property
    def images_per_s(self) -> float:
        """Images per second of all replicas together."""
        return len(self.turns) * self.images_per_batch / self.seconds

    @property
    def final_loss(self) -> float:
        """The mean loss of the last fifth of the batches."""
        last = self.turns[-max(1, len(self.turns) // 5) :]
        return sum(turn.loss for turn in last) / len(last)

    @property
    def histogram(self) -> dict[int, int]:
        """The number of occurrences of each staleness, ascending."""
        return dict(sorted(Counter(self.staleness).items()))

    @property
    def batches(self) -> tuple[int, ...]:
        """The number of batches that each replica took."""
        counts = Counter(turn.replica for turn in self.turns)
        return tuple(counts[replica] for replica in range(self.asynchrony.replicas))

    @property
    def line(self) -> dict[str, object]:
        """A summary of the study, to be printed as a line of JSON."""
        late = self.staleness
        return {
            "mode": self.mode,
            "replicas": self.asynchrony.replicas,
            "batches": self.batches,
            "first_loss": round(self.turns[0].loss, 5),
            "final_loss": round(self.final_loss, 5),
            "mean_staleness": round(sum(late) / len(late), 3) if late else 0.0,
            "max_staleness": max(late, default=0),
            "staleness": self.histogram,
            "images_per_s": round(self.images_per_s, 3),
            "seconds": round(self.seconds, 3),
        }


# One rank of one replica: the ordinary training of a plan, on the ranks of this replica alone.


Feed = Callable[[int], Mapping[str, Tensor]]
"""Returns the whole inputs of one replica's step for a batch number (0, 1, ...), the same on every rank."""

HEADER, BODY = 2, 3
"""Tags of messages between replicas, and with a server: between ranks that have no program in common."""


class GradientsOnly(torch.optim.Optimizer):
    """An optimiser that leaves the weights unchanged: only their gradients are needed."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class Replica:
    """This rank's part of its replica, and its log."""

    def __init__(self, world: World, recipe: Recipe, asynchrony: Asynchrony) -> None:
        size = recipe.plan.ranks
        self.asynchrony, self.number = asynchrony, world.rank // size
        self.world = SubGroup(world, range(self.number * size, (self.number + 1) * size))
        # By the rank in the whole world, so that replicas on one host get other GPUs. Each replica has its own seed,
        # as all would draw the same dropout masks otherwise.
        device, seed = str(choose_device(recipe.device, world.rank)), recipe.seed + self.number
        self.training = RankTraining(self.world, replace(recipe, device=device, seed=seed))
        # The training itself knows only the ranks of this replica, but all replicas share the cores.
        self.training.threads = compute_threads_per_rank(count_local_ranks(world.size))
        self.diary = RankLog(self.number)
        self._start_s = time.perf_counter()

    @property
    def is_log_rank(self) -> bool:
        """Whether this rank logs what all ranks of the replica have in common."""
        return self.world.rank == 0

    @property
    def trained(self) -> list[Tensor]:
        """This rank's trained weights, in the graph's order."""
        return [weight for weight in self.training.weights.values() if weight.requires_grad]

    def start_clock(self) -> None:
        """Set the start time to now."""
        self._start_s = time.perf_counter()

    def train_batch(self, number: int, batch: Mapping[str, Tensor]) -> None:
        """Run one step on a batch, and sleep for as long as the study says."""
        losses = self.training.step(self.training.cut(batch)).losses
        time.sleep(self.asynchrony.slow.get(self.number, 0.0))
        self.diary.turns.append((number, losses, time.perf_counter() - self._start_s))

    def finish_log(self) -> RankLog:
        """Add the final weights to the log, and return it."""
        self.diary.weights = self.training.copy_tensors()["weights"]
        return self.diary


def with_gradients_only(recipe: Recipe) -> Recipe:
    """Return the same training with an optimiser that changes no weights, so that a step only computes gradients."""
    return replace(recipe, optimiser=GradientsOnly, clip_norm=None, scheduler=None)


def list_trained_weights(recipe: Recipe) -> list[list[str]]:
    """Return the weights that each rank of a replica trains, in the rank's order."""
    programs = compile_plan(recipe.graph, recipe.plan)
    return [[name for name in program.weights if name in recipe.graph.trainable] for program in programs]


def flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all elements of the tensors into one flat row."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]) if tensors else torch.empty(0)


def unflatten_like(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat row into views with the shapes of `tensors`."""
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
