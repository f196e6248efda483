"""Reliability of a calibration: the share of other programs on the cores, and the spread of repeated measurements."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Noise", "Spin", "compute_foreign_share", "compute_spread"]

MOST_ELSEWHERE, MOST_SPREAD = 0.2, 0.5
"""The limits of a good calibration. Beyond, forecasts reflect other programs rather than the machine."""

_USELESS = 2.5  # multiple of the limits


@dataclass(frozen=True, slots=True)
class Spin:
    """A rank that requested a core all the time: host, process, wall time, and the CPU time that it received."""

    host: str
    process: int
    wall_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of a calibration.

    `elsewhere`: the fraction of the cores that other programs took while the ranks requested all of them. `spread`: the
    relative interquartile range of repeated measurements.
    """

    elsewhere: float = 0.0
    spread: float = 0.0

    @property
    def level(self) -> float:
        """The noise relative to the limits; a good calibration has at most 1."""
        return max(self.elsewhere / MOST_ELSEWHERE, self.spread / MOST_SPREAD)

    @property
    def is_good(self) -> bool:
        """Whether a calibration with this noise may be stored."""
        return self.level <= 1

    @property
    def is_useless(self) -> bool:
        """Whether forecasts from such a calibration would mislead."""
        return self.level > _USELESS

    def __str__(self) -> str:
        return (
            f"other programs took {self.elsewhere:.0%} of the cores (good: up to {MOST_ELSEWHERE:.0%}) and repeated "
            f"measurements differ by {self.spread:.0%} (good: up to {MOST_SPREAD:.0%})"
        )


def compute_foreign_share(seen: Sequence[Spin], cores: int) -> float:
    """Return the fraction of the cores that other programs took, on the host where it was largest.

    All ranks of a host request a core at once; the threads of one process share one request. CPU time that the ranks do
    not receive goes to other programs.

    >>> compute_foreign_share(
    ...     [Spin("here", 1, 1.0, 0.5), Spin("here", 2, 1.0, 0.5), Spin("here", 3, 1.0, 0.5)], cores=2
    ... )
    0.25
    """
    hosts: dict[str, list[Spin]] = defaultdict(list)
    for spin in seen:
        hosts[spin.host].append(spin)
    # Fewer processes than cores cannot ask for all of them. Threads of one interpreter take turns at one core.
    shares = []
    for spins in hosts.values():
        wanted = min(cores, len({spin.process for spin in spins})) * max(spin.wall_s for spin in spins)
        shares.append(1 - sum(spin.processor_s for spin in spins) / wanted)
    return max(0.0, *shares)


def compute_spread(timings: Iterable[Sequence[float]]) -> float:
    """Return the median over timings of the interquartile range of the repetitions relative to their median.

    0 if no timing has enough repetitions.

    >>> compute_spread([[1.0, 2.0, 2.0, 2.0, 3.0], [4.0, 5.0, 5.0, 6.0]])
    0.05
    """
    found = []
    for each in timings:
        if len(each) > 2 and statistics.median(each) > 0:
            low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
            found.append((high - low) / middle)
    return statistics.median(found) if found else 0.0
