"""The numbers that describe a machine: how fast one of its ranks computes, and how messages between ranks travel."""

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
"""Algorithms for an all-reduce. `direct`: each rank sends to all others, as our transport does. `two_level`: within the
nodes first and then between them, as NCCL and MVAPICH2 do."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The throughput measured at one size: units of work per second, forward and backward.

    For convolutions and matrix products the unit is a FLOP, and `at` holds the length of a dot product, the number of
    filters, the outputs per filter and, where there are several, the images. For all other kernels the unit is a byte
    read or written in the forward pass, and `at` is (bytes,). Backward work is counted in the units of the forward
    pass. `inputs` and `weights` are the fractions of the backward time that the gradients of the inputs and of the
    weights take when the two are computed separately.
    For a machine known only from its data sheet, the rates are upper bounds, `at` is empty, and `half` holds one size
    for each axis of `at`: the size that would by itself halve the rate. With all cores busy the work takes `crowded`
    times as long, because caches and memory bandwidth are shared. Split over all cores the work takes `spread` times as
    long as on one core (0: the least possible).
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
        """Return the units per second for work of the size `at`, as far as `half` gives the dependence on the size.

        >>> Speed((), 12.0, 6.0, half=(10.0, 20.0)).compute_rate((20.0, 40.0), back=False)
        6.0
        """
        slower = sum(half / max(size, 1) for half, size in zip(self.half, at, strict=False))
        return (self.back_per_s if back else self.per_s) / (1 + slower)


@dataclass(frozen=True, slots=True)
class Link:
    """A link that carries messages: n bytes take `latency_s` + n / `bytes_per_s` seconds on an otherwise idle link."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """One rank's part of a machine, and the links to the other ranks.

    `speeds` are samples by kernel class, for one thread with no other work on the machine. All times are in seconds. A
    kernel call takes `call_s` in addition to its work, `back_call_s` in backward. An instruction of a program takes
    `instruction_s` (an exchange `exchange_s`, if that is larger, and an all-reduce `sum_s`, if that is known). An
    update takes `update_s`, plus `weight_s` for each weight and `statistic_s` for each running statistic of a
    micro-batch. No segment takes less than `least_s` for each of its kernels: the time in which a device's host
    launches the next kernel.
    `copy_per_s` is the rate of copies within a rank in bytes per second, `host_per_s` that between a device and its
    host (None: the rank is its own host and computes in place on data that is in a file). A message takes `latency_s`
    and travels at `bytes_per_s`.
    Ranks are numbered node by node, `node_ranks` on each node (None: all on one). Messages to another node take the
    link `between`. `sums` is one of `SUMS`, and each message of an all-reduce takes an additional `message_s`.
    The ranks of a node share its `cores` (None: each rank has its own device) in time slices of `slice_s`. `Speed`
    holds the slowdown with all cores busy. A rank that has waited finds its caches cold: what its next segment reads
    and writes, up to the size of a cache, takes as long as copying it `cold_copies` times first. If other ranks occupy
    all cores when the event that a rank waits for occurs, the rank requests a core only `resume_s` later. A waiting
    rank also polls on its core for `resume_s` before that core takes over the work of others.
    A kernel of several threads takes `thread_s` for each thread but the first, in addition to what its `Speed` gives,
    for distributing the work and for joining. The duration of work varies at random: the fraction `jitter` of it is
    drawn each time from an exponential distribution, so that a rank that waits for several others waits for the
    slowest.
    `memory_bytes` is the memory of a node where ranks share its cores, else of a device. `ranks` is the number of ranks
    during the measurement, `noise` the noise of the measurement, and `quick` says whether it used few repetitions.
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
        """Return the node of a rank."""
        return rank // self.node_ranks if self.node_ranks else 0

    def needs_core_copy(self, source: int, target: int) -> bool:
        """Return whether the receiver's core copies a message: ranks that share the cores of one host."""
        return self.cores is not None and self.get_node(source) == self.get_node(target)

    def get_rank_bytes(self, ranks: int) -> int | None:
        """Return the memory in bytes that each of `ranks` ranks may use, or None if it is unknown.

        >>> Machine("shared", "an example", {}, cores=2, memory_bytes=8000).get_rank_bytes(4)
        2000
        """
        if self.memory_bytes is None or not self.cores:
            return self.memory_bytes
        return self.memory_bytes // min(ranks, self.node_ranks or ranks)

    def estimate_seconds(self, kind: str, amount: float, at: Sequence[float], back: bool = False) -> float:
        """Return the seconds that one thread takes for `amount` units of a kernel class.

        Raises PlanError if the machine has no samples of the class.
        """
        if not amount:
            return 0.0
        samples = self._get_samples(kind)
        return amount / _interpolate_samples(samples, at, [sample.compute_rate(at, back) for sample in samples])

    def estimate_crowding(self, kind: str, at: Sequence[float]) -> float:
        """Return the slowdown of work of that class and size when all cores are busy."""
        if not self.cores or not self.speeds.get(kind):
            return 1.0
        samples = self.speeds[kind]
        return max(1.0, _interpolate_samples(samples, at, [sample.crowded for sample in samples]))

    def estimate_gradient_parts(self, kind: str, at: Sequence[float]) -> tuple[float, float]:
        """Return the fractions of the backward time for the gradients of the inputs alone, and of the weights alone.

        Raises PlanError if the machine has no samples of the class.
        """
        samples = self._get_samples(kind)
        return (
            _interpolate_samples(samples, at, [sample.inputs for sample in samples]),
            _interpolate_samples(samples, at, [sample.weights for sample in samples]),
        )

    def estimate_spread(self, kind: str, at: Sequence[float]) -> float:
        """Return the time of work of that class and size on all cores together, relative to one core."""
        if not self.cores or not self.speeds.get(kind):
            return 0.0
        samples, least = self.speeds[kind], 1 / self.cores
        return _interpolate_samples(samples, at, [max(least, sample.spread) for sample in samples])

    def compute_threaded_seconds(self, seconds: float, threads: int, spread: float = 0.0) -> float:
        """Return the time with several threads of a kernel that takes `seconds` with one.

        The serial fraction (Amdahl, 1967) follows from `spread`, the relative time on all cores; a kernel that is too
        small to be split is entirely serial. The parallel part takes `thread_s` more for each additional thread,
        however small the part is.

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
        # Amdahl: on all cores a kernel takes `spread` = alone + (1 - alone) / cores of its time on one, which gives the
        # serial fraction `alone`. The same formula then holds for `count` threads.
        least = 1 / self.cores  # type: ignore[operator]
        alone = min(1.0, max(0.0, (spread - least) / (1 - least)))
        return seconds * (alone + (1 - alone) / count) + (1 - alone) * (count - 1) * self.thread_s

    def compute_slowdown(self, busy: int, crowded: float = 1.0) -> float:
        """Return the slowdown of work while `busy` cores are busy; with all of them busy it is `crowded`.

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
        """Return the machine as JSON text, to be stored in a file."""
        return json.dumps(asdict(self), indent=1)

    def _get_samples(self, kind: str) -> tuple[Speed, ...]:
        if not self.speeds.get(kind):
            known = ", ".join(self.speeds)
            raise PlanError(f"The machine {self.name!r} has no speed for {kind}. It knows {known}: calibrate it again.")
        return self.speeds[kind]

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Return the machine that `to_json` wrote.

        Raises PlanError if the text is anything else, or has numbers that would overflow later.
        """
        try:
            # The file may come from anywhere. A wrong number would show up much later, as an overflow in a forecast, or
            # as a simulation without end.
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
