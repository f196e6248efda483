"""A small network on tiles, trained on all ranks: what exchanges and sums cost a processor, and what waiting costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from engines.bench.verify import batches
from engines.comm.world import World
from engines.plan import Plan
from engines.predict.cost import Prices, priced
from engines.predict.count import tally
from engines.predict.machine import Machine
from engines.predict.simulate import simulate
from engines.predict.work import Work
from engines.program.compile import compile_plan
from engines.program.timeline import Event
from engines.training import RankTraining, Recipe, prepare

__all__ = ["Programs", "Rehearsal", "Rehearsed", "explained", "rehearsed"]

_WIDTHS, _DEPTH = (16, 32, 64), 4
_STRIP_PX, _WIDTH_PX, _SIDE_PX = 32, 64, 160
_STEPS, _WARM_UP, _ROUNDS = 50, 5, 4
_NO_WORSE = 0.5  # than samples say: a training may share the cores better than they did
_OVERHEADS = {"compute": "instruction_s", "halo": "exchange_s", "all-reduce": "sum_s"}


@dataclass(frozen=True)
class Rehearsal:
    """One network twice: in a strip for each rank, where every layer has a halo and a sum, and in replicas."""

    strips: Recipe
    replicas: Recipe

    @classmethod
    def of(cls, ranks: int) -> Rehearsal:
        """For so many ranks."""
        strips = Plan(split_size=1, spatial_size=1, num_spatial_parts=ranks, slice_method="horizontal")
        replicas = Plan(split_size=1, spatial_size=0, data_parallel=ranks)
        return cls(
            prepare(_network(), strips, (1, 3, _STRIP_PX * ranks, _WIDTH_PX), device="cpu"),
            prepare(_network(), replicas, (1, 3, _SIDE_PX, _SIDE_PX), device="cpu"),
        )


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    read = 3
    for width in _WIDTHS:
        for index in range(_DEPTH):
            stride = 2 if index == 0 and read > 3 else 1
            layers += [nn.Conv2d(read, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            read = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(read, 2))


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Medians over steps: seconds of a step (of the slowest rank) and of processor time in it (mean of the ranks), and
    those from one of the first rank's instructions to the next, without waiting.
    """

    step_s: float
    processor_s: float
    busy_s: tuple[float, ...]


def rehearsed(world: World, recipe: Recipe) -> Rehearsed:
    """Some steps of it; collective. The same on all ranks."""
    training = RankTraining(world, recipe)
    own = training.cut(batches(recipe, 0, steps=1)[0])
    steps, processor, busy = [], [], []
    for _ in range(_STEPS):
        world.rest()
        start_s, processor_s = time.perf_counter(), time.thread_time()
        training.step(own)
        steps.append(time.perf_counter() - start_s)
        processor.append(time.thread_time() - processor_s)
        busy.append(list(_apart_s(training.report.events)))
    told = [statistics.median(found[_WARM_UP:]) for found in (steps, processor)]
    found = world.gather((*told, [statistics.median(each) for each in zip(*busy[_WARM_UP:], strict=True)]))
    step_s, processor_s = (tuple(each[index] for each in found) for index in range(2))
    return Rehearsed(max(step_s), statistics.fmean(processor_s), tuple(found[0][2]))


def _apart_s(events: Sequence[Event]) -> Iterator[float]:
    """From the end of one to that of the next, but for what it waited."""
    ended_s = events[0].start_s
    for event in events:
        yield event.end_s - ended_s - event.wait_s
        ended_s = event.end_s


def explained(machine: Machine, rehearsal: Rehearsal, apart: Rehearsed, tiled: Rehearsed) -> Machine:
    """The machine whose ranks would have taken as long: what working at once costs, then instructions, then waiting."""
    replicas, strips = Programs(rehearsal.replicas), Programs(rehearsal.strips)
    for _ in range(_ROUNDS):
        contention = max(_NO_WORSE, apart.processor_s / replicas.processor_s(machine))
        spent = strips.spent_s(machine, contention, tiled.busy_s)
        overheads = {kind: max(0.0, statistics.median(found) / contention) for kind, found in spent.items()}
        machine = replace(machine, contention=contention, **overheads)
    return replace(machine, wake_s=strips.wake_s(machine, tiled.step_s))


@dataclass
class Programs:
    """A rehearsal as a machine would run it."""

    recipe: Recipe

    def __post_init__(self) -> None:
        graph, plan = self.recipe.graph, self.recipe.plan
        self.programs = compile_plan(graph, plan)
        self.tallies = [tally(program, graph) for program in self.programs]

    def work_s(self, machine: Machine) -> list[float]:
        """What the first rank computes in each step of its program with all cores at work, but for `contention`."""
        steps = priced(self.programs[0], self.tallies[0], Prices(machine), 1, again=False)
        return [sum(each.seconds * each.crowded for each in step if isinstance(each, Work)) for step in steps]

    def processor_s(self, machine: Machine) -> float:
        """All of it."""
        return sum(self.work_s(machine))

    def spent_s(self, machine: Machine, contention: float, busy_s: Sequence[float]) -> dict[str, list[float]]:
        """What each instruction took beyond its kernels and copies, by the name that the machine has for it."""
        bare = replace(machine, **dict.fromkeys(_OVERHEADS.values(), 0.0))
        found: dict[str, list[float]] = {}
        for step, work_s, taken_s in zip(self.programs[0].steps, self.work_s(bare), busy_s, strict=True):
            if name := _OVERHEADS.get(step.instruction.kind):
                found.setdefault(name, []).append(taken_s - contention * work_s)
        return found

    def wake_s(self, machine: Machine, step_s: float) -> float:
        """How long a rank takes to go on once its message has come: what is left to be explained of a step."""
        if len(self.programs) == 1:
            return 0.0  # nobody waits
        low_s, high_s = 0.0, step_s / len(_WIDTHS) / _DEPTH
        for _ in range(12):
            middle_s = (low_s + high_s) / 2
            too_fast = self.seconds(replace(machine, wake_s=middle_s)) < step_s
            low_s, high_s = (middle_s, high_s) if too_fast else (low_s, middle_s)
        return low_s

    def seconds(self, machine: Machine) -> float:
        """Of a step of all ranks."""
        return simulate(self.programs, self.tallies, machine, [1] * len(self.programs)).seconds
