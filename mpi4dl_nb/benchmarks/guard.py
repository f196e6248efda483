"""Figures against those of before: ratios, not seconds, since machines differ; and beyond noise only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpi4dl_nb.benchmarks.cases import Study
from mpi4dl_nb.benchmarks.rows import Findings

__all__ = ["Change", "changes"]

LEAST = 0.1
"""No change that is smaller is told, however small the spread: medians of seven steps differ by as much."""


@dataclass(frozen=True)
class Change:
    """One row whose ratio is another; `noise` is the larger of the two spreads, as a part of the ratio."""

    study: str
    row: str
    before: float
    now: float
    noise: float
    more_is_better: bool

    @property
    def is_better(self) -> bool:
        """Which way it went."""
        return (self.now > self.before) == self.more_is_better

    @property
    def words(self) -> str:
        """One sentence.

        >>> Change("Halos", "4 ranks", 1.5, 3.0, 0.25, more_is_better=False).words
        'Halos, 4 ranks: worse, 3.000 after 1.500 (noise 25%).'
        """
        way = "better" if self.is_better else "worse"
        return f"{self.study}, {self.row}: {way}, {self.now:.3f} after {self.before:.3f} (noise {self.noise:.0%})."


def changes(studies: Sequence[Study], before: Findings, now: Findings) -> Iterator[Change]:
    """Of rows that are in both, those whose ratio has changed by more than noise."""
    for study in studies:
        earlier = before.by_name(study.title)
        for name, row in now.by_name(study.title).items():
            if name not in earlier or not earlier[name].has(study.ratio):
                continue
            was, is_ = earlier[name].number(study.ratio), row.number(study.ratio)
            noise = max(LEAST, earlier[name].spread, row.spread)
            if was > 0 and abs(is_ / was - 1) > noise:
                yield Change(study.title, name, was, is_, noise, study.more_is_better)
