"""Trains a small network on all ranks, whole and in tiles, to measure instruction overheads and shared cores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mpi4dl_nb.engines.comm.status_board import get_wait_cpu_s
from mpi4dl_nb.engines.comm.world import World
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.plan.layout import compute_threads
from mpi4dl_nb.engines.predict.cost import ComputeWork, CostModel, build_step_actions
from mpi4dl_nb.engines.predict.machine import Machine
from mpi4dl_nb.engines.predict.machine_checks import compute_spread
from mpi4dl_nb.engines.predict.rank_tally import build_tally
from mpi4dl_nb.engines.predict.simulate import simulate
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

_WIDTHS, _DEPTH = (16, 32, 64), 4
_STRIP_PX, _WIDTH_PX = 128, 128
_LARGEST_PX, _SMALL_PX = 320, 32
_MOST_STAGES = 8
_WARM_UP = 1
_OVERHEADS = {"compute": "instruction_s", "halo": "exchange_s", "all-reduce": "sum_s"}


CalibrationRecipes = tuple[tuple[Recipe, bool], ...]
"""Recipes in the order of their runs, each with whether a rank uses all cores that the plan gives it."""


def prepare_recipes(ranks: int) -> CalibrationRecipes:
    """Return one network in three layouts for a number of ranks.

    First, one strip for each rank, so that every layer has a halo and an all-reduce. Then, replicas of small images.
    Last, stages, whose ranks use all cores in turn, with images that are large enough for that.
    """
    strips = Plan(split_size=1, spatial_size=1, num_spatial_parts=ranks, slice_method="horizontal")
    replicas = Plan(split_size=1, spatial_size=0, data_parallel=ranks)
    stages = max(count for count in range(1, _MOST_STAGES + 1) if ranks % count == 0)
    turns = Plan(split_size=stages, spatial_size=0, data_parallel=ranks // stages)
    return (
        (prepare(_build_network(), strips, (1, 3, _STRIP_PX * ranks, _WIDTH_PX), device="cpu"), False),
        (prepare(_build_network(), replicas, (1, 3, _SMALL_PX, _SMALL_PX), device="cpu"), False),
        (prepare(_build_network(), turns, (1, 3, _LARGEST_PX, _LARGEST_PX), device="cpu"), True),
    )


def _build_network() -> nn.Module:
    # Convolutions, batch norms and ReLUs, in three widths: halos and all-reduces of several sizes, if cut into strips.
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
    """Medians over steps: seconds of a step on the slowest rank, and the CPU time of each instruction, rank after rank.

    The CPU time runs from one instruction to the next, without polling for messages that had not arrived. `jitter`: by
    which fraction this time differs from step to step. `spread`: that of the step times, as in `Noise`.
    """

    step_s: float
    spent_s: tuple[float, ...]
    jitter: float = 0.0
    spread: float = 0.0


class CalibrationRun:
    """The training of one calibration recipe on this rank; all ranks make the same calls."""

    def __init__(self, world: World, recipe: Recipe, all_cores: bool) -> None:
        self.world, self.training = world, RankTraining(world, recipe)
        if not all_cores:
            self.training.threads = 1
        self.inputs = self.training.cut(make_batches(recipe, 0, steps=1)[0])
        self.steps: list[float] = []
        self.spent: list[list[float]] = []
        self.differences: list[float] = []

    def run_steps(self, steps: int) -> None:
        """Run and record `steps` steps, after warm-up steps that refill the caches which other recipes have evicted."""
        timings = []
        for _ in range(_WARM_UP + steps):
            self.world.barrier()  # a rank that is late would make the others wait, and their waiting part of the step
            start_s = time.perf_counter()
            self.training.start(self.inputs)
            spent_s = []  # the CPU time of each instruction without polling
            before_s = time.thread_time() - get_wait_cpu_s()
            while not self.training.worker.done:
                self.training.advance()
                now_s = time.thread_time() - get_wait_cpu_s()
                spent_s.append(now_s - before_s)
                before_s = now_s
            timings.append((time.perf_counter() - start_s, spent_s))
        timings = timings[_WARM_UP:]
        self.steps += [step_s for step_s, _ in timings]
        self.spent += [spent_s for _, spent_s in timings]
        # The relative difference of two steps. Two draws from an exponential distribution differ, on average, by the
        # mean of the distribution: what `Machine.jitter` asks for.
        for (_, earlier_s), (_, later_s) in pairwise(timings):
            difference_s = sum(abs(earlier - later) for earlier, later in zip(earlier_s, later_s, strict=True))
            self.differences.append(min(1.0, difference_s / sum(later_s)))

    def gather_times(self) -> CalibrationTimes:
        """Return the times gathered from all ranks; collective."""
        spent = tuple(statistics.median(seconds) for seconds in zip(*self.spent, strict=True))
        times = statistics.median(self.steps), spent, statistics.median(self.differences), compute_spread([self.steps])
        steps_s, spent_s, jitters, spreads = zip(*self.world.all_gather(times), strict=True)
        mean = statistics.fmean
        return CalibrationTimes(max(steps_s), tuple(chain(*spent_s)), mean(jitters), mean(spreads))


def _replace(machine: Machine, numbers: Mapping[str, Any]) -> Machine:
    """Return the machine with other numbers, by the names of its fields."""
    return replace(machine, **numbers)


def fit_machine(machine: Machine, rehearsal: CalibrationRecipes, seen: Sequence[CalibrationTimes]) -> Machine:
    """Return the machine with the parameters that reproduce the measured times.

    The overheads of instructions come from the run with small images. The tiled run then gives the additional computing
    time of tiles that wait for each other, and the delay with which a wait ends where others occupy all cores. Last,
    the run in stages gives the cost of a kernel of several threads beyond its parallel part. A single rank never waits,
    so its jitter is not fitted.
    """
    tiled, few, turns = [RunComparison(*act, times) for act, times in zip(rehearsal, seen, strict=True)]
    # The order of the fits matters: each parameter explains what those fitted before it leave unexplained.
    bare = _replace(machine, {"cold_copies": 0.0, **dict.fromkeys(_OVERHEADS.values(), 0.0)})
    over = tiled.compute_overheads_s(bare)
    instruction_s = few.compute_overheads_s(bare)["instruction_s"]
    over["instruction_s"] = max(instruction_s, machine.instruction_s)  # where kernels ran faster than alone
    machine = _replace(bare, over)
    machine = replace(machine, cold_copies=tiled.fit_cold_copies(machine))
    # `update_s` is what the costs of weights and running statistics leave unexplained.
    taken_s = sum(run.get_measured_s("update") for run in (tiled, few))
    known_s = sum(run.estimate_total_s(machine, "update") for run in (tiled, few))
    updates = len(tiled.programs) + len(few.programs)
    machine = replace(machine, update_s=max(0.0, (taken_s - known_s) / updates))
    # Only ranks that wait for each other show these: the slowest counts, and without a free core a wait ends late.
    if len(tiled.programs) > 1:
        machine = replace(machine, jitter=tiled.seen.jitter)
    if machine.cores and len(tiled.programs) > machine.cores:
        machine = tiled.fit_parameter(machine, "resume_s")
    return turns.fit_parameter(machine, "thread_s")


@dataclass
class RunComparison:
    """The programs of one calibration recipe, to compare their predicted times with the measured times (`seen`)."""

    recipe: Recipe
    all_cores: bool = False
    seen: CalibrationTimes = CalibrationTimes(0.0, ())

    def __post_init__(self) -> None:
        graph, plan = self.recipe.graph, self.recipe.plan
        self.programs = compile_plan(graph, plan)
        self.tallies = [build_tally(program, graph) for program in self.programs]
        self.kinds = np.array([step.instruction.kind for program in self.programs for step in program.steps])

    def estimate_work_s(self, machine: Machine) -> NDArray[np.float64]:
        """Return the predicted seconds of computation of each step, rank after rank, while all ranks are busy."""
        prices, slow = CostModel(machine), partial(machine.compute_slowdown, len(self.programs))
        ranks = zip(self.programs, self.tallies, strict=True)
        steps = chain(*(build_step_actions(*rank, prices, 1, recompute=False, offload=False) for rank in ranks))
        work = ([action for action in step if isinstance(action, ComputeWork)] for step in steps)
        return np.array([sum(action.seconds * slow(action.crowded) for action in actions) for actions in work])

    def estimate_total_s(self, machine: Machine, kind: str) -> float:
        """Return the predicted seconds of all instructions of a kind, summed over the ranks."""
        return float(self.estimate_work_s(machine)[self.kinds == kind].sum())

    def get_measured_s(self, kind: str) -> float:
        """Return the measured seconds of all instructions of a kind, summed over the ranks."""
        return float(np.array(self.seen.spent_s)[self.kinds == kind].sum())

    def compute_overheads_s(self, bare: Machine) -> dict[str, float]:
        """Return by how much the measured seconds of an instruction exceed the predicted ones, in the median.

        At least 0, by the names of the machine's fields.
        """
        over_s = np.array(self.seen.spent_s) - self.estimate_work_s(bare)
        medians = {kind: float(np.median(over_s[self.kinds == kind])) for kind in _OVERHEADS if kind in self.kinds}
        return {_OVERHEADS[kind]: max(0.0, median_s) for kind, median_s in medians.items()}

    def fit_cold_copies(self, machine: Machine) -> float:
        """Return the `cold_copies` with which predicted computation takes the measured time, at least 0."""
        warm_s, cold_s = (self.estimate_total_s(replace(machine, cold_copies=times), "compute") for times in (0.0, 1.0))
        return max(0.0, self.get_measured_s("compute") - warm_s) / (cold_s - warm_s) if cold_s > warm_s else 0.0

    def fit_parameter(self, machine: Machine, name: str) -> Machine:
        """Return the machine with the value of `name` at which a simulated step takes the measured time.

        The value is bounded by the measured step time divided by the number of convolutions.
        """
        most_s, step_s = self.seen.step_s / len(_WIDTHS) / _DEPTH, self.seen.step_s
        # A step takes longer the larger the parameter is, as far as the simulation is monotonic: bisection.
        low_s, high_s = 0.0, most_s
        for _ in range(15):
            middle_s = (low_s + high_s) / 2
            if self.simulate_seconds(_replace(machine, {name: middle_s})) < step_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return _replace(machine, {name: low_s})

    def simulate_seconds(self, machine: Machine) -> float:
        """Return the simulated seconds of a step of all ranks."""
        plan, cores = self.recipe.plan, machine.cores if self.all_cores else None
        threads = [compute_threads(plan, program.rank, cores or 1, machine.node_ranks) for program in self.programs]
        return simulate(self.programs, self.tallies, machine, threads).seconds
