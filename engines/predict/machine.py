"""A machine as numbers: how fast one of its ranks computes, and how messages between them travel."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from engines.errors import PlanError

__all__ = ["Machine", "Speed"]


@dataclass(frozen=True, slots=True)
class Speed:
    """What was seen at one size: units of work in a second, going forward and back.

    Of convolutions and products the unit is a FLOP and `at` (length of a dot product, filters, outputs per filter); of
    all others it is a byte read or written going forward, and `at` (bytes,). Backward is counted in units of forward.
    """

    at: tuple[float, ...]
    per_s: float
    back_per_s: float


@dataclass(frozen=True)
class Machine:
    """One rank's part of a machine, and its neighbours.

    `speeds` are samples by class of kernels, of one thread with nobody else at work. A kernel call takes `call_s`
    beside its work, `back_call_s` in backward, and an instruction of a program `instruction_s`; an update takes
    `weight_s` for each weight and `statistic_s` for each running statistic of a micro-batch.
    `copy_per_s` are bytes copied within a rank. A message takes `latency_s` and travels at `bytes_per_s`.
    All ranks share `cores` (None: each has its own device); with all of them busy, each does `contention` times as long
    for what it does. `threads_gain` is how much faster a rank is with all cores than with one. `ranks`: how many
    there were when it was measured.
    """

    name: str
    source: str
    speeds: Mapping[str, tuple[Speed, ...]]
    call_s: float = 0.0
    back_call_s: float = 0.0
    instruction_s: float = 0.0
    weight_s: float = 0.0
    statistic_s: float = 0.0
    copy_per_s: float = math.inf
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    cores: int | None = None
    contention: float = 1.0
    threads_gain: float = 1.0
    memory_bytes: int | None = None
    ranks: int | None = None

    def seconds(self, kind: str, amount: float, at: Sequence[float], back: bool = False) -> float:
        """One thread's time for so many units of a class of kernels. Raises PlanError where no such class was seen."""
        if not amount:
            return 0.0
        if kind not in self.speeds:
            known = ", ".join(self.speeds)
            raise PlanError(f"The machine {self.name!r} has no speed for {kind}. It knows {known}: calibrate it again.")
        return amount / _between(self.speeds[kind], at, back)

    def threaded(self, threads: int) -> float:
        """How much faster several threads of a rank are than one."""
        if not self.cores or threads <= 1 or self.cores <= 1:
            return 1.0
        return 1 + (self.threads_gain - 1) * (min(threads, self.cores) - 1) / (self.cores - 1)

    def slowdown(self, busy: int, threads: int) -> float:
        """How much longer each of `busy` ranks works, that use so many threads all together.

        >>> machine = Machine("two cores", "an example", {}, cores=2, contention=1.5)
        >>> machine.slowdown(1, 1), machine.slowdown(2, 2), machine.slowdown(4, 4)
        (1.0, 1.5, 3.0)
        """
        if not self.cores or busy <= 1:
            return 1.0
        crowd = min(1.0, (busy - 1) / max(1, self.cores - 1))
        return max(1.0, threads / self.cores) * (1 + (self.contention - 1) * crowd)

    def to_json(self) -> str:
        """As text, to be kept in a file."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """What `to_json` has written. Raises PlanError where it is something else."""
        try:
            fields = json.loads(text)
            fields["speeds"] = {
                kind: tuple(Speed(tuple(s["at"]), s["per_s"], s["back_per_s"]) for s in samples)
                for kind, samples in fields["speeds"].items()
            }
            return cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PlanError(f"This is no machine that was stored: {error}. Calibrate, and store it again.") from error


def _between(samples: Sequence[Speed], at: Sequence[float], back: bool) -> float:
    """The speed at a size between samples: their logarithms, weighted by nearness (Shepard, 1968).

    >>> round(_between([Speed((1.0,), 10.0, 5.0), Speed((4.0,), 40.0, 20.0)], (2.0,), back=False))
    20
    """
    total = weights = 0.0
    for sample in samples:
        speed = math.log(sample.back_per_s if back else sample.per_s)
        pairs = zip(sample.at, at, strict=False)
        distance = sum((math.log2(max(a, 1)) - math.log2(max(b, 1))) ** 2 for a, b in pairs)
        if distance < 1e-9:
            return math.exp(speed)
        total, weights = total + speed / distance, weights + 1 / distance
    return math.exp(total / weights)
