"""How much of a step is convolutions and products alone: what no organisation of the work can save."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import profile, supported_activities

__all__ = ["measure_arithmetic_share"]

_KERNELS = ("conv", "addmm", "aten::mm", "aten::bmm", "matmul")
"""Parts of the names of what the profiler calls an operator, on all devices."""


def measure_arithmetic_share(step: Callable[[], object]) -> float:
    """The part of the time in operators that goes into the kernels of convolutions and products, forward and back.

    Of a device's own time where it has one, else of the processor's; one step that is not timed otherwise.
    """
    with profile(activities=supported_activities()) as seen:
        step()
    rows = [(row.key, row.self_device_time_total or row.self_cpu_time_total) for row in seen.key_averages()]
    total = sum(seconds for _, seconds in rows)
    return sum(seconds for name, seconds in rows if any(part in name for part in _KERNELS)) / total if total else 0.0
