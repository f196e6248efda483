"""A small network trained on all ranks, whole and in tiles: what sharing the cores costs, and what instructions do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from engines.bench.verify import batches
from engines.comm.waiting import looked_s
from engines.comm.world import World
from engines.plan import Plan
from engines.predict.actions import Work
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


_UNSEEN = Rehearsed(0.0, ())


def rehearsed(world: World, recipe: Recipe) -> Rehearsed:
    """Some steps of it; collective. The same on all ranks."""
    training = RankTraining(world, recipe)
    training.threads = 1
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
    the same; then what these take by themselves, and last how long waiting goes on after its end. One rank alone has
    nobody to share with.
    """
    recipes = (rehearsal.strips, rehearsal.large, rehearsal.small)
    tiled, many, few = played = [Programs(*each) for each in zip(recipes, (strips, large, small), strict=True)]
    bare = replace(machine, contention=1.0, **dict.fromkeys(_OVERHEADS.values(), 0.0))
    if len(few.programs) > 1:
        longer = (many.taken_s() - few.taken_s()) / (many.total_s(bare) - few.total_s(bare))
        bare = replace(bare, contention=max(_NO_WORSE, longer))
    over = tiled.over_s(bare)
    over["instruction_s"] += few.over_s(bare)["instruction_s"]
    machine = replace(bare, **{name: max(0.0, statistics.median(found)) for name, found in over.items() if found})
    machine = _updating(machine, played)
    return replace(machine, wake_s=tiled.wake_s(machine))


def _updating(machine: Machine, played: Sequence[Programs]) -> Machine:
    """With weights and running statistics that take as long to update as they did."""
    taken_s = sum(each.taken_s("update") for each in played)
    rest = replace(machine, weight_s=0.0, statistic_s=0.0)
    work_s, rest_s = (sum(each.total_s(of, "update") for each in played) for of in (machine, rest))
    longer = max(0.0, taken_s - rest_s) / (work_s - rest_s) if work_s > rest_s else 1.0
    return replace(machine, weight_s=longer * machine.weight_s, statistic_s=longer * machine.statistic_s)


@dataclass
class Programs:
    """A rehearsal as a machine would run it, and as it was `seen`."""

    recipe: Recipe
    seen: Rehearsed = _UNSEEN

    def __post_init__(self) -> None:
        graph, plan = self.recipe.graph, self.recipe.plan
        self.programs = compile_plan(graph, plan)
        self.tallies = [tally(program, graph) for program in self.programs]

    def work_s(self, machine: Machine) -> list[list[float]]:
        """What each rank computes in each step of its program while all of them are at work."""
        prices, ranks = Prices(machine), zip(self.programs, self.tallies, strict=True)
        slow = partial(machine.slowdown, len(self.programs))
        return [
            [sum(each.seconds * slow(each.crowded) for each in step if isinstance(each, Work)) for step in steps]
            for steps in (priced(*rank, prices, 1, again=False) for rank in ranks)
        ]

    def total_s(self, machine: Machine, kind: str = "") -> float:
        """All of it, or that of one kind of instructions."""
        return self._sum(self.work_s(machine), kind)

    def taken_s(self, kind: str = "") -> float:
        """The same, as it was seen."""
        return self._sum(self.seen.spent_s, kind)

    def _sum(self, seconds: Sequence[Sequence[float]], kind: str) -> float:
        return sum(
            each_s
            for program, own_s in zip(self.programs, seconds, strict=True)
            for step, each_s in zip(program.steps, own_s, strict=True)
            if kind in ("", step.instruction.kind)
        )

    def over_s(self, bare: Machine) -> dict[str, list[float]]:
        """What instructions took beyond their kernels and copies, by the name that a machine has for it."""
        found: dict[str, list[float]] = {name: [] for name in _OVERHEADS.values()}
        slower = bare.slowdown(len(self.programs))
        for program, works_s, spent_s in zip(self.programs, self.work_s(bare), self.seen.spent_s, strict=True):
            for step, work_s, taken_s in zip(program.steps, works_s, spent_s, strict=True):
                if name := _OVERHEADS.get(step.instruction.kind):
                    found[name].append((taken_s - work_s) / slower / _messages(step.instruction))
        return found

    def wake_s(self, machine: Machine) -> float:
        """How long a rank takes to go on once its message has come: what is left to be explained of a step."""
        if len(self.programs) == 1:
            return 0.0  # nobody waits
        low_s, high_s = 0.0, self.seen.step_s / len(_WIDTHS) / _DEPTH
        for _ in range(12):
            middle_s = (low_s + high_s) / 2
            too_fast = self.seconds(replace(machine, wake_s=middle_s)) < self.seen.step_s
            low_s, high_s = (middle_s, high_s) if too_fast else (low_s, middle_s)
        return low_s

    def seconds(self, machine: Machine) -> float:
        """Of a step of all ranks."""
        return simulate(self.programs, self.tallies, machine, [1] * len(self.programs)).seconds


def _messages(instruction: Instruction) -> int:
    """Of an exchange those that it sends and receives; all else counts as one."""
    return max(1, len(instruction.sends) + len(instruction.receives)) if isinstance(instruction, Exchange) else 1
