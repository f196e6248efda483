"""What strangers may have put into a checkpoint that is whole by its sums: refused before anything changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.errors import CheckpointError
from mpi4dl_nb.engines.images.shard_reader import SamplerState
from mpi4dl_nb.engines.train.checkpoint_load import check_fits_recipe, load, optimiser_state
from mpi4dl_nb.engines.train.checkpoint_reader import STATE, Checkpoint
from mpi4dl_nb.engines.train.checkpoint_state import WeightState, encode_value, make_optimiser_state
from mpi4dl_nb.engines.train.training import RankTraining
from tests.fuzz.checkpoints import update_manifest
from tests.train.test_bad_checkpoints import get_refusal
from tests.train.trainings import (
    OPTIMISERS,
    PLANS,
    compute_distance,
    make_data,
    make_net,
    make_recipe,
    run_on_ranks,
)

KEPT = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
WEIGHT = "model.head.2.weight"  # (5, 6)


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / stored.name))


def replace_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = STATE) -> None:
    """The tensors of a file, changed, and sealed as if they had been written so."""
    tensors = safetensors.torch.load_file(path / file)
    change(tensors)
    safetensors.torch.save_file(tensors, path / file)
    update_manifest(path)


TENSORS: dict[str, tuple[str, Callable[[torch.Tensor], Any], str]] = {
    "another shape": ("exp_avg", lambda t: torch.zeros(6, 5), r"exp_avg has the shape \(6, 5\) instead of \(5, 6\)"),
    "one that would be spread out": ("exp_avg", lambda t: torch.zeros(1, 6), r"the shape \(1, 6\) instead of \(5, 6\)"),
    "more than its weight": ("exp_avg_sq", lambda t: torch.zeros(60, 60), r"the shape \(60, 60\) instead of \(5, 6\)"),
    "whole numbers": ("exp_avg", lambda t: t.long(), r"exp_avg is of type torch.int64, and here of type torch.float64"),
    "complex": ("exp_avg_sq", lambda t: t.to(torch.complex64), "is of type torch.complex64"),
    "steps of each element": ("step", lambda t: torch.ones(5, 6), "step is of type Tensor, and here of type Tensor"),
    "steps backward": ("step", lambda t: torch.tensor(-1.0), "step is -1.0, which is no number of steps"),
    "no number of steps": ("step", lambda t: torch.tensor(float("nan")), "step is nan"),
    "endless steps": ("step", lambda t: torch.tensor(float("inf")), "step is inf"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", TENSORS)
def test_an_optimisers_tensors_are_those_of_its_weights(how: str, copied: Path):
    key, made, words = TENSORS[how]
    name = f"{WEIGHT}/{key}"
    replace_tensors(copied, lambda tensors: tensors.update({name: made(tensors[name])}))
    said = get_refusal(make_recipe(PLANS["stages"]), copied)
    assert words.replace("\\", "") in said.replace("\\", "")
    assert f"{name}" in said


def test_a_tensor_of_no_weight(copied: Path):
    replace_tensors(copied, lambda tensors: tensors.update(more=torch.zeros(1 << 20)))
    assert "1 of no weight: more" in get_refusal(make_recipe(PLANS["stages"]), copied)


def test_weights_are_numbers_with_fractions(copied: Path):
    replace_tensors(copied, lambda t: t.update({"head.2.bias": t["head.2.bias"].long()}), "model.safetensors")
    assert "head.2.bias (5,) of torch.int64 instead of (5,)" in get_refusal(make_recipe(PLANS["stages"]), copied)


def test_a_text_for_a_number(copied: Path):
    replace_tensors(copied, lambda tensors: tensors.pop(f"{WEIGHT}/step"))
    update_manifest(copied, lambda m: get_weight_entry(m).update(values={"step": "3"}, tensors=KEPT))
    assert "step is of type str, and here of type Tensor" in get_refusal(make_recipe(PLANS["stages"]), copied)


def get_weight_entry(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["optimiser"]["weights"][WEIGHT]


def get_options(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["optimiser"]["options"][0]


def get_scheduler_state(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["scheduler"]["state"]


def make_tuple(*values: float) -> dict[str, Any]:
    return {"python": "tuple", "value": list(values)}


def make_counter(key: Any, value: Any) -> dict[str, Any]:
    return {"python": "Counter", "value": [[key, value]]}


VALUES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown key": (
        lambda m: get_weight_entry(m)["values"].update(more=1),
        f"{WEIGHT}/more is none of what it keeps",
    ),
    "the last options": (lambda m: get_weight_entry(m).update(options=-1), "there are no options -1"),
    "one beta": (lambda m: get_options(m).update(betas=make_tuple(0.9)), "Adam refuses the options of"),
    "a beta of one": (
        lambda m: get_options(m).update(betas=make_tuple(1.0, 0.9)),
        "Invalid beta parameter at index 0: 1.0",
    ),
    "a rate that is none": (lambda m: get_options(m).update(lr={"python": "float", "value": "nan"}), "Adam.lr is nan"),
    "a rate beyond floats": (lambda m: get_options(m).update(lr=10**400), "Adam.lr is 1000"),
    "a beta beyond one": (
        lambda m: get_options(m).update(betas=make_tuple(1.5, 0.9)),
        "Invalid beta parameter at index 0: 1.5",
    ),
    "a rate below none": (lambda m: get_options(m).update(lr=-0.1), "Adam refuses the options of"),
    "a decay below none": (lambda m: get_options(m).update(weight_decay=-1.0), "Invalid weight_decay value: -1.0"),
    "half a switch": (lambda m: get_options(m).update(amsgrad=0.5), "Adam.amsgrad is 0.5, which is neither on nor off"),
    "a schedule to rates below none": (
        lambda m: get_scheduler_state(m).update(gamma=-2.0, milestones=make_counter(2, 1)),
        "MultiStepLR steps from this state to options that Adam refuses: Invalid learning rate",
    ),
    "other weights": (lambda m: get_options(m).update(params=[0]), "'params' is no option"),
    "for captured graphs": (lambda m: get_options(m).update(capturable=True), "with these options cannot step"),
    "steps to come": (lambda m: get_scheduler_state(m).update(last_epoch=9), "has made 9 steps, and the training 1"),
    "steps below none": (lambda m: get_scheduler_state(m).update(last_epoch=-5), "has made -5 steps"),
    "milestones that are texts": (
        lambda m: get_scheduler_state(m).update(milestones=make_counter(2, "x")),
        r"milestones[2] is of type",
    ),
    "a factor beyond floats": (lambda m: get_scheduler_state(m).update(gamma=1e400), "no JSON"),
    "steps below none of the training": (lambda m: m.update(step=-1), "what 'step' is, but -1"),
    "too many steps": (lambda m: m.update(step=1 << 70), "what 'step' is"),
    "a seed beyond all": (lambda m: m.update(seed=1 << 70), "what 'seed' is"),
    "true for a seed": (lambda m: m.update(seed=True), "what 'seed' is, but True"),
    "a scale of nothing": (lambda m: m.update(loss_scale=0.0), "what 'loss_scale' is, but 0.0"),
    "a negative scale": (lambda m: m.update(loss_scale=-2.0), "what 'loss_scale' is, but -2.0"),
    "good steps that never end": (lambda m: m.update(loss_scale=2.0, good_steps=2000), "it counts 2000 good steps"),
    "negative good steps": (lambda m: m.update(good_steps=-1), "what 'good_steps' is, but -1"),
    "no scale": (lambda m: m.pop("loss_scale"), "what 'loss_scale' is"),
    "a feed that is a text": (lambda m: m.update(feed="start"), "where the training is in its images is no dict"),
    "behind the last image": (
        lambda m: m.update(feed=SamplerState(0, 0, 1, 9).to_dict(8)),
        "no step 1 at image 9 of 8",
    ),
    "before the first step": (
        lambda m: m.update(feed=SamplerState(0, 0, -1, 3).to_dict(8)),
        "no step -1 at image 3 of 8",
    ),
    "an epoch before the first": (lambda m: m.update(feed=SamplerState(0, -1).to_dict(8)), "in epoch -1"),
    "an image twice": (
        lambda m: m.update(feed=SamplerState(0, skipped=(3, 3)).to_dict(8)),
        "left out are none of the 8",
    ),
    "an image by name": (lambda m: m.update(feed={**SamplerState(0).to_dict(8), "skipped": ["a"]}), "'a' is no number"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", VALUES)
def test_values_that_would_fail_later_are_refused(how: str, copied: Path):
    change, words = VALUES[how]
    try:
        update_manifest(copied, change)
    except ValueError:  # such as no JSON has
        (copied / "checkpoint.json").write_text('{"gamma": 1e999}')
    assert words in get_refusal(make_recipe(PLANS["stages"]), copied)


def test_a_step_that_overflows_is_found(copied: Path):
    update_manifest(
        copied,
        lambda m: get_scheduler_state(m).update(gamma=1e300, milestones={"python": "Counter", "value": [[2, 9]]}),
    )
    assert "MultiStepLR cannot step from this state: OverflowError" in get_refusal(make_recipe(PLANS["stages"]), copied)


def test_plain_pytorch_is_not_given_it_either(copied: Path):
    replace_tensors(copied, lambda tensors: tensors.update({f"{WEIGHT}/exp_avg": torch.zeros(6, 5)}))
    model = make_net().double()
    trained = [weight for name, weight in model.named_parameters() if name != "scale"]
    with pytest.raises(CheckpointError, match=r"exp_avg has the shape \(6, 5\)"):
        optimiser_state(copied, model, OPTIMISERS["adam"](trained))


REFUSED = {
    "Adadelta": {"rho": 1.5}, "Adafactor": {"eps": (-1.0, 1e-3)}, "Adagrad": {"lr_decay": -1.0},
    "Adam": {"betas": (0.9, 1.5)}, "AdamW": {"betas": (1.5, 0.9)}, "Adamax": {"eps": -1.0}, "ASGD": {"lr": -1.0},
    "NAdam": {"momentum_decay": -1.0}, "RAdam": {"betas": (-0.5, 0.9)}, "RMSprop": {"alpha": -0.5},
    "Rprop": {"etas": (1.5, 1.2)}, "SGD": {"nesterov": True, "dampening": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_class_of_an_optimiser_refuses_is_refused_in_a_checkpoint(name: str):
    """The class itself is the judge; options that it accepts, its own in particular, are loaded."""
    more = {"momentum": 0.9} if name == "SGD" else {}
    fresh = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))], lr=1e-3, **more)
    saved = {key: encode_value(value, name) for key, value in fresh.param_groups[0].items() if key != "params"}
    names, wrong = (
        {id(fresh.param_groups[0]["params"][0]): "w"},
        {k: encode_value(v, k) for k, v in REFUSED[name].items()},
    )
    state = {"w": WeightState(saved, {}, ())}
    assert make_optimiser_state(fresh, names, state, torch.empty)["param_groups"] == fresh.state_dict()["param_groups"]
    state = {"w": WeightState({**saved, **wrong}, {}, ())}
    with pytest.raises(ValueError, match=f"{name} refuses the options of w: "):
        make_optimiser_state(fresh, names, state, torch.empty)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Adadelta", "Adafactor", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "Rprop"])
def test_every_optimiser_of_pytorch_goes_on_from_its_own_state(name: str, tmp_path: Path):
    """Also those that keep numbers, or parts of a weight's sides, or look at their numbers as they step."""
    made = partial(getattr(torch.optim, name), lr=1e-3)
    recipe = replace(make_recipe(PLANS["one rank"], scheduler="cosine"), optimiser=made)
    whole = make_data(recipe, 3)
    path = run_on_ranks(recipe, whole[:2], into=tmp_path).saved
    straight = run_on_ranks(recipe, whole)
    again = run_on_ranks(recipe, whole[2:], resume=path)
    assert again.losses == straight.losses[2:]
    assert compute_distance(again.tensors, straight.tensors) == 0


class Sparing(torch.optim.Optimizer):
    """Keeps something from its second step on only, of another size than its weight, and looks at numbers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                kept = self.state[weight]
                if weight.grad is None or weight.grad.norm().item() < 0:
                    continue
                kept["count"] = kept.get("count", 0) + 1
                if kept["count"] > 1:
                    kept["norms"] = weight.grad.flatten(1).norm(dim=1) if weight.dim() > 1 else weight.grad.abs()
                weight.sub_(weight.grad, alpha=group["lr"])


def test_an_optimiser_of_others_goes_on(tmp_path: Path):
    recipe = replace(make_recipe(PLANS["one rank"], scheduler="none"), optimiser=Sparing)
    whole = make_data(recipe, 3)
    path = run_on_ranks(recipe, whole[:2], into=tmp_path).saved
    assert run_on_ranks(recipe, whole[2:], resume=path).losses == run_on_ranks(recipe, whole).losses[2:]


class Remembering(torch.optim.Optimizer):
    """Keeps the last 50 gradients of each weight."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.grad is not None):
                last = self.state[weight].get("last", weight.new_zeros(50, *weight.shape))
                self.state[weight]["last"] = torch.cat((last[1:], weight.grad[None]))
                weight.sub_(self.state[weight]["last"].sum(0), alpha=group["lr"])


def keep_means(optimiser: torch.optim.Optimizer, *_: object) -> None:
    for weight, state in optimiser.state.items():
        state["ema"] = 0.9 * state.get("ema", torch.zeros_like(weight)) + 0.1 * weight.detach()


def make_hooked(params: Any) -> torch.optim.Optimizer:
    optimiser = torch.optim.Adam(params, lr=1e-3)
    optimiser.register_step_post_hook(keep_means)
    return optimiser


@pytest.mark.parametrize("optimiser", [Remembering, make_hooked])
def test_state_beyond_an_optimisers_own_is_loaded(optimiser: Any, tmp_path: Path):
    """More than the weight has, or what a hook keeps: what was saved without complaint is no damage."""
    recipe = replace(make_recipe(PLANS["one rank"], scheduler="none"), optimiser=optimiser)
    whole = make_data(recipe, 3)
    path = run_on_ranks(recipe, whole[:2], into=tmp_path).saved
    assert run_on_ranks(recipe, whole[2:], resume=path).losses == run_on_ranks(recipe, whole).losses[2:]


def make_chained_scheduler(optimiser: torch.optim.Optimizer) -> Any:
    return ChainedScheduler([ConstantLR(optimiser, 0.5, 3), ExponentialLR(optimiser, 0.9)])


def test_schedulers_that_are_chained_go_on(tmp_path: Path):
    """They don't say how often they have made a step."""
    recipe = replace(make_recipe(PLANS["one rank"], scheduler="none"), scheduler=make_chained_scheduler)
    whole = make_data(recipe, 4)
    path = run_on_ranks(recipe, whole[:2], into=tmp_path).saved
    assert run_on_ranks(recipe, whole[2:], resume=path).losses == run_on_ranks(recipe, whole).losses[2:]


def test_kernels_of_a_gpu_are_no_damage(tmp_path: Path):
    """Of a training with fused kernels the state is what it is without."""
    recipe = make_recipe(PLANS["one rank"], "adam", "none")
    path = run_on_ranks(recipe, make_data(recipe, 2), into=tmp_path).saved
    update_manifest(path, lambda manifest: [each.update(fused=True) for each in manifest["optimiser"]["options"]])
    check_fits_recipe(Checkpoint.open(path), recipe)


def test_a_scheduler_that_has_come_to_its_end_is_loaded(tmp_path: Path):
    """A model that is trained can predict, though OneCycleLR has no step more."""
    recipe = make_recipe(PLANS["one rank"], "adam", "cycle")
    path = run_on_ranks(recipe, make_data(recipe, 9), into=tmp_path).saved
    done = json.loads((path / "checkpoint.json").read_text())["scheduler"]["state"]
    assert done["last_epoch"] == done["total_steps"] - 1

    def work(world: LoopbackWorld) -> int:
        return load(RankTraining(world, recipe), path).step

    assert run_ranks(1, work) == [9]
