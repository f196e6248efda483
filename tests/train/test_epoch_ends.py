"""A checkpoint of an epoch's last step: the next epoch begins from it, and nothing is trained without a word."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import CheckpointError, PlanError
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.images.shard_reader import Sampler, SamplerState
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.training import fit_run as fits
from tests.chaos.training import Heard
from tests.train.test_bad_checkpoints import replace_bit, replace_fields
from tests.train.test_notebook_checkpoints import is_close, make_training
from tests.train.test_train_saves import run_on_one_rank
from tests.train.trainings import SHAPE


@pytest.fixture(scope="module")
def cluster():
    with Cluster(3, backend="loopback") as started:
        yield started


IMAGES = SyntheticImages(2 * SHAPE[0], SHAPE[2:], 5)  # two steps


@pytest.fixture(scope="module")
def straight(cluster, tmp_path_factory):
    """Three epochs saved after every step: a training, its history, its folder."""
    folder, training = tmp_path_factory.mktemp("saved"), make_training(cluster)
    history = training.fit(IMAGES, epochs=3, progress=False, seed=3, save=folder, save_every=1, keep=9)
    return training, history, folder


@pytest.mark.nightly
@pytest.mark.parametrize(("step", "epoch"), [(1, 0), (2, 1), (3, 1), (4, 2)])
def test_one_more_epoch_is_trained(cluster, straight, step: int, epoch: int):
    """Behind an epoch's last step the whole next one, else the rest of the one that has begun."""
    whole, folder = straight[1], straight[2]
    training, heard = make_training(cluster, seed=8), Heard()
    assert training.load(folder / f"0000{step}-step-{step}") == step
    history = training.fit(IMAGES, epochs=1, progress=False, monitor=heard)
    done = 2 - step % 2
    assert history.losses == pytest.approx(whole.losses[step : step + done], rel=1e-12)
    assert [(each.epoch, each.steps) for each in history.epochs] == [(epoch, done)]


def test_all_epochs_that_are_left_are_trained(cluster, straight):
    other = make_training(cluster, seed=8)
    other.load(straight[2] / "00002-step-2")
    history = other.fit(IMAGES, epochs=2, progress=False)
    assert history.losses == pytest.approx(straight[1].losses[2:], rel=1e-12)
    assert is_close(other.state_dict(), straight[0].state_dict())


def test_a_training_whose_epochs_are_all_done_goes_on_with_another_one(cluster, straight):
    training = make_training(cluster)
    training.load(straight[2])
    history = training.fit(IMAGES, progress=False)
    assert [(each.epoch, each.steps) for each in history.epochs] == [(3, 2)]


@pytest.mark.parametrize("epochs", [-1, 1.5, None, True])
def test_no_epoch_is_no_fit(cluster, straight, epochs):
    with pytest.raises(PlanError, match=r"epochs=.* must be a whole number of epochs still to come"):
        straight[0].fit(IMAGES, epochs=epochs, progress=False)


def test_no_epoch_that_is_left_is_said(cluster, straight):
    """As `epochs=60 - done` asks for at the end."""
    training = make_training(cluster)
    training.load(straight[2])
    with pytest.warns(UserWarning, match="Nothing was trained"):
        assert training.fit(IMAGES, epochs=np.int64(0), progress=False).losses == ()


@pytest.mark.nightly
def test_where_nothing_is_trained_that_is_said(cluster, straight, monkeypatch):
    """Such as where all images that were left of an epoch turn out to be bad."""
    training = make_training(cluster)
    monkeypatch.setattr(fits, "run", lambda *given: iter(()))
    with pytest.warns(UserWarning, match="Nothing was trained: no step was left"):
        training.fit(IMAGES, progress=False)


def test_an_epoch_that_was_longer_is_over():
    """A checkpoint of step 3 goes on with at most 2 steps in an epoch: none is left."""
    order = Sampler(total=8, count=2, steps=2)
    place = SamplerState(0, epoch=1, step=3, position=6)
    assert order.get_step(place) is None
    assert order.skip_finished_epoch(place) == SamplerState(0, epoch=2)
    assert order.skip_finished_epoch(SamplerState(0, epoch=1, step=1, position=2)) == SamplerState(
        0, epoch=1, step=1, position=2
    )
    assert order.skip_finished_epoch(SamplerState(0, epoch=1)) == SamplerState(0, epoch=1)


def test_the_command_counts_a_finished_epoch_as_done(tmp_path: Path, capsys):
    """An epoch of two steps, saved after each: one epoch is all, and of two the second is left."""
    run_on_one_rank("--save", tmp_path, "--save-every", 1)
    run_on_one_rank("--resume", tmp_path / "00002-step-2")
    assert "No steps are left to do: all epochs are done." in capsys.readouterr().out
    run_on_one_rank("--resume", tmp_path / "00002-step-2", "--num-epochs", 2)
    printed = capsys.readouterr().out
    assert printed.count("Epoch: 1 images per sec") == 2
    assert "No steps are left" not in printed


def test_the_command_says_which_checkpoint_was_damaged(tmp_path: Path, capsys):
    run_on_one_rank("--save", tmp_path, "--save-every", 1)
    replace_bit("model.safetensors")(tmp_path / "00002-step-2")
    run_on_one_rank("--resume", tmp_path)
    printed = capsys.readouterr().out
    assert f"{tmp_path}/00002-step-2 is damaged, and an older checkpoint is taken: the contents of model" in printed
    assert f"Resumed after 1 steps: {tmp_path}/00001-step-1" in printed


# ---- a notebook's folder


def test_a_notebook_is_warned_of_a_damaged_checkpoint(cluster, straight, tmp_path: Path):
    training: Training = make_training(cluster)
    for _ in range(2):
        training.save(tmp_path)
    replace_bit("model.safetensors")(list_checkpoints(tmp_path)[-1])
    with pytest.warns(UserWarning, match="00002-step-0 is damaged, and an older checkpoint is taken") as caught:
        assert training.load(tmp_path) == 0
    assert caught[0].filename == __file__


def test_a_refused_load_changes_nothing_in_the_notebook(cluster, straight, tmp_path: Path):
    training = make_training(cluster)
    training.fit(IMAGES, progress=False)
    before = training.state_dict(), training.steps, training.feed_state, training.plan, training.recipe
    path = training.save(tmp_path)
    replace_fields(feed={"images": "many"})(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="where the training is in its images"):
            training.load(path)
    assert is_close(training.state_dict(), before[0])
    assert (training.steps, training.feed_state, training.plan, training.recipe) == before[1:]
