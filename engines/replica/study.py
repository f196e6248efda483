"""The record of a training with replicas: losses, their times, and the staleness of updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engines.replica.asynchrony import Asynchrony

__all__ = ["RankLog", "ReplicaEvent", "ReplicaStep", "ReplicaStudy"]


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
