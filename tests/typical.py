"""One machine out of several calibrations of it: on a shared host each comes out a little different."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

from mpi4dl_nb.engines.predict.machine import Machine, Speed

_Measured = TypeVar("_Measured", Machine, Speed)


def compute_typical(machines: Sequence[Machine]) -> Machine:
    """The medians of all that was measured; the rest is the first one's.

    >>> one, two = (
    ...     Machine("x", "an example", {"pool": (Speed((8.0,), each, 1.0),)}, call_s=each) for each in (1.0, 3.0)
    ... )
    >>> found = compute_typical([one, two])
    >>> found.call_s, found.speeds["pool"][0].per_s
    (2.0, 2.0)
    """
    first = machines[0]
    speeds = {
        kind: tuple(
            _compute_medians(samples) for samples in zip(*(machine.speeds[kind] for machine in machines), strict=True)
        )
        for kind in first.speeds
    }
    return replace(_compute_medians(machines), speeds=speeds)


def _compute_medians(alike: Sequence[_Measured]) -> _Measured:
    """Of those fields that are no whole numbers."""
    first = alike[0]
    measured = [field.name for field in fields(first) if isinstance(getattr(first, field.name), float)]
    return replace(first, **{name: statistics.median(getattr(each, name) for each in alike) for name in measured})
