"""Communication between ranks: all-reduces against MPI's own and gloo's, and what hides behind computation."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.bench.measure import compute_quartile_spread, time_interleaved, time_shuffled
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.all_reduce import AllReduceRequest
from mpi4dl_nb.engines.comm.nccl import connect_gloo
from mpi4dl_nb.engines.comm.status_board import measure_wait
from mpi4dl_nb.engines.comm.world import Message, Pending, SubGroup, World
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.instructions import SumGradients
from mpi4dl_nb.engines.program.program import Traffic, count_traffic
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

if TYPE_CHECKING:  # mpi4py starts MPI when it is imported
    from mpi4dl_nb.engines.comm.mpi import MpiWorld

# Milliseconds of an all-reduce over all ranks: ours, as for gradients, against raw `MPI_Allreduce` and gloo.

_WARMUP = 3
_FLOAT_BYTES = 4


def list_sizes(max_bytes: int) -> list[int]:
    """Return 4 bytes and its multiples by powers of 4, up to `max_bytes`.

    >>> list_sizes(100)
    [4, 16, 64]
    """
    sizes = [_FLOAT_BYTES]
    while sizes[-1] * 4 <= max_bytes:
        sizes.append(sizes[-1] * 4)
    return sizes


def make_allreduce_parser() -> argparse.ArgumentParser:
    """Return the parser of `bench allreduce`."""
    flags = options.make_bare_parser("Time all-reduces over all ranks, and the same with raw MPI_Allreduce and gloo.")
    flags.add_argument(
        "--max-bytes",
        type=options.parse_positive,
        default=1 << 28,
        help="the largest message; each size is 4 times the previous one",
    )
    flags.add_argument("--iterations", type=options.parse_positive, default=30)
    return flags


def bench_allreduce(world: MpiWorld, max_bytes: int, iterations: int) -> Iterator[dict[str, object]]:
    """Yield one line for each size; the same lines on every rank.

    An all-reduce takes as long as its slowest rank. The results are medians over the iterations. `ratio_to_mpi` is
    raw_mpi_ms / ours_ms: 1 is as fast as MPI's own, more is faster. `spread` is the interquartile range of ours,
    divided by its median.
    """
    from mpi4dl_nb.engines.comm.raw_mpi import RawAllReduce

    torch.set_num_threads(1)
    raw_mpi, group, cpu = RawAllReduce(world), range(world.size), torch.device("cpu")
    with connect_gloo(world) as gloo:
        for tensor_bytes in list_sizes(max_bytes):
            # The tensor is zero, so that repeated sums leave it unchanged.
            tensor = torch.zeros(tensor_bytes // _FLOAT_BYTES)
            total = AllReduceRequest(world, tensor, group, again=True)
            sums = {"ours_ms": lambda total=total: total.begin().wait(), "raw_mpi_ms": partial(raw_mpi, tensor)}
            if gloo is not None:
                sums["gloo_ms"] = partial(gloo, tensor)
            works = {name: lambda work=work: work for name, work in sums.items()}
            ranks = world.all_gather(time_shuffled(world, works, iterations, _WARMUP, cpu))
            # The maximum of the ranks in each iteration, and only then the median: medians of ranks would hide a
            # straggler that is another rank each time.
            slowest = {
                name: [max(seconds) for seconds in zip(*(rank[name] for rank in ranks), strict=True)] for name in sums
            }
            medians = {name: round(statistics.median(seconds) * 1e3, 4) for name, seconds in slowest.items()}
            yield {
                "bytes": tensor_bytes,
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


# Communication hidden behind computation, all-reduces or halos: the same training without and with overlap, if wished
# in a world with the message times of a slower link, as if the ranks were on several machines.


class ThrottledWorld(SubGroup):
    """Ranks of one host connected by links of `bytes_per_s` each, as by network cards that transfer on their own.

    A rank's messages arrive one after another. The transfer of each starts when it was sent or when the link is free,
    whichever is later, and does not depend on polling. A second message carries the time of sending; ranks of one host
    share a clock.
    """

    def __init__(self, world: World, bytes_per_s: float) -> None:
        super().__init__(world, range(world.size))
        self.bytes_per_s, self.free_s, self.shares_memory = bytes_per_s, 0.0, world.shares_memory

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start messages."""
        # Each message is followed on its route by a stamp, the time at which it was sent.
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        stamps = [torch.empty_like(now) for _ in receives]
        both = [part for message in sends for part in (message, Message(message.peer, message.tag, now))]
        pairs = zip(receives, stamps, strict=True)
        arriving = [part for message, stamp in pairs for part in (message, Message(message.peer, message.tag, stamp))]
        arriving_bytes = sum(message.tensor.nbytes for message in receives)
        return _DelayedMessages(self.world.exchange(both, arriving), self, arriving_bytes, stamps)

    prepare = World.prepare  # that of a group would go around the link

    # Values and barriers, and what needs no messages, take their usual time.

    def all_gather(self, value: Any) -> list[Any]:
        return self.world.all_gather(value)

    def barrier(self) -> None:
        self.world.barrier()

    def collectives(self, device: torch.device) -> Any:
        return self.world.collectives(device)


class _DelayedMessages:
    """Messages that are complete once their bytes have passed the link."""

    def __init__(self, pending: Pending, world: ThrottledWorld, arriving_bytes: int, stamps: Sequence[Tensor]) -> None:
        self.pending, self.world, self.arriving_bytes, self.stamps = pending, world, arriving_bytes, stamps
        self.end_s: float | None = None

    def _compute_end(self) -> float:
        """Return the time at which they have passed the link; call only once they have arrived."""
        if self.end_s is None:
            # The stamps arrive with the messages, so they may be read only now. The link transfers one message at a
            # time, and idles until the next one is sent:
            #
            #   sent       a     b                   c
            #   link       [--a--][-----b-----]      [---c---]
            #   complete         a            b              c
            sent_s = max((stamp.item() for stamp in self.stamps), default=0.0)
            self.end_s = max(sent_s, self.world.free_s) + self.arriving_bytes / self.world.bytes_per_s
            self.world.free_s = max(self.world.free_s, self.end_s) if self.stamps else self.world.free_s
        return self.end_s

    def wait(self) -> None:
        """Return when the messages are complete; sleeps meanwhile."""
        self.pending.wait()
        with measure_wait():
            time.sleep(max(0.0, self._compute_end() - time.perf_counter()))

    def is_completed(self) -> bool:
        return (self.end_s is not None or self.pending.is_completed()) and time.perf_counter() >= self._compute_end()


def bench_overlap(
    world: World, recipe: Recipe, iterations: int, seed: int, link_mbit_per_s: int | None = None, halos: bool = False
) -> dict[str, object]:
    """Return medians over interleaved steps, after one warm-up step each; the same line on every rank.

    For gradient all-reduces, `blocking_s` is their duration if each starts after the backward pass; `exposed_s` if they
    start as soon as possible: the time spent in their own instructions and in progressing them between others. `halos`:
    for a step's halos, forward and backward, the duration if each exchange blocks, and the time that remains in their
    instructions if tiles' interiors are computed meanwhile (`overlap_halos`). Both are means over ranks, and include
    waiting for a rank that is late. `hidden` is 1 - exposed_s / blocking_s. `messages` and `bytes` are what rank 0
    sends for halos; its exchanges are counted as split in halves (`split`) or not (`whole`). `buckets` is the number of
    its gradient buckets.

    Between ranks on one machine a message is a copy by the cores that compute, so that there is little to hide.
    `link_mbit_per_s` adds the transfer time of a link between machines.
    """
    if link_mbit_per_s:
        world = ThrottledWorld(world, link_mbit_per_s * (1e6 / 8))  # bytes per second
    both = [
        RankTraining(world, replace(recipe, plan=replace(recipe.plan, overlap_halos=overlap)))
        if halos
        else RankTraining(world, recipe, overlap=overlap)
        for overlap in (False, True)
    ]
    inputs = both[0].cut(make_batches(recipe, seed, steps=1)[0])
    sums: list[list[float]] = [[], []]

    def record_traffic(number: int) -> None:
        worker = both[number].worker
        if halos:  # pack, post, wait and unpack
            seconds = sum(event.end_s - event.start_s for event in worker.events if event.kind == "halo")
        else:  # pack, start, progress (also between other instructions), wait and unpack
            names = {item.name for item in both[number].program.select_instructions(SumGradients)}
            events = (event for event in worker.events if event.name in names)
            seconds = worker.helping_s + sum(event.end_s - event.start_s for event in events)
        # Collective after the step's own barrier (`time_interleaved`), so that it does not disturb the next
        # measurement.
        sums[number].append(statistics.mean(world.all_gather(seconds)))

    steps = time_interleaved(world, both, inputs, iterations + 1, record_traffic)
    blocking, exposed = (statistics.median(seconds[1:]) for seconds in sums)
    line = {
        "blocking_s": round(blocking, 5),
        "exposed_s": round(exposed, 5),
        "link_mbit_per_s": link_mbit_per_s,
        "hidden": round(1 - exposed / blocking, 3) if blocking else None,
        "step_s": round(statistics.median(steps[1][1:]), 4),
        "step_blocking_s": round(statistics.median(steps[0][1:]), 4),
    }
    program = both[1].program
    if not halos:
        items = list(program.select_instructions(SumGradients))
        return {**line, "buckets": len({item.name for item in items}), "bytes": sum(item.bytes for item in items) // 2}
    sent = count_traffic(program).get("halo", Traffic(0, 0))
    exchanges = [item.get_effects(Phase.FORWARD).messages for item in program.forward if item.kind == "halo"]
    begun = [messages for messages in exchanges if messages and messages.posts]
    whole = sum(messages.waits for messages in begun)
    return {**line, "messages": sent.messages, "bytes": sent.bytes, "split": len(begun) - whole, "whole": whole}


def run_bench_overlap(world: World, arguments: Sequence[str]) -> dict[str, object]:
    """Run `bench overlap`."""
    flags = options.make_parser(
        "Measure how much of the gradient all-reduces, or of the halo exchanges, is hidden behind computation.", 5
    )
    flags.add_argument(
        "--link-mbit-per-s", type=options.parse_positive, help="simulate a link of this speed between ranks"
    )
    flags.add_argument("--halos", action="store_true", help="measure overlapped halo exchanges instead of all-reduces")
    chosen = flags.parse_args(arguments)
    _, recipe = options.make_recipe(chosen, world.size, world)
    return bench_overlap(world, recipe, chosen.iterations, chosen.seed, chosen.link_mbit_per_s, chosen.halos)
