"""What an instruction of a program costs beside its kernels: segments that do next to nothing, on one rank."""

from __future__ import annotations

import statistics

import torch

from engines.predict.calibrate import measure_overheads

__all__ = ["bench_overhead"]


def bench_overhead(times: int) -> dict[str, object]:
    """Medians over `times` measurements, each of them a median: microseconds of one thread.

    `instruction_us` is what is left of an instruction (forward or back) when its one kernel call and that of its
    gradient are taken off, which are `call_us` and `back_call_us`. `spread` is (largest - smallest) / median.
    """
    torch.set_num_threads(1)
    found = [measure_overheads() for _ in range(times)]
    own = [each["instruction_s"] for each in found]
    median_s = statistics.median(own)
    return {
        **{f"{name[:-2]}_us": round(1e6 * statistics.median(each[name] for each in found), 2) for name in found[0]},
        "spread": round((max(own) - min(own)) / median_s, 3) if median_s else 0.0,
    }
