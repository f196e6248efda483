"""Milliseconds of an all-reduce over all ranks: ours, as for gradients, against raw `MPI_Allreduce` and gloo.

Each iteration measures all of them, in a changing order (the predecessor determines the state of the caches), each
after a barrier. An all-reduce takes as long as its slowest rank. The results are medians over the iterations.
`ratio_to_mpi` is raw_mpi_ms / ours_ms: 1 is as fast as MPI's own, more is faster. `spread` is the interquartile range
of ours, divided by its median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engines.comm.all_reduce import AllReduceRequest
from engines.comm.rendezvous import connect_gloo

if TYPE_CHECKING:  # mpi4py starts MPI when it is imported
    from engines.comm.mpi import MpiWorld

__all__ = ["bench_allreduce", "list_sizes"]

_WARMUP = 3
_FLOAT_BYTES = 4

Sum = Callable[[Tensor], object]


def list_sizes(max_bytes: int) -> list[int]:
    """Return 4 bytes and its multiples by powers of 4, up to `max_bytes`.

    >>> list_sizes(100)
    [4, 16, 64]
    """
    found = [_FLOAT_BYTES]
    while found[-1] * 4 <= max_bytes:
        found.append(found[-1] * 4)
    return found


def bench_allreduce(world: MpiWorld, max_bytes: int, iterations: int) -> Iterator[dict[str, object]]:
    """Yield one line for each size; the same lines on every rank."""
    from engines.comm.raw_mpi import RawAllReduce

    torch.set_num_threads(1)
    group = range(world.size)
    with connect_gloo(world) as gloo:
        sums: dict[str, Sum] = {"raw_mpi_ms": RawAllReduce(world)} | ({} if gloo is None else {"gloo_ms": gloo})
        for count_bytes in list_sizes(max_bytes):
            tensor = torch.zeros(count_bytes // _FLOAT_BYTES)
            total = AllReduceRequest(world, tensor, group, again=True)
            sums["ours_ms"] = lambda _, total=total: total.begin().wait()
            yield _make_line(count_bytes, world.all_gather(_time_sums(world, tensor, sums, iterations)))


def _time_sums(world: MpiWorld, tensor: Tensor, sums: Mapping[str, Sum], iterations: int) -> dict[str, list[float]]:
    """Return the seconds of this rank, by name. The tensor is zero, so that repeated sums leave it unchanged."""
    times: dict[str, list[float]] = {name: [] for name in sums}
    for index in range(_WARMUP + iterations):
        # The seed is the number of the iteration, so that all ranks take the same order: each sum is collective.
        for name in Random(index).sample(sorted(sums), len(sums)):
            world.comm.Barrier()
            start_s = time.perf_counter()
            sums[name](tensor)
            times[name].append(time.perf_counter() - start_s)
    return {name: seconds[_WARMUP:] for name, seconds in times.items()}


def _make_line(count_bytes: int, ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, object]:
    # The maximum of the ranks in each iteration, and only then the median: medians of ranks would hide a straggler that
    # is another rank each time.
    slowest = {name: [max(each) for each in zip(*(times[name] for times in ranks), strict=True)] for name in ranks[0]}
    medians = {name: round(statistics.median(seconds) * 1e3, 4) for name, seconds in slowest.items()}
    low, middle, high = statistics.quantiles(slowest["ours_ms"], n=4)
    return {
        "bytes": count_bytes,
        "ours_ms": medians["ours_ms"],
        "raw_mpi_ms": medians["raw_mpi_ms"],
        "gloo_ms": medians.get("gloo_ms", "unavailable"),
        "ratio_to_mpi": round(medians["raw_mpi_ms"] / medians["ours_ms"], 3),
        "spread": round((high - low) / middle, 3),
    }
