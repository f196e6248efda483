"""Candidates for the best plan: what was predicted of a plan, what was measured, and their order."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from mpi4dl_nb.engines.formatting import FactTable, format_bytes, format_number, format_seconds
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.forecast import Forecast, compute_throughput


@dataclass(frozen=True, repr=False)
class Measurement(FactTable):
    """Seconds of each timed step, and peak bytes of tensors by rank."""

    seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]

    @property
    def facts(self) -> dict[str, object]:
        return {
            "median time of a step": format_seconds(self.median_s),
            "steps": len(self.seconds),
            "memory of the fullest rank": format_bytes(max(self.peak_bytes)) if self.peak_bytes else "not counted",
        }

    @property
    def median_s(self) -> float:
        """Median time of a step, in seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, repr=False)
class Candidate(FactTable):
    """A plan with its predicted cost and, if it was measured, its measured cost or the reason for its failure.

    >>> from mpi4dl_nb import Candidate, Plan, forecast, resnet20_v1
    >>> plan = Plan(split_size=2, spatial_size=0)
    >>> predicted = Candidate(forecast(resnet20_v1(), plan, (2, 3, 64, 64), "Summit"))
    >>> predicted.predicted_bytes > 10**6, predicted.peak_bytes
    (True, None)
    """

    forecast: Forecast
    measured: Measurement | None = None
    failure: str = ""

    @property
    def facts(self) -> dict[str, object]:
        measured = {} if self.images_per_s is None else {"measured": f"{format_number(self.images_per_s)} images/s"}
        memory = {} if self.peak_bytes is None else {"measured memory": format_bytes(self.peak_bytes)}
        return {
            "plan": self.plan.summary,
            **({"failed": self.failure} if self.failure else {}),
            **measured,
            "predicted": f"{format_number(self.predicted_images_per_s)} images/s",
            **memory,
            "predicted memory": format_bytes(self.predicted_bytes),
        }

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.forecast.plan

    @property
    def predicted_images_per_s(self) -> float:
        """Images per second by simulation."""
        return self.forecast.images_per_s

    @property
    def images_per_s(self) -> float | None:
        """Images per second as measured; None if not measured."""
        return self.forecast.images / self.measured.median_s if self.measured else None

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak memory of the fullest rank, in bytes."""
        return self.forecast.peak_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak memory of the fullest rank, in bytes; None if not measured."""
        return max(self.measured.peak_bytes, default=None) if self.measured else None

    def compute_pace(self, neutral_batch: int | None) -> float:
        """Return the measured throughput in images per second, as limited by `neutral_batch`; 0 if not measured."""
        return compute_throughput(self.forecast.images, self.measured.median_s, neutral_batch) if self.measured else 0.0


def sort_candidates(
    candidates: Iterable[Candidate], neutral_batch: int | None = None, by: str = "speed"
) -> tuple[Candidate, ...]:
    """Sort candidates, the best first `by` speed or memory (see `search`).

    The measured ones are sorted by measurement, then the others by prediction, and those that failed are last.
    """

    def get_sort_key(each: Candidate) -> tuple[float, ...]:
        pace, predicted = -each.compute_pace(neutral_batch), each.forecast.get_sort_key(by, neutral_batch)
        if by == "memory":
            return bool(each.failure), not each.measured, each.peak_bytes or each.predicted_bytes, pace, *predicted
        return bool(each.failure), pace, *predicted

    return tuple(sorted(candidates, key=get_sort_key))


def replace_measured(candidates: Iterable[Candidate], measured: Iterable[Candidate]) -> list[Candidate]:
    """Replace those candidates whose plans were measured (again)."""
    by_plan = {candidate.plan: candidate for candidate in measured}
    return [by_plan.get(candidate.plan, candidate) for candidate in candidates]
