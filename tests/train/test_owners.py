"""Checkpoints belong to a training: one folder serves two of them, and no training takes or removes another's."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import CheckpointError, DamagedError
from mpi4dl_nb.engines.train.checkpoint_files import TRAINING, read_manifest, serialise_manifest
from mpi4dl_nb.engines.train.checkpoint_folder import MANIFEST, list_checkpoints, lock_folder
from mpi4dl_nb.engines.train.checkpoint_load import optimiser_state, scheduler_state
from mpi4dl_nb.training.recovery import FailureRecovery, FitPosition

PLAN = Plan(split_size=2, spatial_size=0, precision="float64")
SHAPE = (2, 3, 6, 6)
BATCH = torch.ones(SHAPE, dtype=torch.float64), torch.tensor([0, 2])
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, backend="loopback") as found:
        yield found


def make_training(cluster: Cluster, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return Training(model.double(), PLAN, cluster, SHAPE, optimiser=SGD)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def train_two(cluster: Cluster, folder: Path) -> tuple[Training, Training]:
    """Two trainings that save in turn, the first one after two steps and the second one after one; each keeps one."""
    first, second = make_training(cluster, 1), make_training(cluster, 2)
    for training, steps in ((first, 1), (second, 1), (first, 1)):
        for _ in range(steps):
            training.step(*BATCH)
        training.save(folder, keep=1)
    return first, second


def is_equal(one: Training, other: Training) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


def test_saving_removes_no_checkpoint_of_another_training(cluster, tmp_path):
    train_two(cluster, tmp_path)
    assert list_names(tmp_path) == ["00002-step-1", "00003-step-2"]


def test_a_folder_gives_a_training_its_own_and_says_so(cluster, tmp_path):
    first, second = train_two(cluster, tmp_path)
    wanted = make_training(cluster)
    assert wanted.load(tmp_path / "00002-step-1") == 1
    second.step(*BATCH)
    with pytest.warns(UserWarning, match="00003-step-2 is newer, but of another training: .*00002-step-1 is of this"):
        assert second.load(tmp_path) == 1
    assert is_equal(second, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first.load(tmp_path) == 2  # the newest one is its own: there is nothing to say


def test_a_new_training_has_to_choose_among_several(cluster, tmp_path):
    _, second = train_two(cluster, tmp_path)
    new = make_training(cluster, 3)
    before = new.state_dict()
    with pytest.raises(
        CheckpointError, match=r"it has the checkpoints of 2 trainings\. Name the one to load"
    ) as caught:
        new.load(tmp_path)
    assert [line.partition(" (of")[0] for line in str(caught.value).splitlines()[1:]] == [
        str(tmp_path / "00003-step-2"),
        str(tmp_path / "00002-step-1"),
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in new.state_dict().items())
    for read in (scheduler_state, lambda path: optimiser_state(path, new.model, SGD(new.model.parameters()))):
        with pytest.raises(CheckpointError, match="of 2 trainings"):
            read(tmp_path)
    # Chosen by its name, the training goes on as that one: it finds, and removes, what that one has saved.
    assert new.load(tmp_path / "00002-step-1") == 1
    assert is_equal(new, second)
    new.step(*BATCH)
    new.save(tmp_path, keep=1)
    assert list_names(tmp_path) == ["00003-step-2", "00004-step-2"]


def test_a_script_that_is_started_again_goes_on_from_its_folder(cluster, tmp_path):
    before = make_training(cluster, 1)
    for _ in range(2):
        before.step(*BATCH)
        before.save(tmp_path)
    again = make_training(cluster, 2)
    assert again.load(tmp_path) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.fit([BATCH], progress=False, save=tmp_path, keep=2)
    assert list_names(tmp_path) == ["00002-step-2", "00003-step-3"]
    assert before.load(tmp_path) == 3


def test_fit_says_what_saving_leaves_there(cluster, tmp_path):
    train_two(cluster, tmp_path)
    new = make_training(cluster)
    with pytest.warns(UserWarning, match="has 2 checkpoints of 2 other trainings: saving leaves them there"):
        new.fit([BATCH], progress=False, save=tmp_path, keep=1)
    assert list_names(tmp_path) == ["00002-step-1", "00003-step-2", "00004-step-1"]


def update_manifest(path: Path, **changes: object) -> None:
    """Write the manifest of a checkpoint anew, with a right checksum; a value of None takes the field away."""
    manifest = {**read_manifest(path), **changes}
    (path / MANIFEST).write_text(serialise_manifest({n: v for n, v in manifest.items() if n not in changes or v}))


def test_checkpoints_of_earlier_versions_count_as_one_training(cluster, tmp_path):
    old = make_training(cluster, 1)
    for _ in range(2):
        old.step(*BATCH)
        update_manifest(old.save(tmp_path), **{TRAINING: None})
    assert all(TRAINING not in json.loads((path / MANIFEST).read_text()) for path in list_checkpoints(tmp_path))
    new = make_training(cluster, 2)
    assert new.load(tmp_path) == 2
    assert is_equal(new, old)
    new.save(tmp_path, keep=2)
    assert list_names(tmp_path) == ["00002-step-2", "00003-step-2"]
    assert make_training(cluster, 3).load(tmp_path) == 2


def test_an_id_is_a_text(cluster, tmp_path):
    training = make_training(cluster)
    path = training.save(tmp_path)
    update_manifest(path, **{TRAINING: 3})
    with pytest.raises(DamagedError, match="does not say which training it is of"):
        training.load(path)


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(cluster, tmp_path):
    training = make_training(cluster)
    paths = []
    for _ in range(2):
        training.step(*BATCH)
        paths.append(training.save(tmp_path))
    paths[0].rename(tmp_path / "00002-step-3")
    paths[1].rename(paths[0])
    with pytest.raises(DamagedError, match=r"00001-step-1: this .* its name says 1 steps, but checkpoint.json 2"):
        training.load(paths[0])
    with pytest.raises(DamagedError, match="none of its 2 checkpoints is whole"):
        training.load(tmp_path)
    shutil.copytree(paths[0], tmp_path / "best")  # any other name says nothing
    assert training.load(tmp_path / "best") == 2


@pytest.mark.parametrize("swap", ["steps", "trainings", "branches"])
def test_healing_takes_only_what_this_training_has_saved(cluster, tmp_path, swap):
    """Under the name of the newest checkpoint lies another whole one; the one before is taken."""
    training, other = make_training(cluster, 1), make_training(cluster, 2)
    healing = FailureRecovery(training, False, lambda: None)
    saved, weights = [], []
    for steps in range(1, 3):
        training.step(*BATCH)
        saved.append(training.save(tmp_path / "saved"))
        weights.append(training.state_dict())
        healing.record_checkpoint(FitPosition(steps, 0, (), None, is_over=False), saved[-1])
    if swap == "branches":
        other.load(saved[0])  # it goes on as this training, but with other data
    for _ in range(training.steps - other.steps):
        other.step(BATCH[0] * 2, BATCH[1])
    shutil.rmtree(saved[1])
    if swap == "steps":
        shutil.copytree(saved[0], saved[1])
    else:
        other.save(tmp_path / "other").rename(saved[1])
    healing._load(training.plan)
    assert healing.mark.steps == training.steps == 1
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in training.state_dict().items())
    words = {"steps": "its name says 2 steps", "trainings": "one of other training", "branches": "one of other files"}
    (text,) = healing._passed_over
    assert words[swap] in text


def test_a_reader_cannot_block_a_save(cluster, tmp_path):
    training = make_training(cluster)
    training.save(tmp_path)
    handle = os.open(tmp_path, os.O_RDONLY)  # all that a user needs for it is the right to read the folder
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        training.save(tmp_path)
    finally:
        os.close(handle)
    with lock_folder(tmp_path):
        (lock,) = (path for path in tmp_path.iterdir() if path.is_file())
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600  # others cannot open it, and so not lock it
    assert list_names(tmp_path) == ["00001-step-0", "00002-step-0"]


def test_a_lock_that_is_left_behind_is_taken(cluster, tmp_path):
    (tmp_path / ".lock").touch(0o600)  # of a training that was killed
    with (
        lock_folder(tmp_path),
        pytest.raises(CheckpointError, match="another training is saving"),
        lock_folder(tmp_path),
    ):
        pass
    assert list_names(tmp_path) == []


def test_a_lock_that_goes_while_it_is_opened_is_taken_anew(tmp_path, monkeypatch):
    """A lock on a file that is no longer in the folder would keep nobody out."""
    plain, taken = fcntl.flock, []

    def remove_first(handle: int, how: int) -> None:
        if not taken:
            (tmp_path / ".lock").unlink()  # the training that had it is done with saving
        taken.append(handle)
        plain(handle, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with (
        lock_folder(tmp_path),
        pytest.raises(CheckpointError, match="another training is saving"),
        lock_folder(tmp_path),
    ):
        pass
