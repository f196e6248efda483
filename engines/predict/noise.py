"""How far a calibration can be believed: what it saw of others on the cores, and how far its own repetitions differ."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Noise", "Spin", "compute_foreign_share", "compute_spread"]

MOST_ELSEWHERE, MOST_SPREAD = 0.2, 0.5
"""What is still good. Beyond, forecasts tell of the others' work rather than of the machine."""

_USELESS = 2.5  # times as much


@dataclass(frozen=True, slots=True)
class Spin:
    """One rank asked for a core all the time: on which host and in which process, for how long, what it was given."""

    host: str
    process: int
    wall_s: float
    processor_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """`elsewhere`: the share of the cores that other programs took while the ranks wanted all of them. `spread`: by
    which part of it the same measurement differs from time to time, as the middle half of them does.
    """

    elsewhere: float = 0.0
    spread: float = 0.0

    @property
    def level(self) -> float:
        """1 is the most that is still good."""
        return max(self.elsewhere / MOST_ELSEWHERE, self.spread / MOST_SPREAD)

    @property
    def is_good(self) -> bool:
        """Whether a calibration with it can be remembered."""
        return self.level <= 1

    @property
    def is_useless(self) -> bool:
        """Whether forecasts by it would mislead."""
        return self.level > _USELESS

    def __str__(self) -> str:
        return (
            f"other programs took {self.elsewhere:.0%} of the cores (good: up to {MOST_ELSEWHERE:.0%}) and repeated "
            f"measurements differ by {self.spread:.0%} (good: up to {MOST_SPREAD:.0%})"
        )


def compute_foreign_share(seen: Sequence[Spin], cores: int) -> float:
    """The share of its cores that others took, of the host where that was most.

    All ranks of a host ask for a core at once, threads of one process for one together: what they are not given,
    somebody else has.

    >>> compute_foreign_share(
    ...     [Spin("here", 1, 1.0, 0.5), Spin("here", 2, 1.0, 0.5), Spin("here", 3, 1.0, 0.5)], cores=2
    ... )
    0.25
    """
    hosts: dict[str, list[Spin]] = defaultdict(list)
    for spin in seen:
        hosts[spin.host].append(spin)
    shares = []
    for spins in hosts.values():
        wanted = min(cores, len({spin.process for spin in spins})) * max(spin.wall_s for spin in spins)
        shares.append(1 - sum(spin.processor_s for spin in spins) / wanted)
    return max(0.0, *shares)


def compute_spread(timings: Iterable[Sequence[float]]) -> float:
    """How far the middle half of the repetitions of a timing lie apart, relative to their median; the median of all.

    0 where nothing was timed often enough to tell.

    >>> compute_spread([[1.0, 2.0, 2.0, 2.0, 3.0], [4.0, 5.0, 5.0, 6.0]])
    0.05
    """
    found = []
    for each in timings:
        if len(each) > 2 and statistics.median(each) > 0:
            low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
            found.append((high - low) / middle)
    return statistics.median(found) if found else 0.0
