"""Checkpoints as a notebook uses them: saved under one plan, loaded under another, in the middle of an epoch too."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import CheckpointError, PlanError
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.engines.train.interrupts import Interrupts, StoppedError
from mpi4dl_nb.training import fit_run
from tests.train.trainings import PLANS, SHAPE, Weighted, make_data, make_net, make_recipe

FIVE, THREE = replace(PLANS["tiles and a stage"]), replace(PLANS["stages"])
ADAM = partial(torch.optim.Adam, lr=1e-2)


@pytest.fixture(scope="module")
def clusters():
    with Cluster(5, backend="loopback") as five, Cluster(3, backend="loopback") as three:
        yield five, three


def make_training(cluster: Cluster, seed: int = 0, **more) -> Training:
    torch.manual_seed(4)
    return Training(
        make_net(seed), FIVE if cluster.n == 5 else THREE, cluster, SHAPE, optimiser=ADAM, device="cpu", **more
    )


def is_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(
        torch.allclose(mine[name], tensor, rtol=1e-12, atol=1e-14) for name, tensor in theirs.items()
    )


@pytest.mark.nightly
def test_a_training_moves_to_another_cluster(clusters, tmp_path: Path):
    """Its own model's weights are others; what it draws goes on too."""
    five, three = clusters
    batches = [(batch["images"], batch["labels"]) for batch in make_data(make_recipe(FIVE), 4)]
    one = make_training(five, loss=Weighted())
    losses = [one.step(*batch) for batch in batches[:2]]
    path = one.save(tmp_path)
    losses += [one.step(*batch) for batch in batches[2:]]
    other = make_training(three, seed=8, loss=Weighted())
    assert other.load(tmp_path) == 2
    assert [other.step(*batch) for batch in batches[2:]] == pytest.approx(losses[2:], rel=1e-12)
    assert is_close(other.state_dict(), one.state_dict())
    assert is_close(other.loss_state_dict(), one.loss_state_dict())
    assert one.loss_state_dict().keys() == Weighted().state_dict().keys()
    assert one.loss_state_dict()["temperature"] != 1.5
    again = make_training(three, loss=Weighted())
    again.load(path)
    stored = safetensors.torch.load_file(path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in again.state_dict().items())
    assert [again.step(*batch) for batch in batches[2:]] == pytest.approx(losses[2:], rel=1e-12)


def test_what_was_made_of_the_plan_before_a_load_is_refused_after_it(clusters, tmp_path: Path):
    _, three = clusters
    training = make_training(three)
    batch, *_ = [(batch["images"], batch["labels"]) for batch in make_data(make_recipe(THREE), 1)]
    path, _ = training.save(tmp_path), training.step(*batch)
    stepping = training.stepping(*batch)
    stepping.instruction()
    training.load(path)
    assert training.reports == []
    stepping.restart()
    training.step(*batch)
    other = PLANS["tiles to the loss"]
    training.load(path, other)
    with pytest.raises(PlanError, match=r"none was run yet, or since load\(\)"):
        training.timeline()
    with pytest.raises(PlanError, match=r"another plan, .*\. This step is of the old one"):
        stepping.restart()
    training.stepping(*batch).finish()
    assert training.timeline().plan == other


def test_fit_saves_and_goes_on_in_mid_epoch(clusters, tmp_path: Path):
    five, three = clusters
    images = SyntheticImages(4 * SHAPE[0], SHAPE[2:], 5)
    straight = make_training(five).fit(images, epochs=2, progress=False, seed=3)
    one = make_training(five)
    one.fit(images, epochs=2, progress=False, seed=3, save=tmp_path, save_every=3, keep=9)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["00001-step-3", "00002-step-6", "00003-step-8"]
    other = make_training(three, seed=8)
    assert other.load(tmp_path / "00001-step-3") == 3
    history = other.fit(images, epochs=2, progress=False)
    assert history.losses == pytest.approx(straight.losses[3:], rel=1e-12)
    by_epoch = make_training(three)
    by_epoch.fit(images, epochs=2, progress=False, save=tmp_path / "epochs", keep=1)
    assert [path.name for path in list_checkpoints(tmp_path / "epochs")] == ["00002-step-8"]


def test_an_interrupt_waits_for_the_step_and_saves(clusters, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(fit_run, "_LAST_S", 60.0)  # on a busy machine too, the step comes to its end
    five, _ = clusters
    training = make_training(five)
    whole = [(batch["images"], batch["labels"]) for batch in make_data(make_recipe(FIVE), 3)]

    def yield_batches():
        yield whole[0]
        os.kill(os.getpid(), signal.SIGINT)
        yield whole[1]
        yield whole[2]

    class Once:
        def __iter__(self):
            return yield_batches()

    with pytest.raises(StoppedError, match=r"Stopped by SIGINT after 2 steps\. Saved as .*00001-step-2: go on"):
        training.fit(Once(), progress=False, save=tmp_path)
    assert training.load(tmp_path) == 2


def test_a_second_interrupt_is_not_held_back():
    with Interrupts() as asked:
        assert asked() == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert asked() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_cannot_be_loaded_or_saved_leaves_the_training_as_it_was(clusters, tmp_path: Path):
    five, three = clusters
    training = make_training(five)
    before = training.state_dict()
    with pytest.raises(CheckpointError, match="there is no checkpoint in this folder"):
        training.load(tmp_path)
    (tmp_path / "file").write_text("")
    for work in (training.save, partial(training.fit, [], progress=False, save=tmp_path / "file")):
        with pytest.raises(CheckpointError, match="no checkpoint can be written here"):
            work(*([tmp_path / "file"] if work == training.save else []))
    sgd = Training(make_net(), THREE, three, SHAPE, device="cpu")
    with pytest.raises(CheckpointError, match="the optimiser of this checkpoint is Adam, and here it is SGD"):
        sgd.load(training.save(tmp_path / "adam"))
    assert is_close(training.state_dict(), before)
