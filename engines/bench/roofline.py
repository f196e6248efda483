"""Share of convolutions and matrix products in a step: a lower bound for its duration."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import profile, supported_activities

__all__ = ["measure_arithmetic_share"]

_KERNELS = ("conv", "addmm", "aten::mm", "aten::bmm", "matmul")
"""Parts of the profiler's operator names, on all devices."""


def measure_arithmetic_share(step: Callable[[], object]) -> float:
    """Return the share of operator time in convolutions and matrix products, forward and backward, in one step.

    Device time if there is any, else CPU time. The profiled step is not timed otherwise.
    """
    with profile(activities=supported_activities()) as seen:
        step()
    # Self times: an operator's own kernels without those of the operators that it calls, which have rows of their own.
    rows = [(row.key, row.self_device_time_total or row.self_cpu_time_total) for row in seen.key_averages()]
    total = sum(seconds for _, seconds in rows)
    return sum(seconds for name, seconds in rows if any(part in name for part in _KERNELS)) / total if total else 0.0
