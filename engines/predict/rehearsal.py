"""A small network on tiles, trained on all ranks: what exchanges and sums cost a processor, and what waiting costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from engines.bench.verify import batches
from engines.comm.waiting import looked_s
from engines.comm.world import World
from engines.plan import Plan
from engines.predict.actions import Action, Work
from engines.predict.cost import Prices, priced
from engines.predict.count import tally
from engines.predict.machine import Machine
from engines.predict.simulate import simulate
from engines.program.compile import compile_plan
from engines.program.instructions import Exchange, Instruction
from engines.training import RankTraining, Recipe, prepare

__all__ = ["Programs", "Rehearsal", "Rehearsed", "explained", "rehearsed"]

_WIDTHS, _DEPTH = (16, 32, 64), 4
_STRIP_PX, _WIDTH_PX = 32, 64
_LARGE_PX, _SMALL_PX = 160, 32
_STEPS, _WARM_UP = 50, 5
_NO_WORSE = 0.5  # than samples say: a training may share the cores better than they did
_OVERHEADS = {"compute": "instruction_s", "halo": "exchange_s", "all-reduce": "sum_s"}


@dataclass(frozen=True)
class Rehearsal:
    """One network three times: in a strip for each rank, where every layer has a halo and a sum, and in replicas, of
    large images and of small ones.
    """

    strips: Recipe
    large: Recipe
    small: Recipe

    @classmethod
    def of(cls, ranks: int) -> Rehearsal:
        """For so many ranks."""
        strips = Plan(split_size=1, spatial_size=1, num_spatial_parts=ranks, slice_method="horizontal")
        replicas = Plan(split_size=1, spatial_size=0, data_parallel=ranks)
        return cls(
            prepare(_network(), strips, (1, 3, _STRIP_PX * ranks, _WIDTH_PX), device="cpu"),
            *(prepare(_network(), replicas, (1, 3, px, px), device="cpu") for px in (_LARGE_PX, _SMALL_PX)),
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
    """Medians over steps: seconds of a step (of the slowest rank), and of each rank the processor's time from one of
    its instructions to the next, without looking for messages that had not come.
    """

    step_s: float
    spent_s: tuple[tuple[float, ...], ...]


def rehearsed(world: World, recipe: Recipe) -> Rehearsed:
    """Some steps of it; collective. The same on all ranks."""
    training = RankTraining(world, recipe)
    own = training.cut(batches(recipe, 0, steps=1)[0])
    steps, spent = [], []
    for _ in range(_STEPS):
        world.rest()
        start_s = time.perf_counter()
        training.start(own)
        spent.append(list(_spent_s(training)))
        steps.append(time.perf_counter() - start_s)
    found = world.gather((statistics.median(steps[_WARM_UP:]), _medians(spent[_WARM_UP:])))
    return Rehearsed(max(step_s for step_s, _ in found), tuple(spent_s for _, spent_s in found))


def _spent_s(training: RankTraining) -> Iterator[float]:
    """In each instruction of the step."""
    before_s = time.thread_time() - looked_s()
    while not training.worker.done:
        training.advance()
        now_s = time.thread_time() - looked_s()
        yield now_s - before_s
        before_s = now_s


def _medians(steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(each) for each in zip(*steps, strict=True))


def explained(machine: Machine, rehearsal: Rehearsal, strips: Rehearsed, large: Rehearsed, small: Rehearsed) -> Machine:
    """The machine whose ranks would have taken as long.

    What working at once costs is seen in what large images take more than small ones, for which the instructions are
    the same; then what these take by themselves, and last how long waiting goes on after its end.
    """
    bare = replace(machine, contention=1.0, **dict.fromkeys(_OVERHEADS.values(), 0.0))
    tiled, many, few = (Programs(recipe) for recipe in (rehearsal.strips, rehearsal.large, rehearsal.small))
    more_s = sum(map(sum, large.spent_s)) - sum(map(sum, small.spent_s))
    contention = max(_NO_WORSE, more_s / (sum(map(sum, many.work_s(bare))) - sum(map(sum, few.work_s(bare)))))
    apart, over = few.over_s(bare, contention, small), tiled.over_s(bare, contention, strips)
    over["instruction_s"] += apart["instruction_s"]
    overheads = {name: max(0.0, statistics.median(found)) for name, found in over.items() if found}
    machine = replace(machine, contention=contention, **overheads)
    pairs = [*tiled.updates_s(machine, strips), *many.updates_s(machine, large), *few.updates_s(machine, small)]
    longer = sum(taken_s for taken_s, _ in pairs) / sum(work_s for _, work_s in pairs)
    machine = replace(machine, weight_s=longer * machine.weight_s, statistic_s=longer * machine.statistic_s)
    return replace(machine, wake_s=tiled.wake_s(machine, strips.step_s))


@dataclass
class Programs:
    """A rehearsal as a machine would run it."""

    recipe: Recipe

    def __post_init__(self) -> None:
        graph, plan = self.recipe.graph, self.recipe.plan
        self.programs = compile_plan(graph, plan)
        self.tallies = [tally(program, graph) for program in self.programs]

    def work_s(self, machine: Machine) -> list[list[float]]:
        """What each rank computes in each step of its program with all cores at work."""
        prices, ranks = Prices(machine), zip(self.programs, self.tallies, strict=True)
        return [[_crowded_s(machine, step) for step in priced(*rank, prices, 1, again=False)] for rank in ranks]

    def over_s(self, bare: Machine, contention: float, seen: Rehearsed) -> dict[str, list[float]]:
        """What instructions took beyond their kernels and copies, by the name that a machine has for it."""
        found: dict[str, list[float]] = {name: [] for name in _OVERHEADS.values()}
        for instruction, work_s, taken_s in self._all(bare, seen):
            if name := _OVERHEADS.get(instruction.kind):
                found[name].append((taken_s / contention - work_s) / _messages(instruction))
        return found

    def updates_s(self, machine: Machine, seen: Rehearsed) -> list[tuple[float, float]]:
        """What the ranks' updates took, and what they take by the machine."""
        return [(taken, work) for instruction, work, taken in self._all(machine, seen) if instruction.kind == "update"]

    def _all(self, machine: Machine, seen: Rehearsed) -> Iterator[tuple[Instruction, float, float]]:
        """Every instruction of every rank, its seconds by the machine, and what it took."""
        for program, works_s, spent_s in zip(self.programs, self.work_s(machine), seen.spent_s, strict=True):
            yield from zip((step.instruction for step in program.steps), works_s, spent_s, strict=True)

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


def _crowded_s(machine: Machine, step: Sequence[Action]) -> float:
    return sum(each.seconds * machine.contention * each.crowded for each in step if isinstance(each, Work))


def _messages(instruction: Instruction) -> int:
    """Of an exchange those that it sends and receives; all else counts as one."""
    return max(1, len(instruction.sends) + len(instruction.receives)) if isinstance(instruction, Exchange) else 1
