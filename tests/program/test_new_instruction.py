"""A new instruction is two things, what it does as data and its kernel: nothing else in the project knows its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

from mpi4dl_nb.engines.comm.all_reduce import all_reduce
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.compiler.steps import DependencyOrder, label_steps
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.cost import JoinAllReduce, build_step_actions
from mpi4dl_nb.engines.predict.machines import MACHINES
from mpi4dl_nb.engines.predict.memory_simulation import simulate_memory
from mpi4dl_nb.engines.predict.rank_tally import build_tally
from mpi4dl_nb.engines.program.effects import Effects, Instruction, Phase, Reduction
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.micro_batch import KERNELS, MicroBatchState
from mpi4dl_nb.engines.program.program import Program, Step, count_traffic
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import cut_inputs

PLAN = Plan(split_size=1, num_spatial_parts=4, parts=2, precision="float64")
BATCH = {"images": torch.randn(4, 3, 16, 12, dtype=torch.float64), "labels": torch.randn(4, 3, dtype=torch.float64)}


# ---- the new instruction: `target` is the largest element of `source` of each rank in `group`


@dataclass(frozen=True, slots=True)
class GatherLargest(Instruction):
    per_micro_batch: ClassVar[bool] = True
    kind: ClassVar[str] = "all-reduce"
    name: str
    source: str
    target: str
    group: tuple[int, ...]
    differentiable: bool = False

    def get_effects(self, phase: Phase) -> Effects:
        spec = TensorSpec((len(self.group),), "float64")
        total = Reduction(self.name, self.group, spec.bytes)
        return Effects((self.source,), (self.target,), {self.target: spec}, reductions=(total,))


def run(state: MicroBatchState, item: GatherLargest, phase: Phase) -> int:
    found = torch.zeros(len(item.group), dtype=torch.float64)
    found[item.group.index(state.runtime.world.rank)] = state.values[item.source].max()
    sent = all_reduce(state.runtime.world, found, item.group).wait()
    state.keep(item.target, found, differentiable=False)
    return sent


# ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.first(x))).mean((2, 3)))


def insert(program: Program) -> Program:
    """The program, with the new instruction after the segment that makes the activation."""
    way = program.direction_programs[0]
    made = next(item for item in way.forward if isinstance(item, Compute) and "relu" in item.outputs)
    new = GatherLargest("largest", "relu", "relu.largest", tuple(range(PLAN.ranks)))
    stage = tuple(each for item in way.forward for each in ((item, new) if item is made else (item,)))
    steps: list[Step] = []
    for step in program.steps:
        here = step.phase is Phase.FORWARD and step.instruction is made
        steps += [step, replace(step, instruction=new)] if here else [step]
    longer = replace(way, stages={0: stage}, kept_to_end=way.kept_to_end | {"relu.largest"})
    return replace(program, steps=tuple(steps), direction_programs={0: longer})


@dataclass(frozen=True)
class Case:
    model: nn.Module
    recipe: Recipe
    before: tuple[Program, ...]
    programs: list[Program]
    ran: list[dict[str, Any]]


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    torch.manual_seed(0)
    model = Net().double()
    recipe = prepare(model, PLAN, BATCH["images"].shape, functional.mse_loss, labels=BATCH["labels"])
    before = compile_plan(recipe.graph, PLAN)
    programs = list(map(insert, before))

    def work(world: LoopbackWorld) -> dict[str, Any]:
        program = programs[world.rank]
        weights = {name: recipe.state[name].clone().requires_grad_() for name in program.weights}
        worker = Worker(program, world, weights, {}, torch.optim.SGD(weights.values(), lr=0.1))
        worker.run(cut_inputs(program, BATCH))
        largest = [worker.peek("relu.largest", number) for number in worker.micro_batch_states]
        sent = sum(event.bytes for event in worker.events)
        return {"sent": sent, "largest": torch.stack(largest), "weights": weights}

    KERNELS[GatherLargest] = run
    yield Case(model, recipe, before, programs, run_ranks(PLAN.ranks, work))
    del KERNELS[GatherLargest]


def test_it_runs_and_the_training_stays_exact(case: Case):
    activation = torch.relu(case.model.first(BATCH["images"])).detach().chunk(2)
    tiles = [[part[:, :, r : r + 8, c : c + 6].max() for r in (0, 8) for c in (0, 6)] for part in activation]
    functional.mse_loss(case.model(BATCH["images"]), BATCH["labels"]).backward()
    for each in case.ran:
        torch.testing.assert_close(each["largest"], torch.tensor(tiles, dtype=torch.float64))
        for name, weight in case.model.named_parameters():
            torch.testing.assert_close(
                each["weights"][f"model.{name}"], weight - 0.1 * weight.grad, rtol=1e-11, atol=1e-13
            )
    case.model.zero_grad()


def test_what_it_sends_is_counted_beforehand(case: Case):
    for program, before, ran in zip(case.programs, case.before, case.ran, strict=True):
        traffic = count_traffic(program)
        assert ran["sent"] == sum(part.bytes for part in traffic.values())
        assert traffic["all-reduce"].messages - count_traffic(before)["all-reduce"].messages == 2 * (PLAN.ranks - 1)


def test_a_debugger_knows_where_it_is_and_for_whom_it_waits(case: Case):
    order = DependencyOrder(case.programs)
    for program in case.programs:
        labels = label_steps(case.recipe.graph, program)
        found = [number for number, step in enumerate(program.steps) if step.instruction.name == "largest"]
        assert len(found) == 2
        for number in found:
            assert labels[number].work
            assert labels[number].layer
            assert {peer for peer, _ in order.needs[program.rank][number]} == set(range(4)) - {program.rank}


def test_its_bytes_and_seconds_are_forecast(case: Case):
    machine = next(iter(MACHINES.values()))
    for program, before in zip(case.programs, case.before, strict=True):
        tally = build_tally(program, case.recipe.graph)
        longer, _ = simulate_memory(program, tally, PLAN, 0)
        shorter, _ = simulate_memory(before, build_tally(before, case.recipe.graph), PLAN, 0)
        assert longer.total - shorter.total == 2 * 8 * PLAN.ranks  # of both micro-batches, to the end of the step
        actions = build_step_actions(program, tally, machine, threads=1, recompute=False, offload=False)
        joins = [
            each.bytes
            for step, done in zip(program.steps, actions, strict=True)
            for each in done
            if step.instruction.name == "largest" and isinstance(each, JoinAllReduce)
        ]
        assert joins == [8 * PLAN.ranks] * 2
