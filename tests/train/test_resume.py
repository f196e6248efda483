"""Six steps are three steps, a checkpoint, and three more: under the same plan, another one, and in plain PyTorch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import safetensors.torch
import torch
from torch import nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.checkpoint_folder import list_checkpoints
from mpi4dl_nb.engines.train.checkpoint_load import load, optimiser_state, scheduler_state
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.training import RankTraining
from tests.train.trainings import (
    HALF,
    OPTIMISERS,
    PLANS,
    Weighted,
    compute_distance,
    make_data,
    make_net,
    make_recipe,
    run_on_ranks,
)

PAIRS = [  # saved under, loaded under, what moves the weights
    ("tiles and a stage", "stages", "adam", "step"),
    ("stages", "tiles to the loss", "rmsprop", "cosine"),
    ("zero bubble", "shares", "sgd", "step"),
    ("shares", "one rank", "adagrad", "none"),
    ("both ways", "replicas", "plain sgd", "cycle"),
    ("replicas", "both ways", "sgd", "step"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("saved", "loaded", "optimiser", "scheduler"), PAIRS)
def test_training_goes_on_under_any_plan(saved: str, loaded: str, optimiser: str, scheduler: str, tmp_path: Path):
    """Losses of the steps behind the break, and weights, buffers and optimiser at the end."""
    first, second = (make_recipe(PLANS[name], optimiser, scheduler) for name in (saved, loaded))
    whole = make_data(first)
    straight = run_on_ranks(first, whole)
    before = run_on_ranks(first, whole[:HALF], into=tmp_path)
    assert before.losses == straight.losses[:HALF]

    again = run_on_ranks(first, whole[HALF:], resume=tmp_path)
    assert again.losses == straight.losses[HALF:]
    assert again.tensors.keys() == straight.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in straight.tensors.items())

    other = run_on_ranks(second, whole[HALF:], resume=before.saved)
    for mine, theirs in zip(other.losses, straight.losses[HALF:], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, abs=0)
    assert compute_distance(other.tensors, straight.tensors) <= 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_plain_pytorch_goes_on_where_the_ranks_were(name: str, tmp_path: Path):
    """Weights by the library, the optimiser and scheduler by what this package reads for them."""
    recipe = make_recipe(PLANS["tiles and a stage"], name, "step")
    whole = make_data(recipe)
    straight = run_on_ranks(recipe, whole)
    path = run_on_ranks(recipe, whole[:HALF], into=tmp_path).saved
    alone = ReferenceTraining(
        make_net(seed=1), nn.CrossEntropyLoss(), OPTIMISERS[name], torch.float64, recipe.draws,
        recipe.plan.micro_batches, recipe.rules,
    )  # fmt: skip
    alone.model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"), strict=True)
    alone.optimiser.load_state_dict(optimiser_state(path, alone.model, alone.optimiser))
    alone.scheduler.load_state_dict(scheduler_state(path))
    alone.begun += HALF * recipe.plan.micro_batches
    losses = [alone.step(batch) for batch in whole[HALF:]]
    assert losses == pytest.approx([sum(each.values()) / 2 for each in straight.losses[HALF:]], rel=1e-12, abs=0)
    expected = {name.removeprefix("model."): tensor for name, tensor in straight.tensors.items() if "/" not in name}
    mine = {name: tensor for name, tensor in alone.model.state_dict().items() if name in expected}
    assert compute_distance(mine, expected) <= 1e-12


def test_a_plain_model_predicts_the_same(tmp_path: Path):
    """Saved by five ranks, loaded by three, and by one process without this package."""
    five, three = make_recipe(PLANS["tiles and a stage"]), make_recipe(PLANS["stages"], model=make_net(seed=5))
    whole = make_data(five, HALF)
    path = run_on_ranks(five, whole, into=tmp_path / "five").saved
    other = run_on_ranks(three, [], resume=path, into=tmp_path / "three").saved
    answers = []
    for each in (path, other):
        model = make_net(seed=9).double().eval()
        model.load_state_dict(safetensors.torch.load_file(each / "model.safetensors"), strict=True)
        answers.append(model(whole[0]["images"]))
    assert torch.equal(answers[0], answers[1])
    assert (path / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (path / "training.safetensors").read_bytes() == (other / "training.safetensors").read_bytes()


def test_every_name_of_the_state_is_in_the_file(tmp_path: Path):
    """Tied weights under both names, weights without use as they were; buffers that do not persist are none of it."""
    model = make_net()
    path = run_on_ranks(make_recipe(PLANS["stages"], model=model), [], into=tmp_path).saved
    stored = safetensors.torch.load_file(path / "model.safetensors")
    state = model.state_dict()
    assert stored.keys() == state.keys()
    assert {"second.0.weight", "third.weight", "unused.weight", "scale"} <= stored.keys()
    assert "passing" not in stored
    assert all(torch.equal(stored[name], tensor.to(stored[name].dtype)) for name, tensor in state.items())
    assert not (path / "loss.safetensors").exists()


def test_nothing_that_is_loaded_stays_in_the_file(tmp_path: Path):
    """Whoever writes over a checkpoint changes no training that goes on from it, not even how often Adam has moved."""
    recipe = make_recipe(PLANS["one rank"], "adam")
    path = run_on_ranks(recipe, make_data(recipe, 1), into=tmp_path).saved
    loaded = run_on_ranks(recipe, [], resume=path).tensors

    def write_over(training: RankTraining) -> None:
        for file in path.glob("*.safetensors"):
            with file.open("r+b") as opened:
                opened.write(bytes(file.stat().st_size))

    after = run_on_ranks(recipe, [], resume=path, look=write_over).tensors
    assert any(name.endswith("/step") for name in loaded)
    assert all(torch.equal(after[name], tensor) for name, tensor in loaded.items())


def test_weights_without_use_are_loaded_too(tmp_path: Path):
    path = run_on_ranks(make_recipe(PLANS["stages"], model=make_net(seed=0)), [], into=tmp_path).saved
    found = run_on_ranks(make_recipe(PLANS["stages"], model=make_net(seed=1)), [], resume=path).tensors
    assert torch.equal(found["model.unused.weight"], make_net(seed=0).unused.weight)


def test_a_loss_that_is_trained_is_saved_and_goes_on(tmp_path: Path):
    plan = PLANS["tiles and a stage"]
    recipe = make_recipe(plan, "sgd", loss=Weighted())
    whole = make_data(recipe)
    straight = run_on_ranks(recipe, whole)
    path = run_on_ranks(recipe, whole[:HALF], into=tmp_path).saved
    stored = safetensors.torch.load_file(path / "loss.safetensors")
    loss = Weighted().double()
    loss.load_state_dict(stored, strict=True)
    assert stored["temperature"] != 1.5
    other = run_on_ranks(make_recipe(PLANS["stages"], "sgd", loss=Weighted()), whole[HALF:], resume=path)
    assert compute_distance(other.tensors, straight.tensors) <= 1e-12
    assert "loss.temperature/momentum_buffer" in other.tensors
    alone = ReferenceTraining(make_net(), loss, OPTIMISERS["sgd"], torch.float64)
    alone.model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    state = optimiser_state(path, alone.model, alone.optimiser, alone.loss)
    assert len(state["state"]) == len(alone.trained) - 2, "weights without use have no state"


@pytest.mark.nightly
def test_the_loss_scale_goes_on(tmp_path: Path):
    """It begins so high that the first steps are skipped: the scale halves, and no weight moves."""
    plan = Plan(split_size=2, slice_method="1x2", precision="float16")
    recipe = replace(make_recipe(plan, "sgd", "none"), loss_scale=2.0**34)
    whole = make_data(recipe, 24)
    seen: dict[str, list[float]] = {"straight": [], "again": []}

    def make_recorder(into: str):
        return lambda training: seen[into].append(
            (training.worker.optimiser_step.scale, training.worker.optimiser_step.good_steps)
        )

    straight = run_on_ranks(recipe, whole, look=make_recorder("straight"))
    path = run_on_ranks(recipe, whole[:12], into=tmp_path).saved
    manifest = json.loads((path / "checkpoint.json").read_text())
    assert 1 < manifest["loss_scale"] < 2.0**34
    again = run_on_ranks(replace(recipe, loss_scale=2.0**16), whole[12:], resume=path, look=make_recorder("again"))
    assert seen["again"] == seen["straight"]
    assert again.losses == straight.losses[12:]
    for name, tensor in straight.tensors.items():
        # Half precision's kernels may round the last bit of a sum by where it lies in memory: two runs without a break
        # differ there too. Halves hide it, the statistics of batch norm are single precision.
        rounding = 2.0**-23 if "running" in name else 0.0
        assert torch.allclose(again.tensors[name], tensor, rtol=rounding, atol=rounding), name
    assert again.losses[-1] != straight.losses[0], "all steps were skipped"


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_another_precision_goes_on_with_its_own_types(precision: str, tmp_path: Path):
    path = run_on_ranks(
        make_recipe(PLANS["stages"]), make_data(make_recipe(PLANS["stages"]), HALF), into=tmp_path
    ).saved
    recipe = make_recipe(replace(PLANS["stages"], precision=precision))
    kinds = []
    done = run_on_ranks(
        recipe, make_data(recipe, 1), resume=path, look=lambda t: kinds.append(t.worker.optimiser_step.scale)
    )
    types = {name: tensor.dtype for name, tensor in done.tensors.items() if tensor.dim()}
    assert set(types.values()) == {torch.float32}
    assert all(scale == (2.0**16 if precision == "float16" else 1) for scale in kinds)


def test_groups_of_the_optimiser_go_on(tmp_path: Path):
    """No decay for vectors: on every rank other weights are in a group."""

    def make_optimiser(weights):
        weights = list(weights)
        groups = [[w for w in weights if w.dim() > 1], [w for w in weights if w.dim() <= 1]]
        options = ({"weight_decay": 0.1}, {"lr": 0.03})
        return torch.optim.AdamW(
            [{"params": group, **more} for group, more in zip(groups, options, strict=True) if group], lr=1e-2
        )

    first, second = (
        replace(make_recipe(PLANS[n], scheduler="none"), optimiser=make_optimiser) for n in ("stages", "shares")
    )
    whole = make_data(first)
    straight = run_on_ranks(first, whole)
    path = run_on_ranks(first, whole[:HALF], into=tmp_path).saved
    assert compute_distance(run_on_ranks(second, whole[HALF:], resume=path).tensors, straight.tensors) <= 1e-12
    model = make_net()
    trained = [weight for name, weight in model.named_parameters() if name != "scale" and "unused" not in name]
    groups = optimiser_state(path, model, make_optimiser(trained))["param_groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-2, 0.1), (0.03, 1e-2)]


def test_the_steps_are_counted_on(tmp_path: Path):
    recipe = make_recipe(PLANS["one rank"])
    whole = make_data(recipe, 4)
    run_on_ranks(recipe, whole[:2], into=tmp_path)
    run_on_ranks(recipe, whole[2:], resume=tmp_path, into=tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["00001-step-2", "00002-step-4"]


def test_a_rank_gives_only_what_no_rank_before_it_has(tmp_path: Path):
    """So that the writer gets every tensor once: of four tiles, three give nothing."""
    given: dict[int, int] = {}

    def look(training: RankTraining) -> None:
        world = training.worker.world
        counted = world.exchange
        given[world.rank] = 0

        def exchange(sends, receives):
            given[world.rank] += sum(message.tensor.nbytes for message in sends)
            return counted(sends, receives)

        world.exchange = exchange
        from mpi4dl_nb.engines.train.checkpoint_save import save

        save(training, tmp_path)

    recipe = make_recipe(PLANS["tiles and a stage"])
    run_on_ranks(recipe, make_data(recipe, 1), look=look)
    assert given[0] == given[1] == given[2] == given[3] == 0
    assert given[4] > 0
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert given[4] < size


class Interrupted(dict[str, torch.Tensor]):
    """Tensors of a rank that is interrupted as it copies into them."""

    def keys(self) -> NoReturn:
        raise KeyboardInterrupt


def test_a_rank_that_is_interrupted_as_it_loads_is_known_by_its_updates(tmp_path: Path):
    recipe = make_recipe(PLANS["one rank"])
    path = run_on_ranks(recipe, make_data(recipe)[:1], into=tmp_path).saved

    def interrupt_load(world: LoopbackWorld) -> tuple[int, int]:
        training = RankTraining(world, recipe)
        buffers, training.buffers = training.buffers, Interrupted(training.buffers)
        with pytest.raises(KeyboardInterrupt):
            load(training, path)
        half, training.buffers = training.updates, buffers
        load(training, path)
        return half, training.updates

    assert run_ranks(1, interrupt_load) == [(-1, 1)]
