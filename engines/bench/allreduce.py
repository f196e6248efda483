"""Milliseconds of an all-reduce over all ranks: ours, as for gradients, against raw `MPI_Allreduce` and gloo.

An all-reduce takes as long as its slowest rank. The results are medians over the iterations.
`ratio_to_mpi` is raw_mpi_ms / ours_ms: 1 is as fast as MPI's own, more is faster. `spread` is the interquartile range
of ours, divided by its median.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from engines.bench.measure import compute_quartile_spread, time_shuffled
from engines.cli import options
from engines.comm.all_reduce import AllReduceRequest
from engines.comm.nccl import connect_gloo

if TYPE_CHECKING:  # mpi4py starts MPI when it is imported
    from engines.comm.mpi import MpiWorld

__all__ = ["bench_allreduce", "list_sizes", "make_allreduce_parser", "run_bench_allreduce"]

_WARMUP = 3
_FLOAT_BYTES = 4


def list_sizes(max_bytes: int) -> list[int]:
    """Return 4 bytes and its multiples by powers of 4, up to `max_bytes`.

    >>> list_sizes(100)
    [4, 16, 64]
    """
    found = [_FLOAT_BYTES]
    while found[-1] * 4 <= max_bytes:
        found.append(found[-1] * 4)
    return found


def make_allreduce_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench allreduce`."""
    flags = options.make_bare_parser("Time sums over all ranks against raw MPI_Allreduce and gloo.")
    flags.add_argument(
        "--max-bytes", type=options.parse_positive, default=1 << 28, help="the largest sum; each 4 x the last"
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=30)
    return flags


def bench_allreduce(world: MpiWorld, max_bytes: int, iterations: int) -> Iterator[dict[str, object]]:
    """Yield one line for each size; the same lines on every rank."""
    from engines.comm.mpi import RawAllReduce

    torch.set_num_threads(1)
    raw_mpi, group, cpu = RawAllReduce(world), range(world.size), torch.device("cpu")
    with connect_gloo(world) as gloo:
        for count_bytes in list_sizes(max_bytes):
            # The tensor is zero, so that repeated sums leave it unchanged.
            tensor = torch.zeros(count_bytes // _FLOAT_BYTES)
            total = AllReduceRequest(world, tensor, group, again=True)
            sums = {"ours_ms": lambda total=total: total.begin().wait(), "raw_mpi_ms": partial(raw_mpi, tensor)}
            if gloo is not None:
                sums["gloo_ms"] = partial(gloo, tensor)
            works = {name: lambda work=work: work for name, work in sums.items()}
            ranks = world.all_gather(time_shuffled(world, works, iterations, _WARMUP, cpu))
            # The maximum of the ranks in each iteration, and only then the median: medians of ranks would hide a
            # straggler that is another rank each time.
            slowest = {name: [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)] for name in sums}
            medians = {name: round(statistics.median(seconds) * 1e3, 4) for name, seconds in slowest.items()}
            yield {
                "bytes": count_bytes,
                "ours_ms": medians["ours_ms"],
                "raw_mpi_ms": medians["raw_mpi_ms"],
                "gloo_ms": medians.get("gloo_ms", "unavailable"),
                "ratio_to_mpi": round(medians["raw_mpi_ms"] / medians["ours_ms"], 3),
                "spread": compute_quartile_spread(slowest["ours_ms"]),
            }


def run_bench_allreduce(world: MpiWorld, arguments: Sequence[str]) -> Iterator[dict[str, object]]:
    """Run `bench allreduce`."""
    chosen = make_allreduce_parser().parse_args(arguments)
    return bench_allreduce(world, chosen.max_bytes, chosen.iterations)
