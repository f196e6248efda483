"""What came of a job, and how far it is from what one process computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.peers.jobs import Arrays

EXACT = 1e-12
"""The largest error of a result that differs by rounding alone, in float64 and relative to the largest value."""

CUT_OFF = "cut off"
"""What the reason begins with where a job took too long."""


@dataclass(frozen=True)
class Outcome:
    """The results of a job by name: `output`, the gradients of `image` and of the weights; and why some are missing."""

    job: str
    results: Arrays = field(default_factory=dict)
    refusal: str = ""


def measure_errors(results: Arrays, reference: Arrays) -> dict[str, float]:
    """Return the largest differences of the `output`, the `image` gradient and the `weights`' gradients that are there.

    Each is divided by the largest value of the reference. It is infinite where shapes differ or a value is no number.
    """
    errors: dict[str, float] = {}
    for name, values in results.items():
        group = name if name in ("output", "image") else "weights"
        errors[group] = max(errors.get(group, 0.0), _measure_error(values, reference[name]))
    return errors


def _measure_error(values: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    if values.shape != reference.shape or not np.isfinite(values).all():
        return float("inf")
    return float(np.abs(values - reference).max() / np.abs(reference).max())
