"""Overhead of a program's instruction beyond its kernels, measured with tiny segments on one rank."""

from __future__ import annotations

import statistics

import torch

from engines.predict.calibrate import measure_overheads

__all__ = ["bench_overhead"]


def bench_overhead(times: int) -> dict[str, object]:
    """Return medians over `times` measurements, each a median itself, in microseconds of one thread.

    `instruction_us` is the time of an instruction (forward or backward) minus that of its one kernel call and the
    call's gradient, which are `call_us` and `back_call_us`. `spread` is (largest - smallest) / median.
    """
    torch.set_num_threads(1)
    found = [measure_overheads() for _ in range(times)]
    own = [each["instruction_s"] for each in found]
    median_s = statistics.median(own)
    return {
        **{f"{name[:-2]}_us": round(1e6 * statistics.median(each[name] for each in found), 2) for name in found[0]},
        "spread": round((max(own) - min(own)) / median_s, 3) if median_s else 0.0,
    }
