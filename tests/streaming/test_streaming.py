"""Tiles in turn compute what one process does, and hold little meanwhile."""

from __future__ import annotations

import errno
import json
import os
from functools import partial

import pytest
import torch
from torch import nn

from engines.errors import LossError, PlanError, RankError
from engines.graph.model_graph import to_user_name
from engines.plan import Plan
from engines.program import offloader
from engines.program.streamed_training import StreamedTraining
from engines.train.oracle import ReferenceTraining
from engines.train.training import prepare
from engines.train.verify import make_batches

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


@pytest.fixture
def make(tmp_path):
    """A training in turn, its batches, and one process."""
    made = []

    def training(plan: Plan, steps: int = 3, reads_files: bool = True, **rules):
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
        made.append(StreamedTraining(recipe, tmp_path, threads=1))
        for shelf_ in made[0]._shelves:
            shelf_.reads_files = reads_files
        return made[0], make_batches(recipe, 0, steps=steps), one

    yield training
    for each in made:
        each.close()


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def state(training: StreamedTraining) -> dict[str, torch.Tensor]:
    named = {**training.weights, **training.buffers}
    return {to_user_name(name): tensor.detach().clone() for name, tensor in named.items()}


def assert_alike(training: StreamedTraining, one: ReferenceTraining) -> None:
    theirs = {**one.weights, **one.buffers}
    for key, ours in state(training).items():
        assert far(ours.double(), theirs[key].detach().double()) <= 1e-10, key


@pytest.mark.parametrize("reads_files", [True, False], ids=["in the file", "brought back"])
@pytest.mark.parametrize("name", PLANS)
def test_three_steps_are_those_of_one_process(name: str, reads_files: bool, make, tmp_path):
    training, whole, one = make(PLANS[name], reads_files=reads_files)
    for batch in whole:
        losses = training.step(training.cut(batch))
        loss = one.step(batch)
        assert sum(losses.values()) / len(losses) == pytest.approx(loss, rel=1e-10)
        gradients = training.gradients
        for key, theirs in one.gradients.items():
            assert far(gradients[key], theirs) <= 1e-10 or theirs.norm() < 1e-12, key
    assert_alike(training, one)
    assert training.store.written_bytes > training.store.end_bytes > 0
    assert not list(tmp_path.iterdir())  # the file has no name


def test_all_gradients_are_clipped_together_and_the_scheduler_goes_on(make):
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    training, whole, one = make(PLANS["strips, then whole"], clip_norm=0.01, scheduler=scheduler)
    for batch in whole:
        training.step(training.cut(batch))
        one.step(batch)
    assert_alike(training, one)


def test_while_a_tile_waits_it_holds_next_to_nothing(make):
    training, whole, _ = make(PLANS["2x2"])
    held = []
    for rank, shelf_ in enumerate(training._shelves):
        put_away = training._relay._mail.before_rest[rank]

        def watched(put_away=put_away, worker=training.workers[rank], shelf_=shelf_):
            put_away()
            lanes = worker.micro_batch_states.values()
            tensors = [t for lane in lanes for each in (lane.tensors, *lane._saved.values()) for t in each]
            live = {s._cdata: s for t in tensors for s in [t.untyped_storage()]}
            kept = shelf_._stay | shelf_._used
            kept |= {
                lane.leaves[n].untyped_storage()._cdata
                for lane in lanes
                for n in (lane.direction_program.kept_to_end - {lane.direction_program.prediction}) & lane.leaves.keys()
            }
            here = [s for key, s in live.items() if key not in kept and not training.store.has_storage(s)]
            held.append(sum(s.nbytes() for s in here))

        training._relay.register(rank, watched, training._relay._progress[rank])
    training.step(training.cut(whole[0]))
    assert held
    assert max(held) == 0


def test_a_loss_that_is_no_number_changes_nothing_and_training_goes_on(make):
    training, whole, one = make(PLANS["2x2"])
    before = state(training)
    broken = {**whole[0], "images": whole[0]["images"] * float("nan")}
    with pytest.raises(LossError, match="No weight was changed"):
        training.step(training.cut(broken))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(training).items())
    training.step(training.cut(whole[0]))
    one.step(whole[0])
    assert all(
        far(t.double(), one.weights[n].detach()) <= 1e-10 for n, t in state(training).items() if n in one.weights
    )


def test_a_full_disk_is_said_and_changes_nothing(make, monkeypatch):
    training, whole, one = make(PLANS["2x2"])
    before, calls, reserve = state(training), [], os.posix_fallocate

    def full(*arguments):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return reserve(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RankError, match=r"is full: .* more are to be stored"):
        training.step(training.cut(whole[0]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(training).items())
    training.step(training.cut(whole[0]))
    one.step(whole[0])
    assert all(
        far(t.double(), one.weights[n].detach()) <= 1e-10 for n, t in state(training).items() if n in one.weights
    )


def test_a_folder_that_is_not_there_is_named(tmp_path):
    recipe = prepare(Net(), PLANS["2x2"], SHAPE, device="cpu")
    with pytest.raises(RankError, match=r"Nothing can be stored in .*nowhere"):
        StreamedTraining(recipe, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"data_parallel": 2}, "data_parallel=2"),
        ({"split_size": 2, "local_dp": 2}, "local_dp=2"),
        ({"schedule": "zero_bubble"}, "schedule='zero_bubble'"),
        ({"sync_batchnorm": False}, "sync_batchnorm=False"),
        ({"overlap_halos": True}, "overlap_halos=True"),
    ],
)
def test_other_plans_are_refused(knobs: dict, said: str, tmp_path):
    plan = Plan(**(TILED | {"slice_method": "2x2"} | knobs))
    with pytest.raises(PlanError, match=f"{said}: where one process computes the ranks in turn"):
        StreamedTraining(prepare(Net(), plan, SHAPE, device="cpu"), tmp_path)


ONE_STAGE = ("--model", "engines.models:chain", "--split-size", 1, "--spatial-size", 1, "--slice-method", "3x1")


def streaming(mpiexec, *flags):
    return mpiexec(1, "-m", "engines", "bench", "streaming", *ONE_STAGE, "--iterations", 1, *flags)


@pytest.mark.nightly
def test_the_line_of_the_benchmark(mpiexec):
    done = streaming(mpiexec, "--image-size", 96, "--num-layers", 3, "--dtype", "float64", "--memory-mb", 400)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["grad_rel"] < 1e-10
    assert line["time_ratio"] == pytest.approx(line["step_s"] / line["one_process_step_s"], rel=0.01)
    assert line["needs"] == pytest.approx(line["one_process_peak_bytes"] / (400 << 20), abs=0.01)
    assert line["stored_bytes"] > 0


@pytest.mark.nightly
def test_a_bound_that_is_too_small_is_said(mpiexec):
    done = streaming(mpiexec, "--image-size", 1024, "--memory-mb", 1)
    assert done.returncode == 1
    assert "1 MB are too little" in done.stderr
    assert "Use more tiles, or more memory." in done.stderr
