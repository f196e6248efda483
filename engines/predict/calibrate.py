"""Measures the machine that the ranks run on: kernels, overheads, messages, and what sharing the cores costs."""

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engines.comm.container import cores, memory_bytes
from engines.comm.device import ranks_here, use_threads
from engines.comm.world import Message, World
from engines.layer.graph import Ref
from engines.predict.machine import Machine
from engines.predict.noise import Noise, Spin, spread_of, taken_elsewhere
from engines.predict.rehearsal import STEPS, Rehearsal, Rehearsing, explained
from engines.predict.rehearsal import TURNS as REHEARSALS
from engines.predict.sampled import Size, calls
from engines.predict.samples import TURNS, Samples, Timed, each_seconds, median_seconds, speeds, tallied
from engines.program.instructions import Compute, LocalOp, Phase, RunningStatistics, Update
from engines.program.program import Feed, Program, Step, Way
from engines.program.update import update_buffers
from engines.program.worker import Worker

if TYPE_CHECKING:
    from engines.host import Host

__all__ = ["Calibration", "calibrate", "overheads"]

SIZES = (
    Size(16, 16), Size(16, 32), Size(32, 48), Size(16, 96), Size(16, 256), Size(64, 16), Size(64, 64), Size(64, 192),
    Size(256, 8), Size(256, 32),
)  # fmt: skip
_SEGMENTS = 40
_ROUNDS = 15
_SLICES_S, _GAP_S = 0.2, 5e-4
_LARGE_BYTES, _BLOCKS = 1 << 22, 24


@dataclass(frozen=True)
class _Effort:
    """How often rank 0 measures by itself on one core, and on all; all ranks do at once; and all train `steps` steps.

    Three times are the least that show a spread. Of several images, only convolutions of at most `most_operations` are
    measured.
    """

    alone: int
    spread: int
    crowded: int
    rehearsals: int
    steps: int
    most_operations: float = math.inf


_FULL = _Effort(alone=TURNS, spread=TURNS, crowded=TURNS, rehearsals=REHEARSALS, steps=STEPS)
_QUICK = _Effort(alone=3, spread=1, crowded=1, rehearsals=1, steps=3, most_operations=4e8)


def calibrate(
    world: World, name: str = "this machine", rehearsal: Rehearsal | None = None, quick: bool = False
) -> Machine:
    """The machine as these ranks see it, the same on all of them; collective. It takes about a minute.

    Kernels are timed on rank 0 while the others sleep, and on all ranks at once; then these train a small network
    together: `rehearsal` is `Rehearsal.of(world.size)`, where it was traced elsewhere. `quick`: in a quarter of a
    minute, with few repetitions and without large convolutions of several images. How far it can be believed, its
    `noise` says.
    """
    calibration = Calibration(world, name, rehearsal, quick)
    while calibration.machine is None:
        calibration.part()
    return calibration.machine


class Calibration:
    """`calibrate`, a part at a time: between two of them it can be given up, and whoever waits is told how far it is.

    After the last of its `parts` it has the `machine`.
    """

    def __init__(
        self, world: World, name: str = "this machine", rehearsal: Rehearsal | None = None, quick: bool = False
    ) -> None:
        self.world, self.name, self.quick = world, name, quick
        self.rehearsal = rehearsal or Rehearsal.of(world.size)
        self.effort = _QUICK if quick else _FULL
        self.machine: Machine | None = None
        self._spins: list[float] = []
        self._rest = self._run()

    @staticmethod
    def parts(ranks: int, quick: bool = False) -> int:
        """How many there are."""
        effort = _QUICK if quick else _FULL
        return effort.alone + effort.spread + (effort.crowded if ranks > 1 else 0) + effort.rehearsals + 3

    @classmethod
    def begin(cls, host: Host, rehearsal: Rehearsal, quick: bool) -> None:
        """Keep a new one for the calls that follow, which do a part each and then `end` it."""
        host.calibration = cls(host.world, rehearsal=rehearsal, quick=quick)

    @staticmethod
    def go_on(host: Host) -> Machine | None:
        """Its next part."""
        return host.calibration and host.calibration.part()

    @staticmethod
    def end(host: Host) -> None:
        """Keep it no longer."""
        host.calibration = None

    def part(self) -> Machine | None:
        """The next one; collective. The machine, if it was the last."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            next(self._rest, None)
        finally:
            torch.set_num_threads(before)
        return self.machine

    def _run(self) -> Iterator[None]:
        world = self.world
        kernels = calls(SIZES, self.effort.most_operations)
        crowded = Samples(kernels, late=world.rank / world.size)
        self._spin()
        alone = yield from self._first_rank(self.effort.alone, Samples(kernels, apart=True), lambda work: work())
        on_all = Samples(kernels, clock=time.perf_counter)
        spread = yield from self._first_rank(self.effort.spread, on_all, _on_all_cores)
        ops, facts = _one_by_one(world, lambda: (tallied(kernels), _facts())) or ([], {})
        ops, alone, spread, facts = world.all_gather((ops, alone, spread, facts))[0]
        yield
        for _ in range(self.effort.crowded if world.size > 1 else 0):
            crowded.turn()
            yield
        of_all = world.all_gather(crowded.timed) if world.size > 1 else []
        known = speeds(ops, alone, spread, of_all, facts["call_s"], facts["back_call_s"], facts["cores"])
        latency_s, bytes_per_s = _messages(world)
        on_host = max(world.all_gather(ranks_here(world.size)))
        machine = Machine(
            name=self.name, source=f"measured on {world.size} ranks", latency_s=latency_s, bytes_per_s=bytes_per_s,
            speeds=known, slice_s=self._spin(), ranks=world.size, node_ranks=on_host if on_host < world.size else None,
            quick=self.quick, **facts,
        )  # fmt: skip
        yield
        rehearsing = Rehearsing(world, self.rehearsal, self.effort.steps)
        for _ in range(self.effort.rehearsals):
            rehearsing.turn()
            yield
        seen = rehearsing.seen()
        self._spin()
        spread_s = spread_of([times for each in alone for times in (each.forward, each.backward)])
        noise = Noise(statistics.median(self._spins), max(spread_s, *(each.spread for each in seen)))
        found = explained(replace(machine, noise=noise), self.rehearsal, seen) if world.rank == 0 else None
        self.machine = world.all_gather(found)[0]
        yield

    def _first_rank(
        self, turns: int, samples: Samples, how: Callable[[Callable[[], None]], None]
    ) -> Generator[None, None, list[Timed]]:
        """The samples of rank 0, timed while all others sleep."""
        for _ in range(turns):
            _one_by_one(self.world, lambda: how(samples.turn))
            yield
        return samples.timed

    def _spin(self) -> float:
        """How long a rank computes at a time, if others want its core too; and what other programs take is noted."""
        spin, slices = _spun(self.world)
        self._spins.append(taken_elsewhere(self.world.all_gather(spin), cores()))
        found = [length_s for own in self.world.all_gather(slices) for length_s in own]
        return statistics.median(found) if len(found) > self.world.size else _SLICES_S


def _one_by_one(world: World, work: Callable[[], Any]) -> Any:
    """On rank 0, while all others sleep."""
    world.barrier()
    found = work() if world.rank == 0 else None
    world.barrier()
    return found


def _facts() -> dict[str, Any]:
    """What a rank tells of itself alone, by the names that a machine has for it."""
    return {
        **overheads(),
        "weight_s": _weight_seconds(),
        "statistic_s": _statistic_seconds(),
        "copy_per_s": _copied_per_second(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
    }


def _on_all_cores(work: Callable[[], None]) -> None:
    """Each kernel shared out among all cores."""
    use_threads(cores())
    try:
        work()
    finally:
        use_threads(1)


def _copied_per_second() -> float:
    """Into fresh memory, as messages are packed, of what no cache holds."""
    blocks = torch.rand(_BLOCKS, _LARGE_BYTES // 16)
    return blocks.nbytes / median_seconds(lambda: [block.clone() for block in blocks])


def _spun(world: World) -> tuple[Spin, list[float]]:
    """What this rank was given of a core while all ranks asked for one, and for how long at a time."""
    world.barrier()
    spent_s = time.thread_time()
    start_s = now_s = began_s = time.perf_counter()
    slices = []
    while now_s - start_s < _SLICES_S:
        before_s, now_s = now_s, time.perf_counter()
        if now_s - before_s > _GAP_S:
            slices.append(before_s - began_s)
            began_s = now_s
    return Spin(socket.gethostname(), os.getpid(), now_s - start_s, time.thread_time() - spent_s), slices


def overheads() -> dict[str, float]:
    """`call_s`, `back_call_s` and `instruction_s` of this rank, as `Machine` has them."""
    call_s, back_call_s = _call_seconds()
    instruction_s = _instruction_seconds(call_s, back_call_s)
    return {"call_s": call_s, "back_call_s": back_call_s, "instruction_s": instruction_s}


def _call_seconds() -> tuple[float, float]:
    """Of a kernel call beside its work, forward and back."""
    calls = 50
    x = torch.zeros(1, 4, 2, 2)

    def forward() -> Tensor:
        value = x.detach().requires_grad_()
        for _ in range(calls):
            value = torch.relu(value)
        return value

    call_s = median_seconds(forward, 40) / calls
    both_s = median_seconds(lambda: forward().backward(x), 40) / calls
    return call_s, max(call_s, both_s - call_s)


def _instruction_seconds(call_s: float, back_call_s: float) -> float:
    """Of one instruction beside its kernels: a program of many that do next to nothing, forward and back."""
    weight = torch.ones(1, requires_grad=True)
    segments = [
        Compute(f"s{i}", (LocalOp(f"v{i + 1}", "aten.mul.Tensor", (Ref(f"v{i}"), Ref("w"))),), (f"v{i}",),
                (f"v{i + 1}",), True)
        for i in range(_SEGMENTS)
    ]  # fmt: skip
    steps = [Step(each, Phase.FORWARD) for each in segments] + [Step(each, Phase.BACKWARD) for each in segments[::-1]]
    last = f"v{_SEGMENTS}"
    way = Way({0: tuple(segments)}, {"v0": Feed(None, None)}, last, last, True, frozenset({last}))
    program = Program(0, tuple(steps), {0: way}, {0: 0}, 1, ("w",), ())
    worker = Worker(program, _Nobody(), {"w": weight}, {})
    seconds = median_seconds(lambda: worker.run({0: {"v0": torch.ones(1)}}), 9)
    return max(0.0, seconds / len(steps) - (call_s + 2 * back_call_s) / 2)


class _Nobody:
    """A world of one rank."""

    rank, size = 0, 1

    def can_access(self, device: torch.device) -> bool:
        return True


def _weight_seconds() -> float:
    count = 40
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.zeros(8)
    return median_seconds(torch.optim.SGD(weights, lr=0.1, momentum=0.9).step, 9) / count


def _statistic_seconds() -> float:
    count = 20
    buffers = {name: torch.zeros(8) for name in ("mean", "variance")}
    entry = RunningStatistics("mean", "variance", "moments", 0.1, (4, 4))
    moments = torch.zeros(2, 2, 8, dtype=torch.float64)
    update = Update("update", (entry,) * count, {})
    return median_seconds(partial(update_buffers, buffers, update, lambda _: [moments], _Nobody()), 5) / count


def _messages(world: World) -> tuple[float, float]:
    """Latency, and bytes in a second, of messages to a neighbour and back while all ranks send.

    Latency is the least that was seen: that whoever sleeps goes on later is no message's, but `resume_s`.
    """
    if world.size == 1:
        return 0.0, float("inf")
    small = min(_ring_seconds(world, 1 << 10, 1))
    large = statistics.median(_ring_seconds(world, _LARGE_BYTES, _BLOCKS // 2))
    means = [sum(found) / world.size for found in zip(*world.all_gather((small, large)), strict=True)]
    return means[0], _LARGE_BYTES / max(1e-9, means[1] - means[0])


def _ring_seconds(world: World, count_bytes: int, blocks: int) -> list[float]:
    """Each time, of a message to the right and one from the left, between so many blocks in turn.

    Large values lie in no cache.
    """
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    out, into = (torch.zeros(blocks, count_bytes, dtype=torch.uint8) for _ in range(2))
    turns = cycle(
        [
            world.prepare([Message(right, 2, there)], [Message(left, 2, here)])
            for there, here in zip(out, into, strict=True)
        ]
    )
    world.barrier()
    return each_seconds(lambda: next(turns)().wait(), max(blocks, _ROUNDS), time.perf_counter)
