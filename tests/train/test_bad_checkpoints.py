"""What is damaged or of another training: a CheckpointError that says so, and nothing has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.train.checkpoint_files import serialise_manifest
from mpi4dl_nb.engines.train.checkpoint_load import load, open_checkpoint, optimiser_state
from mpi4dl_nb.engines.train.recipe import Recipe
from mpi4dl_nb.engines.train.training import RankTraining
from tests.train.trainings import PLANS, Net, Weighted, copy_state, is_same, make_net, make_recipe, run_on_ranks

PLAN = PLANS["stages"]


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / stored.name))


def get_refusal(recipe: Recipe, path: Path) -> str:
    """What every rank says, having changed nothing."""

    def work(world: LoopbackWorld) -> str:
        training = RankTraining(world, recipe)
        before = copy_state(training)
        with pytest.raises(CheckpointError) as caught:
            load(training, path)
        assert is_same(before, copy_state(training)), "what was refused has changed the training"
        return str(caught.value)

    said = set(run_ranks(recipe.plan.ranks, work))
    assert len(said) == 1
    return said.pop()


# ---- damaged


def cut(file: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / file, (path / file).stat().st_size - 5)


def replace_bit(file: str) -> Callable[[Path], None]:
    def work(path: Path) -> None:
        content = bytearray((path / file).read_bytes())
        content[len(content) // 2] ^= 1
        (path / file).write_bytes(content)

    return work


def replace_fields(**fields: object) -> Callable[[Path], None]:
    """A manifest that is sealed again: as if another program had written it."""

    def work(path: Path) -> None:
        manifest = json.loads((path / "checkpoint.json").read_text())
        del manifest["crc32"]
        (path / "checkpoint.json").write_text(serialise_manifest({**manifest, **fields}))

    return work


DAMAGES = {
    "weights cut short": (cut("model.safetensors"), r"damaged: model.safetensors has [\d,]+ bytes instead of"),
    "a bit of the weights": (replace_bit("model.safetensors"), "contents of model.safetensors are not those that were"),
    "a bit of the state": (replace_bit("training.safetensors"), "contents of training.safetensors are not those that"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors cannot be read: No such"),
    "JSON cut short": (cut("checkpoint.json"), "checkpoint.json is no JSON"),
    "a changed number": (
        lambda path: (path / "checkpoint.json").write_text(
            (path / "checkpoint.json").read_text().replace('"seed": 7', '"seed": 8')
        ),
        "contents of checkpoint.json are not those that were written",
    ),
    "not JSON": (lambda path: (path / "checkpoint.json").write_bytes(b"\x80\x04}q\x00."), "is no JSON"),
    "other JSON": (lambda path: (path / "checkpoint.json").write_text("[1]"), "not that of a checkpoint of this"),
    "a newer version": (
        replace_fields(format=2, package="9.0"),
        r"has format 2 \(written by version 9.0\).*reads format 1",
    ),
    "no seed": (replace_fields(seed=None), "does not say what 'seed' is"),
    "a file elsewhere": (
        replace_fields(files={"../weights": {"bytes": 0, "crc32": 0}}),
        "'../weights' is no file of its own",
    ),
    "a device": (replace_fields(files={"/dev/zero": {"bytes": 0, "crc32": 0}}), "'/dev/zero' is no file of its own"),
    "a link to a device": (
        lambda path: (
            (path / "z").symlink_to("/dev/zero"),
            replace_fields(files={"z": {"bytes": 0, "crc32": 0}})(path),
        ),
        "'z' is no file of its own",
    ),
    "a pipe": (
        lambda path: (os.mkfifo(path / "pipe"), replace_fields(files={"pipe": {"bytes": 0, "crc32": 0}})(path)),
        "pipe is no regular file",
    ),
    "a device as JSON": (
        lambda path: ((path / "checkpoint.json").unlink(), (path / "checkpoint.json").symlink_to("/dev/zero")),
        "checkpoint.json is no regular file of its own, but a link",
    ),
    "JSON nested without end": (
        lambda path: (path / "checkpoint.json").write_text('{"a":' * 100_000),
        "checkpoint.json is no JSON",
    ),
    "a number beyond all numbers": (
        lambda path: (path / "checkpoint.json").write_text('{"step": 1e999, "crc32": 0}'),
        "checkpoint.json is no JSON",
    ),
    "files that are no list": (replace_fields(files={"model.safetensors": 3}), "damaged: TypeError"),
    "a state without options": (
        replace_fields(optimiser={"kind": "Adam", "options": [], "weights": {"model.x": {"options": 0}}}),
        "damaged: IndexError",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_not_loaded(damage: str, recipe: Recipe, copied: Path):
    spoil, said = DAMAGES[damage]
    spoil(copied)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_checkpoint(copied, recipe)
    assert str(copied) in str(caught.value)


def test_no_rank_changes_where_a_checkpoint_is_damaged(recipe: Recipe, copied: Path):
    replace_bit("training.safetensors")(copied)
    assert "are not those that were written" in get_refusal(recipe, copied)


def test_a_file_that_is_no_safetensors(recipe: Recipe, copied: Path):
    """Its sum is right, as it was written so."""
    (copied / "model.safetensors").write_bytes(b"text")
    replace_fields(files={"model.safetensors": {"bytes": 4, "crc32": 999008199}})(copied)
    with pytest.raises(CheckpointError, match="damaged: SafetensorError"):
        open_checkpoint(copied, recipe)


def test_a_pickle_in_place_of_the_weights_is_never_run(recipe: Recipe, copied: Path, tmp_path: Path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"weight": Trap()}, copied / "model.safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint(copied, recipe)
    assert not (tmp_path / "sprung").exists()


def test_places_without_a_checkpoint(recipe: Recipe, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / ".partial-00001").mkdir()
    for path, said in (
        (tmp_path / "nowhere", "there is no such folder"),
        (tmp_path / "file", "there is no such folder"),
        (tmp_path, "no checkpoint in this folder"),
    ):
        with pytest.raises(CheckpointError, match=said) as caught:
            open_checkpoint(path, recipe)
        assert str(path) in str(caught.value)


# ---- of another training


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head[2], self.more = nn.Linear(6, 9), nn.Linear(1, 1)
        del self.unused


def test_another_model(stored: Path):
    said = get_refusal(make_recipe(PLAN, model=Wider()), stored)
    assert "of another model: of its 18 tensors 14 are those of the 18 here; " in said
    assert "2 not in it: more.bias, more.weight; 2 not here: unused.bias, unused.weight; " in said
    assert "2 of another shape: head.2.bias (5,) instead of (9,), head.2.weight (5, 6) instead of (9, 6)" in said


def test_another_optimiser_or_scheduler(stored: Path, recipe: Recipe):
    assert "the optimiser of this checkpoint is Adam, and here it is SGD" in get_refusal(
        make_recipe(PLAN, "sgd"), stored
    )
    for other, name in (("none", "none"), ("cosine", "CosineAnnealingWarmRestarts")):
        with pytest.raises(
            CheckpointError, match=f"scheduler of this checkpoint is MultiStepLR, and here it is {name}"
        ):
            open_checkpoint(stored, make_recipe(PLAN, scheduler=other))
    with pytest.raises(CheckpointError, match="its optimiser is Adam, and this one is SGD"):
        optimiser_state(stored, make_net(), torch.optim.SGD(make_net().parameters()))


@pytest.mark.nightly
def test_other_weights_are_trained(stored: Path):
    model = make_net()
    model.head[2].requires_grad_(False)
    with pytest.raises(
        CheckpointError, match=r"trains 8 weights, and this training 6: 2 not trained here: model.head.2"
    ):
        open_checkpoint(stored, make_recipe(PLAN, model=model))


def test_other_groups_of_the_optimiser(recipe: Recipe, stored: Path, tmp_path: Path):
    def make_separate_groups(weights):
        return torch.optim.Adam([{"params": [w], "lr": 0.1 + n} for n, w in enumerate(weights)], amsgrad=True)

    several = replace(make_recipe(PLANS["one rank"]), optimiser=make_separate_groups)
    said = get_refusal(several, stored)
    assert "the scheduler has 1 learning rates, but there are 11 groups" in said
    path = run_on_ranks(replace(several, scheduler=None), [], into=tmp_path).saved
    assert "were in groups of the optimiser with other options" in get_refusal(
        make_recipe(PLANS["one rank"], scheduler="none"), path
    )


def test_a_loss_without_weights(stored: Path):
    with pytest.raises(CheckpointError, match=r"it has no loss\.safetensors"):
        open_checkpoint(stored, make_recipe(PLAN, loss=Weighted()))


def test_an_optimiser_of_weights_that_are_not_the_models(stored: Path):
    with pytest.raises(CheckpointError, match=r"moves a tensor \(2,\) that is no weight of the model"):
        optimiser_state(stored, make_net(), torch.optim.Adam([nn.Parameter(torch.zeros(2))]))


# ---- of strangers


def with_other_state(part: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    """A manifest with other words of the scheduler or the optimiser: sealed, as if it were whole."""

    def work(path: Path) -> None:
        manifest = json.loads((path / "checkpoint.json").read_text())
        told = manifest["scheduler"]["state"] if part == "scheduler" else manifest["optimiser"]["options"][0]
        change(told)
        replace_fields(**{part: manifest[part]})(path)

    return work


STRANGE = {
    "a method": ("scheduler", lambda state: state.update(get_lr=0.1), "keeps no 'get_lr'"),
    "a method, a text": ("scheduler", lambda state: state.update(step="now"), "keeps no 'step'"),
    "the optimiser": ("scheduler", lambda state: state.update(optimizer=None), "keeps no 'optimizer'"),
    "a text for a number": ("scheduler", lambda state: state.update(last_epoch="3"), "last_epoch is of type str"),
    "a dict for a list": ("scheduler", lambda state: state.update(base_lrs={"0": 1}), "base_lrs is of type dict"),
    "texts in a list": ("scheduler", lambda state: state.update(_last_lr=["0.1"]), r"_last_lr\[0\] is of type str"),
    "a text for a rate": ("optimiser", lambda options: options.update(lr="0.1"), "lr is of type str"),
    "a list for a rate": ("optimiser", lambda options: options.update(lr=[0.1]), "lr is of type list"),
    "nothing for a rate": ("optimiser", lambda options: options.update(lr=None), "lr is of type NoneType"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", STRANGE)
def test_the_state_of_optimiser_and_scheduler_must_be_like_that_of_fresh_ones(how: str, copied: Path):
    part, change, words = STRANGE[how]
    with_other_state(part, change)(copied)
    said = get_refusal(make_recipe(PLAN), copied)
    assert re.search(words, said), said
    assert "damaged" in said


WELCOME = {
    "a switch left open": ("optimiser", lambda options: options.update(nesterov=None)),
    "what a scheduler sets later": ("scheduler", lambda state: state.update(best_loss=0.1)),
}


@pytest.mark.parametrize("how", WELCOME)
def test_what_does_no_harm_is_loaded(how: str, copied: Path):
    part, change = WELCOME[how]
    with_other_state(part, change)(copied)
    recipe = make_recipe(PLAN)
    run_ranks(recipe.plan.ranks, lambda world: load(RankTraining(world, recipe), copied))
