"""Ranks of one thread hold weights, their gradients and the optimiser's state once, and train as ranks apart do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.comm.world import SubGroup, World
from mpi4dl_nb.engines.errors import LossError, RankError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.instructions import FiniteCheckAllReduce
from mpi4dl_nb.engines.program.rank_scheduler import RankScheduler
from mpi4dl_nb.engines.program.shared_state import PendingUpdate, SharedGradientBucket, SharedState
from mpi4dl_nb.engines.train.oracle import TrainingRecord
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining, cut_inputs
from mpi4dl_nb.engines.train.verify import compare_records, make_batches, record_rank_run

SHAPE = (4, 3, 16, 16)
BOTH = {"precision": "float64"}
PLANS = {
    "tiles": Plan(split_size=1, slice_method="2x2", **BOTH),
    "tiles, then whole": Plan(split_size=2, slice_method="1x3", num_spatial_parts=3, parts=2, **BOTH),
    "pipeline": Plan(split_size=3, spatial_size=0, parts=2, schedule="zero_bubble", **BOTH),
    "replicas": Plan(split_size=1, spatial_size=0, data_parallel=2, **BOTH),
    "both ways": Plan(split_size=2, spatial_size=0, bidirectional=True, **BOTH),
    "shared batch": Plan(split_size=2, slice_method="1x2", local_dp=2, **BOTH),
    "accumulated": Plan(split_size=2, slice_method="1x2", accumulate=2, **BOTH),
    "in a file": Plan(split_size=1, slice_method="2x2", offload_activations=True, checkpoint_activations=True, **BOTH),
}
OPTIMISERS = {
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01),
}


class Net(nn.Module):
    """Convolutions, a batch norm, a frozen weight, a constant buffer, and a weight that is read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))
        self.scale = nn.Parameter(torch.full((6, 1, 1), 1.5))
        self.frozen = nn.Parameter(torch.full((6, 1, 1), 0.5), requires_grad=False)
        self.register_buffer("table", torch.linspace(0, 1, 6).view(6, 1, 1))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * self.scale
        x = self.block(x) * self.frozen + self.table
        return self.head((x * self.scale).mean((2, 3)))


def make(plan: Plan, optimiser: Any = OPTIMISERS["momentum"], **rules: Any) -> tuple[Net, Recipe]:
    torch.manual_seed(0)
    model = Net()
    return model, prepare(model, plan, (SHAPE[0] // plan.parts, *SHAPE[1:]), optimiser=optimiser, device="cpu", **rules)


def run_in_turn(size: int, work: Callable[[World], Any]) -> list[Any]:
    scheduler = RankScheduler(size)
    return scheduler.run([partial(work, world) for world in scheduler.worlds])


def train(recipe: Recipe, steps: int, world: World) -> tuple[RankTraining, TrainingRecord]:
    training = RankTraining(world, recipe)
    return training, record_rank_run(training, map(training.cut, make_batches(recipe, 1, steps=steps)))


def count_storages(tensors: list[Tensor]) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_everything_is_there_once(name: str):
    _, recipe = make(PLANS[name], OPTIMISERS["Adam"])
    trainings = [training for training, _ in run_in_turn(recipe.plan.ranks, partial(train, recipe, 2))]
    weights = {key for training in trainings for key in training.weights}
    assert weights == recipe.graph.weights.keys()
    assert count_storages([each for training in trainings for each in training.weights.values()]) == len(weights)
    grads = [each.grad for training in trainings for each in training.weights.values() if each.grad is not None]
    assert count_storages(grads) == len(recipe.graph.trainable)
    tables = [tensor for training in trainings for key, tensor in training.buffers.items() if "table" in key]
    assert count_storages(tables) == 1
    made = [each.worker.optimiser_step.optimiser for each in trainings if each.worker.optimiser_step.optimiser]
    assert sum(len(optimiser.state) for optimiser in made) == len(recipe.graph.trainable)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", PLANS)
def test_five_steps_are_those_of_one_process_and_of_ranks_in_threads(name: str, optimiser: str):
    model, recipe = make(PLANS[name], OPTIMISERS[optimiser])
    ranks = recipe.plan.ranks
    records = [record for _, record in run_in_turn(ranks, partial(train, recipe, 5))]
    told = compare_records(recipe, model, nn.CrossEntropyLoss(), make_batches(recipe, 1, steps=5), records)
    assert told["ok"], told
    for ours, (_, theirs) in zip(records, run_ranks(ranks, partial(train, recipe, 5)), strict=True):
        assert ours.losses == theirs.losses
        pairs = [*zip(ours.gradients, theirs.gradients, strict=True)]
        for these, those in (*pairs, (ours.weights, theirs.weights), (ours.buffers, theirs.buffers)):
            assert these.keys() == those.keys()
            assert all(torch.equal(these[key], those[key]) for key in these)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["tiles, then whole", "pipeline", "replicas"])
def test_clipping_and_a_scheduler_apply_once(name: str):
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    model, recipe = make(PLANS[name], clip_norm=0.01, scheduler=scheduler)
    records = [record for _, record in run_in_turn(recipe.plan.ranks, partial(train, recipe, 3))]
    told = compare_records(recipe, model, nn.CrossEntropyLoss(), make_batches(recipe, 1, steps=3), records)
    assert told["ok"], told


def test_a_step_that_overflows_is_skipped_once():
    _, recipe = make(Plan(split_size=2, slice_method="1x2", precision="float16"))

    def train_scaled(scale: float, world: World) -> tuple[float, dict[str, Tensor]]:
        training, _ = train(replace(recipe, loss_scale=scale), 1, world)
        return training.worker.optimiser_step.scale, training.copy_tensors()["weights"]

    start = {name: tensor.to(torch.float32) for name, tensor in recipe.state.items()}
    for scale, skips in ((2.0**8, False), (2.0**100, True)):
        for after, weights in run_in_turn(recipe.plan.ranks, partial(train_scaled, scale)):
            assert after == (scale / 2 if skips else scale)
            moves = [name for name in weights if not torch.equal(weights[name], start[name])]
            assert bool(moves) is not skips


class GivesNewMemory(torch.optim.SGD):
    """An optimiser that replaces the memory of its weights."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data = weight.data.clone()


def test_an_optimiser_may_give_its_weights_new_memory():
    model, recipe = make(PLANS["replicas"], partial(GivesNewMemory, lr=0.05))
    found = run_in_turn(recipe.plan.ranks, partial(train, recipe, 3))
    batches, records = make_batches(recipe, 1, steps=3), [record for _, record in found]
    assert compare_records(recipe, model, nn.CrossEntropyLoss(), batches, records)["ok"]
    weights = [weight for training, _ in found for weight in training.weights.values()]
    assert count_storages(weights) == len(recipe.graph.weights)


def add_nothing(self: Tensor, other: object) -> Tensor:
    return self


def run_always(pending: PendingUpdate, agreed: Tensor) -> None:
    pending._step(agreed)


def get_own_tensor(shared: SharedState, name: str, make: Callable[[], Tensor]) -> Tensor:
    return shared.tensors.setdefault(f"{name} {len(shared.tensors)}", make())


FAULTS = {
    "updated by each rank": (PendingUpdate, "run", run_always),
    "not updated": (PendingUpdate, "run", lambda pending, agreed: None),
    "one rank's gradients": (SharedGradientBucket, "_run_rounds", lambda bucket: iter([bucket._exchange((), 0, True)])),
    "not shared": (SharedState, "get_tensor", get_own_tensor),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_faults(fault: str, monkeypatch: pytest.MonkeyPatch):
    with Cluster(4, backend="in_turn") as cluster:
        training = Training(Net(), PLANS["tiles"], cluster, SHAPE)
        assert training.verify()["ok"]
        monkeypatch.setattr(*FAULTS[fault])
        monkeypatch.setattr(SharedState, "restore_memory", lambda shared, weights: None)
        assert not training.verify()["ok"]


def test_replicas_that_train_for_themselves_share_nothing():
    def share(world: World) -> bool:
        return RankTraining(SubGroup(world, (world.rank,)), recipe).shared is not None

    _, recipe = make(Plan(split_size=1, spatial_size=0, **BOTH))
    assert run_in_turn(2, share) == [False, False]


def fail_before_update(host: Any, name: str, inputs: Any) -> None:
    """Run a step until the update; then rank 1 fails, while others wait or have added their gradients."""
    training = host.get_kept(RankTraining)[name]
    training.start(inputs)
    while not isinstance(training.program.steps[training.worker.position].instruction, FiniteCheckAllReduce):
        training.advance()
    if host.world.rank == 1:
        raise ValueError("it fails")
    training.advance()


def cut(training: Training, batch: Mapping[str, Tensor]) -> list[tuple[Any]]:
    return [(cut_inputs(program, batch),) for program in training.programs]


def get_steps(host: Any, name: str) -> list[float]:
    """Return the step counts in the state of the rank's optimiser, by weight."""
    optimiser = host.get_kept(RankTraining)[name].worker.optimiser_step.optimiser
    return [float(state["step"]) for state in optimiser.state.values()] if optimiser else []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiles", "both ways"])
def test_failed_steps_and_checkpoints_go_on(name: str, tmp_path: Path):
    """The same steps in threads, with neither a failure nor a checkpoint, end with the same weights."""
    plan = PLANS[name]
    batches = make_batches(make(plan)[1], 1, steps=4)
    found = []
    for backend in ("loopback", "in_turn"):
        with Cluster(plan.ranks, backend=backend) as cluster:
            torch.manual_seed(0)
            training = Training(Net(), plan, cluster, SHAPE, optimiser=OPTIMISERS["Adam"])
            for number, batch in enumerate(batches):
                if backend == "in_turn" and number == 1:
                    with pytest.raises(LossError):
                        training.step(batch["images"] * torch.nan, batch["labels"])
                    with pytest.raises(RankError):
                        cluster.call(fail_before_update, training.name, per_rank=cut(training, batch))
                    cluster.heal()
                if backend == "in_turn" and number == 2:
                    training.save(tmp_path)
                    training.step(**batch)
                    training.load(tmp_path)
                if backend == "in_turn" and number == 3:
                    training.close()
                    training = Training(Net(), plan, cluster, SHAPE, optimiser=OPTIMISERS["Adam"])
                    training.load(tmp_path)
                    training.step(**batches[2])
                    assert len(list(training.stepping(**batch))) > plan.ranks
                else:
                    training.step(**batch)
            counts = [count for counts in cluster.call(get_steps, training.name) for count in counts]
            found.append((training.state_dict(), training.predict(batches[0]["images"]), set(counts)))
            assert training.verify()["ok"]
    (state, prediction, counts), (in_turn, predicted, own_counts) = found
    torch.testing.assert_close(in_turn, state, rtol=1e-10, atol=1e-12)  # with all cores, threads with one each
    torch.testing.assert_close(predicted, prediction, rtol=1e-10, atol=1e-12)
    assert counts == own_counts == {4.0}
