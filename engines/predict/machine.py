"""A machine as numbers: how fast one of its ranks computes, and how messages between them travel."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from engines.errors import PlanError
from engines.predict.interpolation import interpolate
from engines.predict.machine_schema import check_machine
from engines.predict.noise import Noise

__all__ = ["SUMS", "Link", "Machine", "Speed"]

SUMS = ("direct", "two_level")
"""How a sum over ranks travels: from each rank to all others, as our transport does, or within the nodes and then
between them, as NCCL and MVAPICH2 do."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What was seen at one size: units of work in a second, going forward and back.

    Of convolutions and products the unit is a FLOP and `at` (length of a dot product, filters, outputs per filter, and
    images where it has any); of all others it is a byte read or written going forward, and `at` (bytes,). Backward is
    counted in units of forward, and `inputs` and `weights` are the parts of its time that each of the two takes whose
    gradients are computed apart.
    Of a machine known from its data sheet alone, these are what is never exceeded, `at` is empty, and `half` are the
    sizes, along each axis of `at`, each of which would by itself make it half as fast. With all cores at work it takes
    `crowded` times as long: caches and the way to memory are shared. Shared out among all cores it takes `spread` times
    as long as on one (0: as little as can be).
    """

    at: tuple[float, ...]
    per_s: float
    back_per_s: float
    half: tuple[float, ...] = ()
    crowded: float = 1.0
    spread: float = 0.0
    inputs: float = 0.5
    weights: float = 0.5

    def compute_rate(self, at: Sequence[float], back: bool) -> float:
        """Units in a second of work of a size, as far as `half` says how they depend on it.

        >>> Speed((), 12.0, 6.0, half=(10.0, 20.0)).compute_rate((20.0, 40.0), back=False)
        6.0
        """
        slower = sum(half / max(size, 1) for half, size in zip(self.half, at, strict=False))
        return (self.back_per_s if back else self.per_s) / (1 + slower)


@dataclass(frozen=True, slots=True)
class Link:
    """What carries messages: n bytes take `latency_s` + n / `bytes_per_s`, where they have the link for themselves."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """One rank's part of a machine, and its neighbours.

    `speeds` are samples by class of kernels, of one thread with nobody else at work. A kernel call takes `call_s`
    beside its work, `back_call_s` in backward, and an instruction of a program `instruction_s` (an exchange
    `exchange_s`, if that is more, a sum over ranks `sum_s`, where these are known); an update
    takes `update_s`, and `weight_s` for each weight and `statistic_s` for each running statistic of a micro-batch. No
    segment is done in less than `least_s` for each of its kernels, in which a device's host starts the next one.
    `copy_per_s` are bytes copied within a rank, `host_per_s` those between a device and its host (None: it is its own
    host, and computes with what lies in a file where it is). A message takes `latency_s` and travels at `bytes_per_s`.
    Ranks are numbered node by node, `node_ranks` on each (None: all on one), and what goes to another node takes the
    link `between`; `sums` is one of `SUMS`, and each of their messages takes `message_s` more.
    The ranks of a node share its `cores` (None: each has its own device) in turns of `slice_s`; what is longer with
    all of them busy, its `Speed` says. A rank that waited finds its caches cold: what its next segment reads and
    writes, as far as it could be in a cache, takes as long as to copy it `cold_copies` times first. Where others have
    all cores when that comes for which it waited, it is `resume_s` before it asks for one of them; and whoever waits
    looks for so long on its core, before that takes over what others have to do.
    A kernel of several threads takes `thread_s` for each of them but the first, beside what its `Speed` says: to share
    out, and to end together. Work is longer or shorter at random: of its time the share `jitter` is drawn each time by
    an exponential law, so that those who wait for several ranks wait for the slowest.
    `memory_bytes` are a node's where ranks share its cores, else a device's. `ranks`: how many there were when it was
    measured, with how much `noise`, and whether by few repetitions (`quick`).
    """

    name: str
    source: str
    speeds: Mapping[str, tuple[Speed, ...]]
    call_s: float = 0.0
    back_call_s: float = 0.0
    least_s: float = 0.0
    instruction_s: float = 0.0
    exchange_s: float = 0.0
    sum_s: float = 0.0
    weight_s: float = 0.0
    statistic_s: float = 0.0
    update_s: float = 0.0
    copy_per_s: float = math.inf
    host_per_s: float | None = None
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    cores: int | None = None
    slice_s: float = 3e-3
    resume_s: float = 0.0
    cold_copies: float = 0.0
    thread_s: float = 0.0
    jitter: float = 0.0
    memory_bytes: int | None = None
    ranks: int | None = None
    node_ranks: int | None = None
    between: Link | None = None
    sums: str = "direct"
    message_s: float = 0.0
    noise: Noise = field(default_factory=Noise)
    quick: bool = False

    def get_node(self, rank: int) -> int:
        """On which node a rank is."""
        return rank // self.node_ranks if self.node_ranks else 0

    def needs_core_copy(self, source: int, target: int) -> bool:
        """Whether the receiver's core carries a message between them: where ranks share the cores of one host."""
        return self.cores is not None and self.get_node(source) == self.get_node(target)

    def get_rank_bytes(self, ranks: int) -> int | None:
        """The memory that each of so many ranks may use, if it is known.

        >>> Machine("shared", "an example", {}, cores=2, memory_bytes=8000).get_rank_bytes(4)
        2000
        """
        if self.memory_bytes is None or not self.cores:
            return self.memory_bytes
        return self.memory_bytes // min(ranks, self.node_ranks or ranks)

    def estimate_seconds(self, kind: str, amount: float, at: Sequence[float], back: bool = False) -> float:
        """One thread's time for so many units of a class of kernels. Raises PlanError where no such class was seen."""
        if not amount:
            return 0.0
        samples = self._get_samples(kind)
        return amount / _interpolate_samples(samples, at, [sample.compute_rate(at, back) for sample in samples])

    def estimate_crowding(self, kind: str, at: Sequence[float]) -> float:
        """How many times as long work of that class and size takes with all cores at work."""
        if not self.cores or not self.speeds.get(kind):
            return 1.0
        samples = self.speeds[kind]
        return max(1.0, _interpolate_samples(samples, at, [sample.crowded for sample in samples]))

    def estimate_gradient_parts(self, kind: str, at: Sequence[float]) -> tuple[float, float]:
        """The parts of backward's time that the gradients of inputs alone take, and those of weights alone.

        Raises PlanError as `seconds`.
        """
        samples = self._get_samples(kind)
        return (
            _interpolate_samples(samples, at, [sample.inputs for sample in samples]),
            _interpolate_samples(samples, at, [sample.weights for sample in samples]),
        )

    def estimate_spread(self, kind: str, at: Sequence[float]) -> float:
        """How many times as long work of that class and size takes on all cores together as on one."""
        if not self.cores or not self.speeds.get(kind):
            return 0.0
        samples, least = self.speeds[kind], 1 / self.cores
        return _interpolate_samples(samples, at, [max(least, sample.spread) for sample in samples])

    def compute_threaded_seconds(self, seconds: float, threads: int, spread: float = 0.0) -> float:
        """What a kernel of one thread takes with several: each does its part, and they wait for each other.

        A part of it is nobody's (Amdahl, 1967), which its `spread` over all cores tells: all of it, where a kernel is
        so small that it is left to one thread. What is shared out takes `thread_s` more, however small it is.

        >>> machine = Machine("two cores", "an example", {}, cores=2, thread_s=0.5)
        >>> (
        ...     machine.compute_threaded_seconds(4.0, threads=2),
        ...     machine.compute_threaded_seconds(0.5, threads=2),
        ...     machine.compute_threaded_seconds(4.0, 2, spread=0.75),
        ... )
        (2.5, 0.75, 3.25)
        """
        count = min(threads, self.cores or 1)
        if count <= 1:
            return seconds
        least = 1 / self.cores  # type: ignore[operator]
        alone = min(1.0, max(0.0, (spread - least) / (1 - least)))
        return seconds * (alone + (1 - alone) / count) + (1 - alone) * (count - 1) * self.thread_s

    def compute_slowdown(self, busy: int, crowded: float = 1.0) -> float:
        """How much longer work takes while so many cores are busy; with all of them, `crowded` times.

        >>> machine = Machine("three cores", "an example", {}, cores=3)
        >>> (
        ...     machine.compute_slowdown(1, crowded=2.0),
        ...     machine.compute_slowdown(2, crowded=2.0),
        ...     machine.compute_slowdown(3, crowded=2.0),
        ... )
        (1.0, 1.5, 2.0)
        """
        if not self.cores or busy <= 1:
            return 1.0
        return 1 + (crowded - 1) * min(1.0, (busy - 1) / max(1, self.cores - 1))

    def to_json(self) -> str:
        """As text, to be kept in a file."""
        return json.dumps(asdict(self), indent=1)

    def _get_samples(self, kind: str) -> tuple[Speed, ...]:
        if not self.speeds.get(kind):
            known = ", ".join(self.speeds)
            raise PlanError(f"The machine {self.name!r} has no speed for {kind}. It knows {known}: calibrate it again.")
        return self.speeds[kind]

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """What `to_json` has written. Raises PlanError where it is something else, or would overflow later."""
        try:
            fields = json.loads(text)
            check_machine(fields)
            fields["speeds"] = {
                kind: tuple(Speed(**s | {"at": tuple(s["at"]), "half": tuple(s.get("half", ()))}) for s in samples)
                for kind, samples in fields["speeds"].items()
            }
            if fields.get("between"):
                fields["between"] = Link(**fields["between"])
            fields["noise"] = Noise(**fields.get("noise", {}))
            if fields.get("sums", SUMS[0]) not in SUMS:
                raise ValueError(f"sums is {fields['sums'][:24]!r}, which is none of {', '.join(SUMS)}")
            return cls(**fields)
        except (ValueError, TypeError, RecursionError) as error:
            raise PlanError(f"This is no machine that was stored: {error}. Calibrate, and store it again.") from error


def _interpolate_samples(samples: Sequence[Speed], at: Sequence[float], numbers: Sequence[float]) -> float:
    return interpolate([sample.at for sample in samples], at, numbers)
