"""Asynchronous replicas: the user's choices for a study, and the record of what all replicas did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from mpi4dl_nb.engines.checks import check_choice
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.formatting import FactTable, format_count, format_seconds
from mpi4dl_nb.engines.plan import Plan

MODES = ("synchronous", "server", "peers")


@dataclass(frozen=True, kw_only=True)
class Asynchrony:
    """How `replicas` of a plan train together, each on `steps` batches on average. Checked when it is made.

    `synchronous`: all replicas wait for each other at every update, as with `Plan.data_parallel`.
    `server`: one additional rank holds the weights. It applies each replica's gradient as it arrives, and sends that
    replica new weights and the next batch; no replica waits for a slower one (Downpour SGD: Dean et al., 2012, section
    4.1). `max_staleness` bounds how many updates may come between reading weights and updating them (None: any number).
    `staleness_aware` divides the learning rate by the staleness (Zhang, Gupta, Lian and Liu, 2016, section 3).
    `peers`: each replica updates its own weights and, after every `average_every` of its steps, offers them to another
    replica in turn; both take the average, each at the end of its next step (AD-PSGD: Lian et al., 2018, section 3).
    Each asynchronous replica has the loss of its own batches: if the loss divides by what its labels count, the mean
    over replicas is not the loss of all batches together.
    `slow` maps replicas to the seconds that they sleep in each step, to make asynchrony visible.

    Raises PlanError with the numbers and a remedy.
    """

    mode: str = "server"
    replicas: int = 3
    steps: int = 30
    max_staleness: int | None = None
    staleness_aware: bool = False
    average_every: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        for name in ("replicas", "steps", "average_every"):
            _check_count(name, getattr(self, name), 1)
        if self.max_staleness is not None:
            _check_count("max_staleness", self.max_staleness, 0)
        if not isinstance(self.slow, Mapping):
            raise PlanError(f"slow={self.slow!r} must map replicas to seconds, such as {{0: 1.0}}.")
        slow: Mapping[Any, Any] = self.slow
        for replica, seconds in slow.items():
            right = isinstance(seconds, Real) and math.isfinite(seconds) and float(seconds) >= 0
            if replica not in range(self.replicas) or not right:
                raise PlanError(
                    f"slow={dict(self.slow)} must say how many seconds (0 or more) replicas 0 to {self.replicas - 1} "
                    f"sleep in each step, but it says {seconds!r} for replica {replica}."
                )
        for name, mode in (("max_staleness", "server"), ("staleness_aware", "server"), ("average_every", "peers")):
            if self.mode != mode and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise PlanError(
                    f"{name}={getattr(self, name)!r} says nothing about mode={self.mode!r}. "
                    f"Leave it out, or set mode={mode!r}."
                )

    @property
    def budget(self) -> int:
        """The number of batches that all replicas take together.

        Peers, which have no common count, may take a few more.
        """
        return self.replicas * self.steps

    def count_ranks(self, plan: Plan) -> int:
        """Return the number of ranks that replicas of a plan need.

        >>> Asynchrony(mode="server", replicas=3).count_ranks(Plan(split_size=1, spatial_size=0))
        4
        """
        return self.replicas * plan.ranks + (self.mode == "server")

    def check(self, plan: Plan, ranks: int) -> None:
        """Raise PlanError if `ranks` are too few, the plan has own replicas, or `server` has float16 replicas."""
        if plan.data_parallel != 1:
            raise PlanError(
                f"data_parallel={plan.data_parallel} replicas wait for each other inside of a plan. Leave it at 1: "
                f"replicas={self.replicas} says how many copies of the plan there are."
            )
        if self.mode == "server" and plan.precision == "float16":
            raise PlanError(
                "With precision='float16' the loss is scaled so that no gradient is infinite, on which replicas of a "
                "server would have to agree, and wait for each other. Use bfloat16, or mode='peers'."
            )
        if ranks < (needed := self.count_ranks(plan)):
            wanted = format_count(plan.ranks, "rank") + " and a server" * (self.mode == "server")
            raise PlanError(
                f"{self.replicas} replicas of {wanted} need {needed} ranks, but there are {ranks}. "
                f"Start {needed} ranks, or use fewer replicas."
            )


def _check_count(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise PlanError(f"{name}={value!r} must be a whole number of at least {low}.")


# The age of the weights from which gradients are computed, and its bound.


class VersionTracker:
    """The version of the weights that each replica reads. Versions count the updates.

    The staleness of an update is the number of other updates since its replica read the weights (Dean et al., 2012,
    section 4.1). With `max_staleness` no update exceeds that staleness. The bound is on versions, which is stricter
    than a bound on the steps between replicas (Ho et al., 2013, section 3). Of n replicas at work, ordered from the
    oldest read, the i-th (from 0) is applied after i others at the earliest. So a replica may read, and an update be
    applied, while `version + i - read` of each stays within the bound. The oldest reader may always be applied, so no
    replica waits for ever.

    >>> ledger = VersionTracker(max_staleness=1)
    >>> for replica in (0, 1):
    ...     ledger.read(replica)
    >>> ledger.can_read
    False
    >>> ledger.apply(1)
    0
    >>> ledger.read(1)
    >>> ledger.can_apply(1), ledger.can_apply(0)
    (False, True)
    >>> ledger.apply(0)
    1
    """

    def __init__(self, max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self.version = 0
        self.readers: dict[int, int] = {}

    @property
    def can_read(self) -> bool:
        """Whether one more replica may read the weights now."""
        return self.max_staleness is None or len(self.readers) <= self.max_staleness

    def read(self, replica: int) -> None:
        """Record that a replica reads the current weights."""
        self.readers[replica] = self.version

    def can_apply(self, replica: int) -> bool:
        """Return whether applying this replica's update now keeps all other updates within the bound."""
        bound = self.max_staleness
        others = sorted(read for reader, read in self.readers.items() if reader != replica)
        # This update raises the version by one; the i-th oldest of the others is applied after i more at the earliest.
        return bound is None or all(self.version + 1 + i - read <= bound for i, read in enumerate(others))

    def apply(self, replica: int) -> int:
        """Record a replica's update as a new version, and return its staleness."""
        staleness = self.version - self.readers.pop(replica)
        self.version += 1
        return staleness


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
    weights: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ReplicaStudy(FactTable):
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
    weights: tuple[Mapping[str, Any], ...]

    caption = "Training with replicas"

    @property
    def facts(self) -> dict[str, object]:
        return {
            "mode": self.asynchrony.mode,
            "replicas": self.asynchrony.replicas,
            "batches": f"{len(self.turns)} of {self.images_per_batch} images",
            "time": format_seconds(self.seconds),
            "last loss": f"{self.turns[-1].loss:.6g}" if self.turns else None,
        }

    @classmethod
    def of(cls, asynchrony: Asynchrony, images_per_batch: int, logs: Sequence[RankLog]) -> ReplicaStudy:
        """Merge the logs of all ranks."""
        replicas = [[log for log in logs if log.replica == replica] for replica in range(asynchrony.replicas)]
        turns = []
        for replica, group in enumerate(replicas):
            # The ranks of one replica may have losses of different micro-batches, or none.
            losses: dict[int, dict[int, float]] = {}
            ends: dict[int, float] = {}
            for log in group:
                for batch, known, end_s in log.turns:
                    losses.setdefault(batch, {}).update(known)
                    ends[batch] = max(end_s, ends.get(batch, 0.0))
            turns += [ReplicaStep(replica, b, sum(known.values()) / len(known), ends[b]) for b, known in losses.items()]
        servers = [log for log in logs if log.replica is None and log.weights]
        # As many sets of weights as differ: the server's, those of each peer, or one for all synchronous replicas.
        copies = [servers] if servers else replicas if asynchrony.mode == "peers" else replicas[:1]
        return cls(
            asynchrony,
            images_per_batch,
            tuple(sorted(turns, key=lambda turn: turn.end_s)),
            tuple(late for log in logs for late in log.staleness),
            tuple(deed for log in logs for deed in log.deeds),
            tuple({n: w for log in group for n, w in log.weights.items()} for group in copies),
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
