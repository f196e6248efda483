"""A folder goes on from its newest whole checkpoint and says which was damaged; want of means is no damage."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from mpi4dl_nb.engines.cli.predict_command import load_weights
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import CheckpointError, DamagedError, UnreadableError
from mpi4dl_nb.engines.train import checkpoint_files as manifests
from mpi4dl_nb.engines.train import checkpoint_reader as stored_files
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.engines.train.checkpoint_load import load, open_checkpoint, optimiser_state, scheduler_state
from mpi4dl_nb.engines.train.checkpoint_reader import Checkpoint
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from tests.train.test_bad_checkpoints import cut, get_refusal, replace_bit, replace_fields
from tests.train.trainings import OPTIMISERS, PLANS, make_data, make_net, make_recipe, run_on_ranks


@pytest.fixture(scope="module")
def saved(recipe: Recipe, tmp_path_factory) -> Path:
    """Three checkpoints: after one step, two and three."""
    folder, last = tmp_path_factory.mktemp("saved"), None
    for whole in make_data(recipe, 3):
        last = run_on_ranks(recipe, [whole], resume=last, into=folder).saved
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "saved"))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (cut("model.safetensors"), "model.safetensors has"),
    "a bit": (replace_bit("training.safetensors"), "contents of training.safetensors are not those that were written"),
    "a missing file": (
        lambda path: (path / "training.safetensors").unlink(),
        "training.safetensors cannot be read: No",
    ),
    "no JSON": (cut("checkpoint.json"), "checkpoint.json is no JSON"),
    "missing JSON": (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json cannot be read: No such file"),
    "other JSON": (lambda path: (path / "checkpoint.json").write_text("{}"), "not that of a checkpoint"),
    "a file that is not listed": (lambda path: (path / "model.safetensors").rename(path / "m"), "model.safetensors"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_folder_goes_on_from_the_newest_that_is_whole(how: str, recipe: Recipe, folder: Path):
    damage, why = DAMAGES[how]
    damage(folder / "00003-step-3")
    found = open_checkpoint(folder, recipe)
    assert found.path == folder / "00002-step-2"
    (text,) = found.passed_over
    assert text.startswith(f"{folder}/00003-step-3 is damaged, and an older checkpoint is taken: ")
    assert why in text
    with pytest.raises(DamagedError, match="00003-step-3: this checkpoint is damaged"):
        open_checkpoint(folder / "00003-step-3", recipe)


def test_every_rank_goes_on_from_the_same_one_and_knows_why(recipe: Recipe, folder: Path):
    replace_bit("model.safetensors")(folder / "00003-step-3")

    def work(world: LoopbackWorld) -> tuple[int, int, tuple[str, ...]]:
        training = RankTraining(world, recipe)
        found = load(training, folder)
        return found.step, training.updates, found.passed_over

    told = run_ranks(recipe.plan.ranks, work)
    assert [each[:2] for each in told] == [(2, 2)] * recipe.plan.ranks
    assert len(set(told)) == 1
    assert "00003-step-3 is damaged" in told[0][2][0]


def test_where_none_is_whole_each_is_listed(recipe: Recipe, folder: Path):
    for path, (damage, _) in zip(list_checkpoints(folder), DAMAGES.values(), strict=False):
        damage(path)
    said = get_refusal(recipe, folder)
    assert said.startswith(f"{folder}: none of its 3 checkpoints is whole.")
    for text in (
        "00003-step-3: training.safetensors cannot be read",
        "00002-step-2: the contents of training",
        "00001-step-1: model",
    ):
        assert f"\n{text}" in said


def test_another_format_is_no_damage(recipe: Recipe, folder: Path):
    replace_fields(format=2)(folder / "00003-step-3")
    with pytest.raises(CheckpointError, match="has format 2") as caught:
        open_checkpoint(folder, recipe)
    assert not isinstance(caught.value, DamagedError)


def test_plain_pytorch_and_predictions_are_warned(folder: Path):
    cut("training.safetensors")(folder / "00003-step-3")
    model = make_net().double()
    optimiser = OPTIMISERS["adam"]([weight for name, weight in model.named_parameters() if name != "scale"])
    for work in (
        lambda: float(next(iter(optimiser_state(folder, model, optimiser)["state"].values()))["step"]),
        lambda: scheduler_state(folder)["last_epoch"],
    ):
        with pytest.warns(UserWarning, match="00003-step-3 is damaged, and an older checkpoint is taken"):
            assert work() == 2
    load_weights(model, folder)  # they are whole
    cut("model.safetensors")(folder / "00003-step-3")
    with pytest.warns(UserWarning, match="00003-step-3 is damaged, and an older checkpoint is taken"):
        load_weights(model, folder)


def test_a_link_that_leads_out_of_the_folder_is_not_followed(recipe: Recipe, folder: Path, tmp_path: Path):
    (folder / "00003-step-3").rename(tmp_path / "elsewhere")
    (folder / "00003-step-3").symlink_to(tmp_path / "elsewhere")
    found = open_checkpoint(folder, recipe)
    assert found.step == 2
    assert "it is a link that leads out of its folder" in found.passed_over[0]
    assert open_checkpoint(folder / "00003-step-3", recipe).step == 3  # named by itself, it was given


# ---- want of means


def make_os_failure(number: int) -> Callable[..., object]:
    def fail(*given: object) -> object:
        raise OSError(number, os.strerror(number), "it")

    return fail


def raise_memory_error(*given: object) -> object:
    raise MemoryError


def make_library_failure(text: str) -> Callable[..., object]:
    def fail(*given: object) -> object:
        raise RuntimeError(text)

    return fail


WANTS: dict[str, tuple[Callable[..., object], str, str]] = {
    "permission": (make_os_failure(errno.EACCES), "Permission denied", "chmod u"),
    "right": (make_os_failure(errno.EPERM), "Operation not permitted", "chmod u"),
    "handles": (make_os_failure(errno.EMFILE), "Too many open files", "ulimit -n"),
    "handles of all": (make_os_failure(errno.ENFILE), "Too many open files in system", "ulimit -n"),
    "memory": (make_os_failure(errno.ENOMEM), "Cannot allocate memory", "more memory"),
    "Python's memory": (raise_memory_error, "Cannot allocate memory", "more memory"),
    "PyTorch's memory": (
        make_library_failure("DefaultCPUAllocator: can't allocate memory"),
        "Cannot allocate memory",
        "more memory",
    ),
    "PyTorch's handles": (
        make_library_failure("unable to open file <x>: Too many open files (24)"),
        "Too many open files",
        "ulimit",
    ),
    "a failing disk": (make_os_failure(errno.EIO), "Input/output error", "the system's log"),
    "a lost connection": (make_os_failure(errno.ESTALE), os.strerror(errno.ESTALE), "Try again"),
}
READS = ((manifests, "read_bounded"), (stored_files, "open_regular"), (stored_files, "safe_open"))


@pytest.mark.parametrize("module, name", READS)  # noqa: PT006
@pytest.mark.parametrize("how", WANTS)
def test_want_of_means_is_reported_as_what_it_is(how, module, name, recipe, folder, monkeypatch):
    """It says nothing of the checkpoint, and no older one is taken."""
    fail, words, mend = WANTS[how]
    if (module, name) != READS[2] and "PyTorch" in how:
        pytest.skip("files are read without PyTorch")
    monkeypatch.setattr(module, name, fail)
    for path in (folder, folder / "00003-step-3"):
        with pytest.raises(UnreadableError, match=r"00003-step-3: .*cannot be read now: ") as caught:
            open_checkpoint(path, recipe)
        said = str(caught.value)
        assert words in said
        assert mend in said
        assert "which may be whole" in said
        assert "damaged" not in said


def test_every_rank_reports_it_and_nothing_has_changed(recipe: Recipe, folder: Path, monkeypatch):
    monkeypatch.setattr(stored_files, "safe_open", make_os_failure(errno.EACCES))
    said = get_refusal(recipe, folder)
    assert "Permission denied" in said
    assert "damaged" not in said


def test_a_folder_that_cannot_be_listed(recipe: Recipe, folder: Path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", make_os_failure(errno.EACCES))
    with pytest.raises(UnreadableError, match="the list of its checkpoints cannot be read now: Permission denied"):
        open_checkpoint(folder, recipe)


@contextmanager
def use_up_handles(left: int) -> Iterator[None]:
    """So many more files can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        for handle in taken[-left:] if left else []:
            os.close(handle)
        del taken[len(taken) - left :]
        yield
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1])
def test_real_handles_run_out(left: int, recipe: Recipe, folder: Path):
    """With one left the library says that there is no such file, or that PyTorch cannot open it."""
    whole = open_checkpoint(folder, recipe)
    with use_up_handles(left), pytest.raises(UnreadableError, match="Too many open files") as caught:
        whole.read_shapes("model.safetensors")
    assert "damaged" not in str(caught.value)
    with use_up_handles(0), pytest.raises(UnreadableError, match="Too many open files"):
        Checkpoint.open(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_real_permission(recipe: Recipe, folder: Path):
    (folder / "00003-step-3" / "model.safetensors").chmod(0)
    with pytest.raises(UnreadableError, match="Permission denied"):
        open_checkpoint(folder, recipe)


def test_nothing_of_the_random_numbers_is_drawn(recipe: Recipe, folder: Path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    open_checkpoint(folder, recipe)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_save_that_runs_out_of_handles_does_not_send_to_another_folder(tmp_path: Path, monkeypatch):
    recipe = make_recipe(PLANS["one rank"])
    monkeypatch.setattr(os, "fsync", make_os_failure(errno.EMFILE))
    with pytest.raises(CheckpointError, match=r"Too many open files.*ulimit -n"):
        run_on_ranks(recipe, [], into=tmp_path)
