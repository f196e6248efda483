"""A small network trained on all ranks, whole and in tiles: what sharing the cores costs, and what instructions do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from torch import nn

from engines.bench.verify import make_batches
from engines.comm.wait_time import get_wait_cpu_s
from engines.comm.world import World
from engines.layout import compute_threads
from engines.plan import Plan
from engines.predict.actions import ComputeWork
from engines.predict.cost import CostModel, build_step_actions
from engines.predict.machine import Machine
from engines.predict.noise import compute_spread
from engines.predict.rank_tally import build_tally
from engines.predict.simulate import simulate
from engines.program.compile import compile_plan
from engines.training import RankTraining, Recipe, prepare

__all__ = [
    "STEPS",
    "TURNS",
    "CalibrationRecipes",
    "CalibrationRuns",
    "CalibrationTimes",
    "RunComparison",
    "fit_machine",
]

_WIDTHS, _DEPTH = (16, 32, 64), 4
_STRIP_PX, _WIDTH_PX = 128, 128
_LARGEST_PX, _SMALL_PX = 320, 32
_MOST_STAGES = 8
TURNS = 5
STEPS, _WARM_UP = 5, 1
_OVERHEADS = {"compute": "instruction_s", "halo": "exchange_s", "all-reduce": "sum_s"}


@dataclass(frozen=True)
class CalibrationRecipes:
    """One network three times: in a strip for each rank, where every layer has a halo and a sum; in replicas of small
    images; and in stages, whose ranks take turns with all cores: of images that are worth it.
    """

    strips: Recipe
    small: Recipe
    turns: Recipe

    @classmethod
    def of(cls, ranks: int) -> CalibrationRecipes:
        """For so many ranks."""
        strips = Plan(split_size=1, spatial_size=1, num_spatial_parts=ranks, slice_method="horizontal")
        replicas = Plan(split_size=1, spatial_size=0, data_parallel=ranks)
        stages = max(count for count in range(1, _MOST_STAGES + 1) if ranks % count == 0)
        turns = Plan(split_size=stages, spatial_size=0, data_parallel=ranks // stages)
        return cls(
            prepare(_build_network(), strips, (1, 3, _STRIP_PX * ranks, _WIDTH_PX), device="cpu"),
            prepare(_build_network(), replicas, (1, 3, _SMALL_PX, _SMALL_PX), device="cpu"),
            prepare(_build_network(), turns, (1, 3, _LARGEST_PX, _LARGEST_PX), device="cpu"),
        )

    @property
    def acts(self) -> tuple[tuple[Recipe, bool], ...]:
        """In this order they are played: each on one core for a rank, or on all that the plan gives it."""
        return (self.strips, False), (self.small, False), (self.turns, True)


def _build_network() -> nn.Module:
    layers: list[nn.Module] = []
    read = 3
    for width in _WIDTHS:
        for index in range(_DEPTH):
            stride = 2 if index == 0 and read > 3 else 1
            layers += [nn.Conv2d(read, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            read = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(read, 2))


@dataclass(frozen=True, slots=True)
class CalibrationTimes:
    """Medians over steps: seconds of a step (of the slowest rank), and of each rank the processor's time from one of
    its instructions to the next, without looking for messages that had not come.

    `jitter`: by which part of it that time is another one in the next step. `spread`: as `Noise` has it, of steps.
    """

    step_s: float
    spent_s: tuple[tuple[float, ...], ...]
    jitter: float = 0.0
    spread: float = 0.0


_UNSEEN = CalibrationTimes(0.0, ())


class CalibrationRuns:
    """Some steps of each, a `turn` at a time; collective."""

    def __init__(self, world: World, rehearsal: CalibrationRecipes, steps: int = STEPS) -> None:
        self._acts, self._steps = [_CalibrationRun(world, *each) for each in rehearsal.acts], steps

    def run_round(self) -> None:
        """So many steps more of each."""
        for act in self._acts:
            act.run_steps(self._steps)

    def gather_times(self) -> list[CalibrationTimes]:
        """What was found, the same on all ranks."""
        return [act.gather_times() for act in self._acts]


class _CalibrationRun:
    """One training of a rehearsal, on this rank."""

    def __init__(self, world: World, recipe: Recipe, all_cores: bool) -> None:
        self.world, self.training = world, RankTraining(world, recipe)
        if not all_cores:
            self.training.threads = 1
        self.inputs = self.training.cut(make_batches(recipe, 0, steps=1)[0])
        self.steps: list[float] = []
        self.spent: list[list[float]] = []
        self.apart: list[float] = []

    def run_steps(self, steps: int) -> None:
        """So many steps; the first ones bring back into caches what others have pushed out."""
        found = [self._run_step() for _ in range(_WARM_UP + steps)][_WARM_UP:]
        self.steps += [step_s for step_s, _ in found]
        self.spent += [spent_s for _, spent_s in found]
        self.apart += [_compute_difference(one, other) for (_, one), (_, other) in pairwise(found)]

    def _run_step(self) -> tuple[float, list[float]]:
        self.world.barrier()
        start_s = time.perf_counter()
        self.training.start(self.inputs)
        spent_s = list(_measure_instructions(self.training))
        return time.perf_counter() - start_s, spent_s

    def gather_times(self) -> CalibrationTimes:
        """By all ranks; collective."""
        own = (
            statistics.median(self.steps),
            _compute_medians(self.spent),
            statistics.median(self.apart),
            compute_spread([self.steps]),
        )
        steps_s, spent_s, apart, spreads = zip(*self.world.all_gather(own), strict=True)
        return CalibrationTimes(max(steps_s), spent_s, statistics.fmean(apart), statistics.fmean(spreads))


def _measure_instructions(training: RankTraining) -> Iterator[float]:
    """In each instruction of the step."""
    before_s = time.thread_time() - get_wait_cpu_s()
    while not training.worker.done:
        training.advance()
        now_s = time.thread_time() - get_wait_cpu_s()
        yield now_s - before_s
        before_s = now_s


def _compute_medians(steps: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(each) for each in zip(*steps, strict=True))


def _compute_difference(one_s: Sequence[float], other_s: Sequence[float]) -> float:
    """How far the instructions of a step are from those of the next one; of an exponential law that is its mean."""
    return min(1.0, sum(abs(one - other) for one, other in zip(one_s, other_s, strict=True)) / sum(other_s))


def fit_machine(machine: Machine, rehearsal: CalibrationRecipes, seen: Sequence[CalibrationTimes]) -> Machine:
    """The machine whose ranks would have taken as long.

    What instructions take by themselves is seen where images are small; then what tiles compute longer since they wait
    for each other, how long waiting goes on after its end where others have all cores, and last what a kernel of
    several threads takes longer than its part. One rank alone has nobody to wait for.
    """
    tiled, few, turns = played = [RunComparison(*act, each) for act, each in zip(rehearsal.acts, seen, strict=True)]
    bare = replace(machine, cold_copies=0.0, **dict.fromkeys(_OVERHEADS.values(), 0.0))
    over = _reduce_to_medians(tiled.compute_overheads_s(bare)) | {
        "instruction_s": _reduce_to_medians(few.compute_overheads_s(bare))["instruction_s"]
    }
    over["instruction_s"] = max(over["instruction_s"], machine.instruction_s)  # where kernels were faster than alone
    machine = replace(bare, **over)
    machine = _fit_update_s(replace(machine, cold_copies=tiled.fit_cold_copies(machine)), played[:-1])
    if len(tiled.programs) > 1:
        machine = replace(machine, jitter=tiled.seen.jitter)
    if machine.cores and len(tiled.programs) > machine.cores:
        machine = tiled.fit_parameter(machine, "resume_s")
    return turns.fit_parameter(machine, "thread_s")


def _reduce_to_medians(over: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each number, where it was seen."""
    return {name: max(0.0, statistics.median(found)) for name, found in over.items() if found}


def _fit_update_s(machine: Machine, played: Sequence[RunComparison]) -> Machine:
    """With updates that take as long as they did, whatever their weights and running statistics do not explain."""
    taken_s = sum(each.get_measured_s("update") for each in played)
    known_s = sum(each.estimate_total_s(machine, "update") for each in played)
    return replace(machine, update_s=max(0.0, (taken_s - known_s) / sum(len(each.programs) for each in played)))


def _bisect(most: float, is_too_little: Callable[[float], bool]) -> float:
    """The number between 0 and `most` up to which it is too little."""
    low, high = 0.0, most
    for _ in range(15):
        middle = (low + high) / 2
        low, high = (middle, high) if is_too_little(middle) else (low, middle)
    return low


@dataclass
class RunComparison:
    """A rehearsal as a machine would run it, and as it was `seen`."""

    recipe: Recipe
    all_cores: bool = False
    seen: CalibrationTimes = _UNSEEN

    def __post_init__(self) -> None:
        graph, plan = self.recipe.graph, self.recipe.plan
        self.programs = compile_plan(graph, plan)
        self.tallies = [build_tally(program, graph) for program in self.programs]

    def estimate_work_s(self, machine: Machine) -> list[list[float]]:
        """What each rank computes in each step of its program while all of them are at work."""
        prices, ranks = CostModel(machine), zip(self.programs, self.tallies, strict=True)
        slow = partial(machine.compute_slowdown, len(self.programs))
        return [
            [sum(each.seconds * slow(each.crowded) for each in step if isinstance(each, ComputeWork)) for step in steps]
            for steps in (build_step_actions(*rank, prices, 1, again=False) for rank in ranks)
        ]

    def estimate_total_s(self, machine: Machine, kind: str) -> float:
        """That of one kind of instructions, of all ranks."""
        return self._sum_kind(self.estimate_work_s(machine), kind)

    def get_measured_s(self, kind: str) -> float:
        """The same, as it was seen."""
        return self._sum_kind(self.seen.spent_s, kind)

    def _sum_kind(self, seconds: Sequence[Sequence[float]], kind: str) -> float:
        return sum(
            each_s
            for program, own_s in zip(self.programs, seconds, strict=True)
            for step, each_s in zip(program.steps, own_s, strict=True)
            if kind == step.instruction.kind
        )

    def compute_overheads_s(self, bare: Machine) -> dict[str, list[float]]:
        """What instructions took beyond their kernels and copies, by the name that a machine has for it."""
        found: dict[str, list[float]] = {name: [] for name in _OVERHEADS.values()}
        for program, works_s, spent_s in zip(self.programs, self.estimate_work_s(bare), self.seen.spent_s, strict=True):
            for step, work_s, taken_s in zip(program.steps, works_s, spent_s, strict=True):
                if name := _OVERHEADS.get(step.instruction.kind):
                    found[name].append(taken_s - work_s)
        return found

    def fit_cold_copies(self, machine: Machine) -> float:
        """How often ranks that waited must have copied what they worked on next, if that took as long as it did."""
        warm_s, cold_s = (self.estimate_total_s(replace(machine, cold_copies=times), "compute") for times in (0.0, 1.0))
        return max(0.0, self.get_measured_s("compute") - warm_s) / (cold_s - warm_s) if cold_s > warm_s else 0.0

    def fit_parameter(self, machine: Machine, name: str) -> Machine:
        """The machine with so much of `name` that a step takes as long as it did, as far as that explains it."""
        most_s, step_s = self.seen.step_s / len(_WIDTHS) / _DEPTH, self.seen.step_s
        found_s = _bisect(most_s, lambda each_s: self.simulate_seconds(replace(machine, **{name: each_s})) < step_s)
        return replace(machine, **{name: found_s})

    def simulate_seconds(self, machine: Machine) -> float:
        """Of a step of all ranks."""
        plan, cores = self.recipe.plan, machine.cores if self.all_cores else None
        threads = [compute_threads(plan, program.rank, cores or 1, machine.node_ranks) for program in self.programs]
        return simulate(self.programs, self.tallies, machine, threads).seconds
