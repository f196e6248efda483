"""Saving without room, without leave or at the wrong time: a CheckpointError that says so; what was there stays."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.images.shard_reader import SamplerState
from mpi4dl_nb.engines.train import checkpoint_files as writers
from mpi4dl_nb.engines.train import checkpoint_folder as folders
from mpi4dl_nb.engines.train.checkpoint_files import TensorFile, check_writable
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints, lock_folder
from mpi4dl_nb.engines.train.checkpoint_load import open_checkpoint
from mpi4dl_nb.engines.train.checkpoint_save import make_rank_manager, save
from mpi4dl_nb.engines.train.checkpoint_state import decode_value, encode_value
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from tests.train.trainings import make_data, run_on_ranks


def get_save_error(recipe: Recipe, into: Path, feed: object = None, keep: int = 3) -> str:
    """What every rank says; and then they train on."""
    whole = make_data(recipe, 2)

    def work(world: LoopbackWorld) -> str:
        training = RankTraining(world, recipe)
        training.step(training.cut(whole[0]))
        with pytest.raises(CheckpointError) as caught:
            save(training, into, feed, keep)
        training.step(training.cut(whole[1]))
        assert training.worker.steps == 3
        return str(caught.value)

    said = set(run_ranks(recipe.plan.ranks, work))
    assert len(said) == 1
    return said.pop()


def is_untouched(before: Path, into: Path) -> bool:
    """The checkpoint that was there loads still, and nothing else is there."""
    return list_checkpoints(into) == [before] and [path.name for path in into.iterdir()] == [before.name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors", "checkpoint.json"])
def test_a_disk_that_becomes_full_while_it_is_written(file: str, recipe: Recipe, tmp_path: Path, monkeypatch):
    before = run_on_ranks(recipe, [], into=tmp_path).saved

    def raise_disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(TensorFile):
        def __init__(self, path: Path, specs: object) -> None:
            super().__init__(path, specs)
            if path.name == file:
                self.add = raise_disk_full

    monkeypatch.setattr(writers, "TensorFile", Full)
    if file == "checkpoint.json":
        monkeypatch.setattr(writers, "publish_draft", raise_disk_full)
    said = get_save_error(recipe, tmp_path)
    assert said.startswith(f"{tmp_path}: a checkpoint needs ")
    assert re.search(r"needs [\d.]+ (bytes|.B), but there are", said)
    assert "free (No space left on device)" in said
    assert is_untouched(before, tmp_path)
    open_checkpoint(before, recipe)


def test_too_little_space_is_known_before(recipe: Recipe, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 999, 999))
    said = get_save_error(recipe, tmp_path)
    assert "B, but there are 999 bytes free. " in said
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_the_system(recipe: Recipe, tmp_path: Path):
    """A real one: no file may be larger than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        said = get_save_error(recipe, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "(File too large)" in said
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_written_to(recipe: Recipe, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(CheckpointError, match=r"no checkpoint can be written here: .* Name a folder") as caught:
            check_writable(path)
        assert str(path) in str(caught.value)
    assert "no checkpoint can be written here" in get_save_error(recipe, tmp_path / "file")


def test_two_trainings_do_not_share_a_folder(recipe: Recipe, tmp_path: Path):
    with lock_folder(tmp_path):
        assert "another training is saving into this folder" in get_save_error(recipe, tmp_path)


def test_what_cannot_be_saved(recipe: Recipe, tmp_path: Path):
    assert "feed's state cannot be written as JSON" in get_save_error(recipe, tmp_path, feed={1j})
    assert "keep=0 must be at least 1" in get_save_error(recipe, tmp_path, keep=0)
    assert list(tmp_path.iterdir()) == []


def test_a_training_in_the_middle_of_a_step(recipe: Recipe, tmp_path: Path):
    def work(world: LoopbackWorld) -> None:
        training = RankTraining(world, recipe)
        training.start(training.cut(make_data(recipe, 1)[0]))
        if world.rank == 0:
            training.worker.step()
        with pytest.raises(CheckpointError, match="in the middle of a step"):
            save(training, tmp_path)

    run_ranks(recipe.plan.ranks, work)


def test_ranks_that_were_stopped_in_an_update(recipe: Recipe, tmp_path: Path):
    """As by a second interrupt: some have changed their weights and some have not."""

    def work(world: LoopbackWorld) -> None:
        training = RankTraining(world, recipe)
        training.worker.steps += world.rank == 1
        with pytest.raises(CheckpointError, match="stopped while they changed their weights, after 0 to 1 steps"):
            save(training, tmp_path)

    run_ranks(recipe.plan.ranks, work)
    assert list(tmp_path.iterdir()) == []


def test_what_no_checkpoint_holds():
    with pytest.raises(CheckpointError, match="SGD keeps a object, which a checkpoint does not hold"):
        encode_value({"x": object()}, "SGD")
    with pytest.raises(CheckpointError, match="SOAP keeps a tensor of 1,025 elements in a list"):
        encode_value({"Q": [torch.zeros(1025)]}, "SOAP")
    assert decode_value(encode_value({1: (float("inf"), torch.tensor([1.5, float("nan")]))}, ""))[1][0] == float("inf")


def test_a_name_that_the_disk_does_not_confirm(recipe: Recipe, tmp_path: Path, monkeypatch):
    """The new checkpoint is there, and so are the earlier ones, whatever `keep` is."""
    before = run_on_ranks(recipe, [], into=tmp_path).saved

    def raise_io_error(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(writers, "flush_to_disk", raise_io_error)
    message = get_save_error(recipe, tmp_path, keep=1)
    assert "-step-1 is written, but the disk did not confirm its name (Input/output error)" in message
    first, new = list_checkpoints(tmp_path)
    assert first == before
    open_checkpoint(new, recipe)


# ---- a folder over time


@pytest.mark.nightly
def test_the_last_ones_stay_and_leftovers_go(recipe: Recipe, tmp_path: Path):
    (tmp_path / ".partial-00001").mkdir()
    (tmp_path / ".partial-00001" / "model.safetensors").write_text("half")
    (tmp_path / "notes.txt").write_text("the user's own")
    whole = make_data(recipe, 1)[0]

    def work(world: LoopbackWorld) -> None:
        training = RankTraining(world, recipe)
        for _ in range(5):
            training.step(training.cut(whole))
            save(training, tmp_path, keep=2)

    run_ranks(recipe.plan.ranks, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00004-step-4", "00005-step-5", "notes.txt"]
    assert open_checkpoint(tmp_path, recipe).step == 5


@pytest.mark.nightly
def test_what_is_saved_last_is_the_newest_whatever_its_step(recipe: Recipe, tmp_path: Path):
    """Who goes back to an earlier checkpoint and trains on from there resumes there, not at the old end."""
    first = run_on_ranks(recipe, make_data(recipe, 1), into=tmp_path).saved
    run_on_ranks(recipe, make_data(recipe, 3), resume=first, into=tmp_path)
    run_on_ranks(recipe, [], resume=first, into=tmp_path)
    assert open_checkpoint(tmp_path, recipe).step == 1
    (tmp_path / "100000-step-9").mkdir()
    assert list_checkpoints(tmp_path)[-1].name == "100000-step-9"


def test_a_keeper_saves_when_it_is_time(recipe: Recipe, tmp_path: Path, capsys):
    whole = make_data(recipe, 1)[0]

    def work(world: LoopbackWorld, every: int | None) -> list[list[str]]:
        training = RankTraining(world, recipe)
        place = lambda: SamplerState(0, training.worker.steps).to_dict(4)  # noqa: E731
        keeper = make_rank_manager(training, tmp_path / str(every), place, every, keep=9)
        for step in range(5):
            training.step(training.cut(whole))
            keeper.save_after_step()
            if step == 2:
                keeper.save_after_epoch()
        keeper.save_at_end()
        keeper.save_at_end()
        return [path.name for path in list_checkpoints(tmp_path / str(every))]

    by_epoch, *_ = run_ranks(recipe.plan.ranks, partial(work, every=None))
    assert by_epoch == ["00001-step-3", "00002-step-5"]
    by_steps, *_ = run_ranks(recipe.plan.ranks, partial(work, every=2))
    assert by_steps == ["00001-step-2", "00002-step-4", "00003-step-5"]
    assert open_checkpoint(tmp_path / "2", recipe).feed == SamplerState(0, 6).to_dict(4)


def test_a_keeper_trains_on_where_the_disk_is_full(recipe: Recipe, tmp_path: Path, monkeypatch, capsys):
    whole = make_data(recipe, 1)[0]

    def work(world: LoopbackWorld) -> int:
        training = RankTraining(world, recipe)
        keeper = make_rank_manager(training, tmp_path, lambda: None, every=1)
        world.barrier()
        monkeypatch.setattr(writers, "get_free_bytes", lambda folder: 0)
        for _ in range(2):
            training.step(training.cut(whole))
            keeper.save_after_step()
        with pytest.raises(CheckpointError):
            keeper.save_at_end()
        return training.worker.steps

    assert set(run_ranks(recipe.plan.ranks, work)) == {3}
    told = capsys.readouterr().err.splitlines()
    assert [line[:22] for line in told] == ["Not saved after 1 step", "Not saved after 2 step"]
