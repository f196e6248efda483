"""Programs and the worker that runs them, one instruction at a time or all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.instructions import AllReduce, Compute, SumGradients, Update
from mpi4dl_nb.engines.program.program import Program
from mpi4dl_nb.engines.program.worker import Worker
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import cut_inputs
from tests.exact import make_whole_numbers


class Net(nn.Module):
    """Every kind of instruction: halos, moments, a skip over the joint, a global pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.third = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.norm(self.first(x)))
        x = self.third(torch.cat([self.second(skip), skip], dim=1))
        return self.head(x.mean((2, 3)))


PLANS = {
    "one rank": Plan(split_size=1, spatial_size=1, slice_method="1x1", precision="float64"),
    "spatial to the end": Plan(split_size=1, spatial_size=1, slice_method="2x2", precision="float64"),
    "a joint": Plan(split_size=2, spatial_size=1, slice_method="2x2", precision="float64"),
    "a repartition": Plan(
        split_size=3, spatial_size=2, slice_method=("2x2", "1x2"), balance=(1, 2, 1), precision="float64"
    ),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
BATCH = {"images": make_whole_numbers(2, 3, 8, 6), "labels": torch.tensor([1, 4])}


@cache
def prepare_recipe(plan: Plan) -> Recipe:
    torch.manual_seed(0)
    return prepare(Net().double(), plan, BATCH["images"].shape)


def run_on_ranks(plan: Plan, work: Callable[[LoopbackWorld], Any]) -> list[Any]:
    """What `work` gives on each rank. The recipe is made first, by one thread, so that all have the same weights."""
    prepare_recipe(plan)
    return run_ranks(plan.ranks, work)


def make(world: LoopbackWorld, plan: Plan, learning: bool = True) -> Worker:
    """A rank's worker with its own weights, at the start of a step."""
    plain = prepare_recipe(plan)
    program = compile_plan(plain.graph, plan)[world.rank]
    weights = {name: plain.state[name].clone().requires_grad_() for name in program.weights}
    buffers = {name: plain.state[name].clone() for name in program.buffers}
    optimiser = torch.optim.SGD(weights.values(), lr=0.1) if learning and weights else None
    worker = Worker(program, world, weights, buffers, optimiser)
    worker.restart(cut_inputs(program, BATCH))
    return worker


def copy_tensors(worker: Worker) -> dict[str, Tensor]:
    """All that a step leaves behind."""
    grads = {f"gradient of {name}": weight.grad for name, weight in worker.weights.items()}
    return {name: tensor.clone() for name, tensor in {**worker.weights, **worker.buffers, **grads}.items()}


# ---- stepping


@pytest.mark.sampled(2)
@every_plan
def test_stepping_equals_running(plan: Plan):
    def run(world: LoopbackWorld) -> tuple[float | None, dict[str, Tensor]]:
        worker = make(world, plan)
        return worker.run(cut_inputs(worker.program, BATCH)), copy_tensors(worker)

    def walk(world: LoopbackWorld) -> tuple[float | None, dict[str, Tensor]]:
        worker = make(world, plan)
        before = copy_weights(worker)
        for position, step in enumerate(worker.program.steps):
            assert (worker.position, worker.done) == (position, False)
            assert worker.step() == step
            updated = any(not torch.equal(before[name], worker.weights[name]) for name in before)
            assert updated == (position == len(worker.program.steps) - 1), "weights move at the update alone"
        assert worker.done
        return worker.loss, copy_tensors(worker)

    for (loss, ran), (walked_loss, walked) in zip(run_on_ranks(plan, run), run_on_ranks(plan, walk), strict=True):
        assert loss == walked_loss
        assert ran.keys() == walked.keys()
        assert all(torch.equal(ran[name], walked[name]) for name in ran)


def copy_weights(worker: Worker) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in worker.weights.items()}


@every_plan
def test_a_step_can_be_taken_again(plan: Plan):
    """Nothing of the first step is left in the second; only gradients are the caller's to forget."""

    def run_twice(world: LoopbackWorld) -> tuple[float | None, float | None]:
        worker = make(world, plan, learning=False)
        inputs = cut_inputs(worker.program, BATCH)
        first = worker.run(inputs)
        return first, worker.run(inputs)

    losses = run_on_ranks(plan, run_twice)
    assert all(first == second for first, second in losses)
    assert any(first is not None for first, _ in losses)


@every_plan
def test_every_instruction_is_an_event(plan: Plan):
    def run_worker(world: LoopbackWorld) -> Worker:
        worker = make(world, plan)
        worker.run(cut_inputs(worker.program, BATCH))
        return worker

    for rank, worker in enumerate(run_on_ranks(plan, run_worker)):
        told = [(event.rank, event.name, event.kind, event.phase) for event in worker.events]
        assert told == [
            (rank, step.instruction.name, step.instruction.kind, step.phase.value) for step in worker.program.steps
        ]
        times = [time for event in worker.events for time in (event.start_s, event.end_s)]
        assert times == sorted(times)


@every_plan
def test_the_loss_is_known_where_it_is_made_and_not_before(plan: Plan):
    def list_losses(world: LoopbackWorld) -> list[float | None]:
        worker, seen = make(world, plan), []
        while not worker.done:
            seen.append(worker.loss)
            worker.step()
        return [*seen, worker.loss]

    first_of_last_stage = plan.ranks - plan.grids[-1].tiles
    ran = run_on_ranks(plan, list_losses)
    assert all(seen[0] is None for seen in ran)
    assert [seen[-1] is not None for seen in ran] == [rank >= first_of_last_stage for rank in range(plan.ranks)]
    assert len({seen[-1] for seen in ran[first_of_last_stage:]}) == 1


# ---- peeking


def record_shapes(plan: Plan, look: str, rank: int = 0) -> list[tuple[int, tuple[int, ...] | None]]:
    """(position, shape of the value, None where it cannot be seen) before each step of one rank."""

    def peek_shape(worker: Worker) -> tuple[int, ...] | None:
        try:
            return tuple(worker.peek(look).shape)
        except PlanError:
            return None

    def watch(world: LoopbackWorld) -> list[tuple[int, tuple[int, ...] | None]]:
        worker = make(world, plan)
        found = [(0, peek_shape(worker))]
        while not worker.done:
            worker.step()
            found.append((worker.position, peek_shape(worker)))
        return found

    return run_on_ranks(plan, watch)[rank]


def compile_programs(plan: Plan) -> tuple[Program, ...]:
    return compile_plan(prepare_recipe(plan).graph, plan)


def test_peek_shows_weights_inputs_and_the_prediction():
    plan = PLANS["spatial to the end"]
    assert {shape for _, shape in record_shapes(plan, "model.first.weight")} == {(4, 3, 3, 3)}
    assert record_shapes(plan, "images")[0] == (0, (2, 3, 4, 3)), "a tile of 8 x 6 pixels on 2 x 2 ranks"
    prediction = prepare_recipe(plan).graph.prediction
    shapes = [shape for _, shape in record_shapes(plan, prediction)]
    assert shapes[0] is None
    assert shapes[-1] == (2, 5)


@pytest.mark.sampled(1)
@every_plan
def test_peek_shows_what_a_segment_hands_on_from_the_moment_it_is_made(plan: Plan):
    steps = compile_programs(plan)[0].steps
    forward = [(position, step.instruction) for position, step in enumerate(steps) if step.phase is Phase.FORWARD]
    names = [(position, name) for position, item in forward if isinstance(item, Compute) for name in item.outputs]
    names += [(position, item.target) for position, item in forward if isinstance(item, AllReduce)]
    assert names
    for made_at, name in names:
        shapes = [shape for _, shape in record_shapes(plan, name)]
        assert shapes[: made_at + 1] == [None] * (made_at + 1)
        assert shapes[made_at + 1] is not None


def test_peek_refuses_what_the_rank_does_not_hold():
    plan = PLANS["a joint"]

    def ask(world: LoopbackWorld, name: str) -> str:
        with pytest.raises(PlanError) as caught:
            make(world, plan).peek(name)
        return str(caught.value)

    for name in ("no such thing", "model.head.weight", prepare_recipe(plan).graph.prediction):
        told = run_on_ranks(plan, lambda world, name=name: ask(world, name) if world.rank == 1 else "")[1]
        assert told.startswith(f"rank 1 holds no value {name!r} now.")
        assert "images" in told


@pytest.mark.nightly
@every_plan
def test_released_values_are_gone(plan: Plan):
    """When a step is over, what segments handed on is gone: only loss, prediction and moments are kept."""
    for rank, program in enumerate(compile_programs(plan)):
        kept = {prepare_recipe(plan).graph.loss, prepare_recipe(plan).graph.prediction}
        kept.update(
            entry.moments
            for step in program.steps
            if isinstance(update := step.instruction, Update)
            for entry in update.statistics
        )
        handed_on = {name for item in program.forward if isinstance(item, Compute) for name in item.outputs}
        handed_on |= {item.target for item in program.forward if isinstance(item, Exchange) and item.window}
        for name in sorted(handed_on - kept):
            assert record_shapes(plan, name, rank)[-1][1] is None, f"{name} of rank {rank}"


# ---- the order of work


@every_plan
def test_forward_then_its_mirror_then_the_update(plan: Plan):
    for program in compile_programs(plan):
        phases = [phase for phase, _ in groupby(program.steps, key=lambda step: step.phase)]
        assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
        walked = {phase: [step.instruction for step in program.steps if step.phase is phase] for phase in Phase}
        sums = [item for item in walked[Phase.BACKWARD] if isinstance(item, SumGradients)]
        back = [item for item in walked[Phase.BACKWARD] if item not in sums]
        assert back == [i for i in reversed(walked[Phase.FORWARD]) if i.differentiable]
        assert isinstance(walked[Phase.UPDATE][-1], Update)
        assert not any(isinstance(item, Compute | Exchange | Update) for item in walked[Phase.UPDATE][:-1])
        assert {s.name for s in sums} == {i.name for i in walked[Phase.UPDATE] if isinstance(i, SumGradients)}
        assert list(program.forward) == walked[Phase.FORWARD]


@every_plan
def test_one_rank_seeds_the_loss(plan: Plan):
    ways = [way for program in compile_programs(plan) for way in program.direction_programs.values()]
    assert [way.seeds_loss for way in ways].count(True) == 1
    assert all(way.loss for way in ways if way.seeds_loss)


@every_plan
def test_every_message_that_is_sent_is_expected(plan: Plan):
    """The ranks' programs are compiled one by one; here they are held together."""
    sent, expected = Counter(), Counter()
    for rank, program in enumerate(compile_programs(plan)):
        for item in program.forward:
            if isinstance(item, Exchange):
                assert all(move.source == rank for move in item.sends)
                assert all(move.target == rank for move in item.receives)
                sent.update((item.tag, item.source, move) for move in item.sends)
                expected.update((item.tag, item.source, move) for move in item.receives)
    assert sent == expected
    assert bool(sent) == (plan.ranks > 1)


@every_plan
def test_the_ranks_of_a_group_sum_the_same_in_the_same_order(plan: Plan):
    sums: dict[tuple[int, ...], dict[int, list[str]]] = {}
    for rank, program in enumerate(compile_programs(plan)):
        for step in program.steps:
            if isinstance(item := step.instruction, AllReduce | SumGradients):
                assert rank in item.group
                sums.setdefault(item.group, {}).setdefault(rank, []).append(f"{item.name} {step.phase}")
    assert bool(sums) == (plan.grids[0].tiles > 1)
    for group, orders in sums.items():
        assert set(orders) == set(group)
        assert len({tuple(order) for order in orders.values()}) == 1


def test_an_exchange_reads_and_makes_what_it_says():
    """The kinds of work that a figure tells apart."""
    kinds = {
        name: {step.instruction.kind for program in compile_programs(plan) for step in program.steps}
        for name, plan in PLANS.items()
    }
    assert kinds["one rank"] == {"compute", "update"}
    assert kinds["spatial to the end"] == {"compute", "halo", "all-reduce", "update"}
    assert kinds["a joint"] == {"compute", "halo", "stage", "all-reduce", "update"}
    assert kinds["a repartition"] == kinds["a joint"]
