"""Compare figures with earlier ones: ratios rather than seconds, since machines differ, and only beyond noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpi4dl_nb.benchmarks.cases import BenchmarkStudy
from mpi4dl_nb.benchmarks.results import BenchmarkResults

__all__ = ["RatioChange", "find_changes"]

LEAST = 0.1
"""Minimum change that is reported, however small the spread: medians of seven steps differ by as much."""


@dataclass(frozen=True)
class RatioChange:
    """A row whose ratio has changed; `noise` is the relative noise that the change exceeds."""

    study: str
    row: str
    before: float
    now: float
    noise: float
    more_is_better: bool

    @property
    def is_better(self) -> bool:
        """Whether the change is an improvement."""
        return (self.now > self.before) == self.more_is_better

    @property
    def words(self) -> str:
        """The change in one sentence.

        >>> RatioChange("Halos", "4 ranks", 1.5, 3.0, 0.25, more_is_better=False).words
        'Halos, 4 ranks: worse, 3.000 after 1.500 (noise 25%).'
        """
        way = "better" if self.is_better else "worse"
        return f"{self.study}, {self.row}: {way}, {self.now:.3f} after {self.before:.3f} (noise {self.noise:.0%})."


def find_changes(
    studies: Sequence[BenchmarkStudy], before: BenchmarkResults, now: BenchmarkResults
) -> Iterator[RatioChange]:
    """Iterate over rows in both results whose ratio has changed by more than noise."""
    for study in studies:
        earlier = before.get_rows(study.title)
        for name, row in now.get_rows(study.title).items():
            if name not in earlier or not earlier[name].has_number(study.ratio):
                continue
            was, is_ = earlier[name].get_number(study.ratio), row.get_number(study.ratio)
            noise = max(LEAST, earlier[name].spread, row.spread)
            if was > 0 and abs(is_ / was - 1) > noise:
                yield RatioChange(study.title, name, was, is_, noise, study.more_is_better)
