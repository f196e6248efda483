"""Calibration of the machine that the ranks run on: kernels, overheads, messages, and the cost of sharing cores."""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.device import count_cores, count_local_ranks, get_memory_bytes, use_threads
from mpi4dl_nb.engines.comm.loopback import make_loopback_worlds
from mpi4dl_nb.engines.comm.world import Message, World
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.graph.model_graph import Ref
from mpi4dl_nb.engines.predict.calibration_runs import CalibrationRecipes, CalibrationRun, fit_machine
from mpi4dl_nb.engines.predict.kernel_timer import (
    KernelTimer,
    KernelTimes,
    LayerSize,
    build_op_tallies,
    compute_speeds,
    make_calls,
    measure_median_seconds,
    measure_seconds,
)
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machine_checks import Noise, Spin, compute_foreign_share, compute_spread
from mpi4dl_nb.engines.program.effects import LocalOp, Phase
from mpi4dl_nb.engines.program.instructions import Compute, RunningStatistics, Update
from mpi4dl_nb.engines.program.program import DirectionProgram, Program, ShardSpec, Step
from mpi4dl_nb.engines.program.update import update_buffers
from mpi4dl_nb.engines.program.worker import Worker

_LAYERS = ((16, 16), (16, 32), (32, 48), (16, 96), (16, 256), (64, 16), (64, 64), (64, 192), (256, 8), (256, 32))
SIZES = tuple(LayerSize(channels, side_px) for channels, side_px in _LAYERS)
_SEGMENTS = 40
_ROUNDS = 15
_SLICES_S, _GAP_S = 0.2, 5e-4
_LOOKS = 3  # at the load, before a calibration begins
_LARGE_BYTES, _BLOCKS = 1 << 22, 24


@dataclass(frozen=True)
class _RepeatCounts:
    """The number of repetitions of each measurement.

    Rank 0 measures `alone` times on one core and `spread` times on all cores, all ranks measure `crowded` times at
    once, and all ranks train for `rehearsals` rounds of `steps` steps. Three repetitions are the fewest that give a
    spread. They are seconds apart, because the speed of a shared machine varies. Convolutions of several images are
    measured only up to `most_operations`.
    """

    alone: int
    spread: int
    crowded: int
    rehearsals: int
    steps: int
    most_operations: float = math.inf


_FULL = _RepeatCounts(alone=9, spread=9, crowded=9, rehearsals=5, steps=5)
_QUICK = _RepeatCounts(alone=3, spread=1, crowded=1, rehearsals=1, steps=3, most_operations=4e8)


class Calibration:
    """Measures the machine, the same on all ranks, part by part; collective. All parts take about a minute.

    Kernels are timed on rank 0 while the other ranks sleep, and then on all ranks at once. After that, all ranks train
    a small network together, in the layouts of `rehearsal`. `quick` takes a quarter of a minute, with few repetitions
    and without large convolutions of several images. Between two parts the calibration can be abandoned. After the last
    of them `machine` is set; its `noise` tells how reliable the measurement is.
    """

    def __init__(self, world: World, rehearsal: CalibrationRecipes, quick: bool) -> None:
        self.world, self.rehearsal, self.quick = world, rehearsal, quick
        self.effort = _QUICK if quick else _FULL
        self.machine: Machine | None = None
        self._spins: list[float] = []
        self._rest = self._run()

    @staticmethod
    def count_parts(ranks: int, quick: bool) -> int:
        """Return the number of parts of a calibration."""
        effort = _QUICK if quick else _FULL
        return effort.alone + effort.spread + (effort.crowded if ranks > 1 else 0) + effort.rehearsals + 3

    def run_part(self) -> Machine | None:
        """Run the next part and return the machine if it was the last one; collective."""
        before = torch.get_num_threads()
        # The parts time single threads. The thread count is restored between them, where other calls may run.
        torch.set_num_threads(1)
        try:
            next(self._rest, None)
        finally:
            torch.set_num_threads(before)
        return self.machine

    def _run(self) -> Iterator[None]:
        world = self.world
        # Each `yield` ends a part. `count_parts` announces as many, and the caller may stop after any of them.
        kernels = make_calls(SIZES, self.effort.most_operations)
        crowded = KernelTimer(kernels, late=world.rank / world.size)
        self._measure_slice()
        alone = yield from self._time_on_rank0(self.effort.alone, KernelTimer(kernels, separate=True), threads=1)
        on_all = KernelTimer(kernels, clock=time.perf_counter)
        spread = yield from self._time_on_rank0(self.effort.spread, on_all, threads=count_cores())
        ops, facts = _run_on_rank0(world, lambda: (build_op_tallies(kernels), _measure_rank())) or ([], {})
        ops, alone, spread, facts = world.all_gather((ops, alone, spread, facts))[0]
        yield
        for _ in range(self.effort.crowded if world.size > 1 else 0):
            crowded.run_round()
            yield
        # All ranks build the same machine, and therefore need the same times: those of rank 0, and those of all.
        of_all = world.all_gather(crowded.timed) if world.size > 1 else []
        known = compute_speeds(ops, alone, spread, of_all, facts["call_s"], facts["back_call_s"], facts["cores"])
        latency_s, bytes_per_s = _measure_messages(world)
        on_host = max(world.all_gather(count_local_ranks(world.size)))
        machine = Machine(
            name="this machine",
            source=f"measured on {world.size} ranks",
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            speeds=known,
            slice_s=self._measure_slice(),
            ranks=world.size,
            node_ranks=on_host if on_host < world.size else None,
            quick=self.quick,
            **facts,
        )
        yield
        # Kernels and messages alone predict too short a step. The training of a small network shows what is missing,
        # and `fit_machine` chooses the remaining parameters accordingly.
        runs = [CalibrationRun(world, *act) for act in self.rehearsal]
        for _ in range(self.effort.rehearsals):
            for run in runs:
                run.run_steps(self.effort.steps)
            yield
        seen = [run.gather_times() for run in runs]
        self._measure_slice()
        spread_s = compute_spread([times for kernel in alone for times in (kernel.forward, kernel.backward)])
        noise = Noise(statistics.median(self._spins), max(spread_s, *(times.spread for times in seen)))
        fitted = fit_machine(replace(machine, noise=noise), self.rehearsal, seen) if world.rank == 0 else None
        self.machine = world.all_gather(fitted)[0]
        yield

    def _time_on_rank0(self, turns: int, timer: KernelTimer, threads: int) -> Generator[None, None, list[KernelTimes]]:
        """Return the times of rank 0, taken while all other ranks sleep in a barrier."""

        def run_round() -> None:
            use_threads(threads)
            try:
                timer.run_round()
            finally:
                use_threads(1)

        for _ in range(turns):
            _run_on_rank0(self.world, run_round)
            yield
        return timer.timed

    def _measure_slice(self) -> float:
        """Return the seconds of a rank's time slice when others want its core, and record the share of others."""
        spin, slices = _measure_spin(self.world)
        self._spins.append(compute_foreign_share(self.world.all_gather(spin), count_cores()))
        lengths_s = [length_s for rank_slices in self.world.all_gather(slices) for length_s in rank_slices]
        return statistics.median(lengths_s) if len(lengths_s) > self.world.size else _SLICES_S


def _run_on_rank0(world: World, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 between two barriers, in which all other ranks sleep."""
    world.barrier()
    result = work() if world.rank == 0 else None
    world.barrier()
    return result


def _measure_rank() -> dict[str, Any]:
    """Return the numbers that one rank measures alone, by the names of the machine's fields."""
    facts: dict[str, Any] = measure_overheads()

    count = 40
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.zeros(8)
    facts["weight_s"] = measure_median_seconds(torch.optim.SGD(weights, lr=0.1, momentum=0.9).step, 9) / count

    count = 20
    buffers = {name: torch.zeros(8) for name in ("mean", "variance")}
    moments = torch.zeros(2, 2, 8, dtype=torch.float64)
    update = Update("update", (RunningStatistics("mean", "variance", "moments", 0.1, (4, 4)),) * count, {})
    run_update = partial(update_buffers, buffers, update, lambda _: [moments], make_loopback_worlds(1)[0])
    facts["statistic_s"] = measure_median_seconds(run_update, 5) / count

    # Messages are packed into new memory, of data that no cache holds: together the blocks exceed every cache.
    blocks = torch.rand(_BLOCKS, _LARGE_BYTES // 16)
    copied_s = measure_median_seconds(lambda: [block.clone() for block in blocks])
    return facts | {"copy_per_s": blocks.nbytes / copied_s, "cores": count_cores(), "memory_bytes": get_memory_bytes()}


def measure_load(world: World) -> float:
    """Return the fraction of the cores that other programs take, on the host where it is largest.

    Collective. All ranks ask for a core for a part of a second, three times; the median counts.
    """
    looks = [world.all_gather(_measure_spin(world)[0]) for _ in range(_LOOKS)]
    return statistics.median(compute_foreign_share(spins, count_cores()) for spins in looks)


def _measure_spin(world: World) -> tuple[Spin, list[float]]:
    """Return the CPU time of this rank while all ranks spin, and the lengths of its time slices in seconds."""
    world.barrier()
    spent_s = time.thread_time()
    start_s = now_s = began_s = time.perf_counter()
    slices = []
    while now_s - start_s < _SLICES_S:
        before_s, now_s = now_s, time.perf_counter()
        # A gap between two reads of the clock means that the operating system had given the core to another thread.
        if now_s - before_s > _GAP_S:
            slices.append(before_s - began_s)
            began_s = now_s
    return Spin(socket.gethostname(), os.getpid(), now_s - start_s, time.thread_time() - spent_s), slices


def measure_overheads() -> dict[str, float]:
    """Return `call_s`, `back_call_s` and `instruction_s` of this rank, as in `Machine`."""
    calls = 50
    x = torch.zeros(1, 4, 2, 2)  # so small that the time of a call is all overhead

    def forward() -> Tensor:
        value = x.detach().requires_grad_()
        for _ in range(calls):
            value = torch.relu(value)
        return value

    call_s = measure_median_seconds(forward, 40) / calls
    both_s = measure_median_seconds(lambda: forward().backward(x), 40) / calls
    back_call_s = max(call_s, both_s - call_s)

    # A program of many instructions that do next to nothing, forward and backward. What it takes beyond its kernels is
    # the interpreter's own time.
    segments = []
    for i in range(_SEGMENTS):
        op = LocalOp(f"v{i + 1}", "aten.mul.Tensor", (Ref(f"v{i}"), Ref("w")))
        segments.append(Compute(f"s{i}", (op,), (f"v{i}",), (f"v{i + 1}",), True))
    steps = [Step(segment, Phase.FORWARD) for segment in segments]
    steps += [Step(segment, Phase.BACKWARD) for segment in reversed(segments)]
    last = f"v{_SEGMENTS}"
    way = DirectionProgram({0: tuple(segments)}, {"v0": ShardSpec(Tile(), ())}, last, last, True, frozenset({last}))
    program = Program(0, tuple(steps), {0: way}, {0: 0}, 1, ("w",), ())
    worker = Worker(program, make_loopback_worlds(1)[0], {"w": torch.ones(1, requires_grad=True)}, {})
    seconds = measure_median_seconds(lambda: worker.run({0: {"v0": torch.ones(1)}}), 9)
    instruction_s = max(0.0, seconds / len(steps) - (call_s + 2 * back_call_s) / 2)
    return {"call_s": call_s, "back_call_s": back_call_s, "instruction_s": instruction_s}


def _measure_messages(world: World) -> tuple[float, float]:
    """Return latency in seconds and bytes per second of messages to the neighbours while all ranks send.

    The latency is the smallest measured: the delayed resumption of a sleeping rank is part of `resume_s`, not of a
    message.
    """
    if world.size == 1:
        return 0.0, float("inf")
    # Both take the latency once, so that the difference is the time of the bytes alone.
    small = min(_measure_ring_seconds(world, 1 << 10, 1))
    large = statistics.median(_measure_ring_seconds(world, _LARGE_BYTES, _BLOCKS // 2))
    means = [sum(seconds) / world.size for seconds in zip(*world.all_gather((small, large)), strict=True)]
    return means[0], _LARGE_BYTES / max(1e-9, means[1] - means[0])


def _measure_ring_seconds(world: World, block_bytes: int, blocks: int) -> list[float]:
    """Return the seconds of each exchange with the right and the left neighbour, cycling through `blocks` buffers.

    Large buffers are then in no cache.
    """
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    out, into = (torch.zeros(blocks, block_bytes, dtype=torch.uint8) for _ in range(2))
    pairs = zip(out, into, strict=True)
    turns = cycle([world.prepare([Message(right, 2, sent)], [Message(left, 2, received)]) for sent, received in pairs])
    # The wall clock, since a message also travels while its receiver sleeps.
    world.barrier()
    return measure_seconds(lambda: next(turns)().wait(), max(blocks, _ROUNDS), time.perf_counter)
