"""Tiles in turn compute what one process does, and hold little meanwhile."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.bench.memory_limit import make_ranks_in_turn
from mpi4dl_nb.engines.errors import LossError, RankError
from mpi4dl_nb.engines.graph.model_graph import to_user_name
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program import offloader
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, to_plain_names
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

SHAPE = (2, 3, 48, 40)


class Net(nn.Module):
    """Strides, a skip, batch norm, a transposed convolution, max-pooling, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.up, self.drop = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Dropout(0.2)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.drop(self.up(self.block(x)) + x).mean((2, 3)))


TILED = {"split_size": 1, "spatial_size": 1, "precision": "float64"}
PLANS = {
    "2x2": Plan(**TILED, slice_method="2x2"),
    "uneven strips, two micro-batches": Plan(**TILED, slice_method="1x3", parts=2),
    "fused": Plan(**TILED, slice_method="3x2", halo_d2=True, fused_layers=2),
    "strips, then whole": Plan(**TILED | {"split_size": 2}, slice_method="3x1", parts=2),
    "two tilings, then whole": Plan(
        **TILED | {"split_size": 3, "spatial_size": 2}, num_spatial_parts=(4, 2), slice_method="vertical"
    ),
    "stages": Plan(**TILED | {"split_size": 3, "spatial_size": 0}, parts=2),
}


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1)


def make(plan: Plan, folder: Path, steps: int = 3, **rules):
    """The trainings of the ranks, a function that trains a step, its batches, and one process."""
    torch.manual_seed(0)
    model = Net()
    recipe = prepare(model, plan, SHAPE, device="cpu", **rules)
    one = ReferenceTraining(
        model,
        nn.CrossEntropyLoss(),
        recipe.optimiser,
        torch.float64,
        recipe.draws,
        plan.micro_batches,
        recipe.rules,
    )
    return *make_ranks_in_turn(recipe, folder), make_batches(recipe, 0, steps=steps), one


def compute_distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def collect_state(trainings: list[RankTraining]) -> dict[str, torch.Tensor]:
    named = {name: tensor for training in trainings for name, tensor in training.held.items()}
    return {to_user_name(name): tensor.detach().clone() for name, tensor in named.items()}


def assert_alike(trainings: list[RankTraining], one: ReferenceTraining) -> None:
    theirs = {**one.weights, **one.buffers}
    for key, ours in collect_state(trainings).items():
        assert compute_distance(ours.double(), theirs[key].detach().double()) <= 1e-10, key


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reads_files", [True, False], ids=["in the file", "brought back"])
@pytest.mark.parametrize("name", PLANS)
def test_three_steps_are_those_of_one_process(name: str, reads_files: bool, tmp_path):
    trainings, step, whole, one = make(PLANS[name], tmp_path)
    for training in trainings:
        training.offloader.reads_files = reads_files
    for batch in whole:
        step(batch)
        loss = one.step(batch)
        losses = [found for training in trainings for found in training.report.losses.values()]
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-10)
        for training in trainings:
            for key, ours in to_plain_names(training.copy_tensors()["gradients"]).items():
                theirs = one.gradients[key]
                assert compute_distance(ours, theirs) <= 1e-10 or theirs.norm() < 1e-12, key
    assert_alike(trainings, one)
    assert all(training.offloader.store.end_bytes > 0 for training in trainings)
    assert not list(tmp_path.iterdir())  # the file has no name


def test_all_gradients_are_clipped_together_and_the_scheduler_goes_on(tmp_path):
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    trainings, step, whole, one = make(PLANS["strips, then whole"], tmp_path, clip_norm=0.01, scheduler=scheduler)
    for batch in whole:
        step(batch)
        one.step(batch)
    assert_alike(trainings, one)


def test_while_a_tile_waits_it_holds_next_to_nothing(monkeypatch, tmp_path):
    held, put_away = [], RankTraining.offload

    def record_kept_bytes(training: RankTraining) -> None:
        put_away(training)
        lanes = training.worker.micro_batch_states.values()
        tensors = [t for lane in lanes for each in (lane.tensors, *lane._saved.values()) for t in each]
        started = [exchange for lane in lanes for exchange in lane._under_way.values()]
        tensors += [t for exchange in started for t in (*exchange.parts, *exchange.grads) if t is not None]
        tensors += [weight.grad for weight in training.weights.values() if weight.grad is not None]
        live = {s._cdata: s for t in tensors for s in [t.untyped_storage()]}
        for lane in lanes:
            kept = set(lane.offloader._stay)
            kept |= {
                lane.leaves[n].untyped_storage()._cdata
                for n in (lane.direction_program.kept_to_end - {lane.direction_program.prediction}) & lane.leaves.keys()
            }
            store = lane.offloader.store
            held.append(sum(s.nbytes() for key, s in live.items() if key not in kept and not store.has_storage(s)))

    monkeypatch.setattr(RankTraining, "offload", record_kept_bytes)
    _, step, whole, _ = make(PLANS["2x2"], tmp_path, steps=1)
    step(whole[0])
    assert held
    assert max(held) == 0


def test_a_loss_that_is_no_number_changes_nothing_and_training_goes_on(tmp_path):
    trainings, step, whole, one = make(PLANS["2x2"], tmp_path, steps=1)
    before = collect_state(trainings)
    with pytest.raises(LossError, match="No weight was changed"):
        step({**whole[0], "images": whole[0]["images"] * float("nan")})
    assert all(torch.equal(tensor, before[name]) for name, tensor in collect_state(trainings).items())
    step(whole[0])
    one.step(whole[0])
    assert_alike(trainings, one)


def test_a_full_disk_is_said_and_changes_nothing(monkeypatch, tmp_path):
    trainings, step, whole, one = make(PLANS["2x2"], tmp_path, steps=1)
    before, calls, reserve = collect_state(trainings), [], os.posix_fallocate

    def reserve_or_fail(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", reserve_or_fail)
    with pytest.raises(RankError, match=r"is full: .* more are to be stored"):
        step(whole[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in collect_state(trainings).items())
    step(whole[0])
    one.step(whole[0])
    assert_alike(trainings, one)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RankError, match=r"Nothing can be stored in .*nowhere"):
        make(PLANS["2x2"], tmp_path / "nowhere", steps=1)


ONE_STAGE = (
    "--model",
    "mpi4dl_nb.engines.models:chain",
    "--split-size",
    1,
    "--spatial-size",
    1,
    "--slice-method",
    "3x1",
)


def run_streaming(mpiexec, *flags):
    return mpiexec(1, "-m", "mpi4dl_nb.engines", "bench", "streaming", *ONE_STAGE, "--iterations", 1, *flags)


@pytest.mark.nightly
def test_the_line_of_the_benchmark(mpiexec):
    done = run_streaming(mpiexec, "--image-size", 96, "--num-layers", 3, "--dtype", "float64", "--memory-mb", 400)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["grad_rel"] < 1e-10
    assert line["time_ratio"] == pytest.approx(line["step_s"] / line["one_process_step_s"], rel=0.01)
    assert line["needs"] == pytest.approx(line["one_process_peak_bytes"] / (400 << 20), abs=0.01)
    assert line["stored_bytes"] > 0


@pytest.mark.nightly
def test_a_bound_that_is_too_small_is_said(mpiexec):
    done = run_streaming(mpiexec, "--image-size", 1024, "--memory-mb", 1)
    assert done.returncode == 1
    assert "1 MB are too little" in done.stderr
    assert "Use more tiles, or more memory." in done.stderr
