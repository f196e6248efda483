"""Activations that lie in a file between forward and backward: the same bits, and far less memory."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.errors import LossError, RankError
from mpi4dl_nb.engines.models import UNet, resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.kernel_effects import LiveBytes
from mpi4dl_nb.engines.predict.rank_memory import predict_rank_memory
from mpi4dl_nb.engines.program import offloader
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.program.offloader import OffloadStore
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches
from tests.predict.measured import get_live_values, measure_live_bytes

SHAPE = (4, 3, 64, 64)
PLANS = {
    "one rank": Plan(split_size=1, spatial_size=0),
    "tiles and a stage": Plan(split_size=2, spatial_size=1),
    "fused halos": Plan(split_size=2, slice_method="1x2", halo_d2=True, fused_layers=2),
    "overlapped halos": Plan(split_size=1, slice_method="1x2", overlap_halos=True),
    "micro-batches, zero bubble": Plan(split_size=3, spatial_size=0, parts=4, schedule="zero_bubble"),
    "both ways, computed again": Plan(split_size=2, spatial_size=0, bidirectional=True, checkpoint_activations=True),
    "zero bubble, computed again": Plan(
        split_size=2, spatial_size=1, parts=4, schedule="zero_bubble", checkpoint_activations=True
    ),
    "half precision": Plan(split_size=2, spatial_size=0, parts=4, schedule="zero_bubble", precision="bfloat16"),
    "shares and replicas": Plan(split_size=2, slice_method="1x2", local_dp=2, data_parallel=2),
}
MODELS = {"ResNet": resnet20_v1, "U-Net": UNet}


class Copying(offloader.Offloader):
    """As of a GPU, which cannot read a file: what has been put away is copied back."""

    def __init__(self, *arguments: object, reads_files: bool) -> None:
        super().__init__(*arguments, reads_files=not reads_files)


def hide_from_live_bytes(work):
    """Unseen by `LiveBytes`, which is not told that memory is taken away from a tensor."""

    def run_uncounted(*arguments):
        with _disable_current_modes():
            return work(*arguments)

    return run_uncounted


@pytest.fixture(params=["where it lies", "brought back"])
def reads_files(request, monkeypatch) -> bool:
    """A processor computes with what lies in the file."""
    if request.param == "brought back":
        monkeypatch.setattr("mpi4dl_nb.engines.train.training.Offloader", Copying)
        monkeypatch.setattr(offloader, "_make_storageless", hide_from_live_bytes(offloader._make_storageless))
    return request.param == "where it lies"


def prepare_recipe(model: str, plan: Plan) -> Recipe:
    torch.manual_seed(0)
    return prepare(MODELS[model](), plan, SHAPE)


def train_two_steps(recipe: Recipe) -> list[tuple[dict, list]]:
    """What each rank has after two steps."""
    whole = make_batches(recipe, 0, steps=2)

    def work(world):
        training = RankTraining(world, recipe)
        losses = [dict(training.step(training.cut(batch)).losses) for batch in whole]
        return training.copy_tensors(), losses

    return run_ranks(recipe.plan.ranks, work)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", PLANS)
def test_the_same_bits(model: str, name: str, reads_files: bool, monkeypatch):
    check_bits(prepare_recipe(model, PLANS[name]), monkeypatch)


@pytest.mark.sampled(1)
def test_what_is_computed_again_is_there_for_the_gradients_of_the_weights(reads_files: bool, monkeypatch):
    check_bits(prepare_recipe("ResNet", PLANS["zero bubble, computed again"]), monkeypatch)


def check_bits(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with activations in a file, against the same one in memory."""
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1)
    expected = train_two_steps(recipe)
    away = replace(recipe, plan=replace(recipe.plan, offload_activations=True))
    for (ours, losses), (theirs, wanted) in zip(train_two_steps(away), expected, strict=True):
        assert losses == wanted
        for group, tensors in theirs.items():
            assert all(torch.equal(ours[group][key], tensor) for key, tensor in tensors.items()), group


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "share"),
    [("tiles and a stage", 0.45), ("micro-batches, zero bubble", 0.65), ("both ways, computed again", 0.9)],
)
def test_the_peak_is_small_and_no_more_than_predicted(name: str, share: float, reads_files: bool):
    """What backward reads in the file is no tensor's memory, but is counted: a GPU has it brought back."""
    kept = prepare_recipe("ResNet", PLANS[name])
    away = replace(kept, plan=replace(kept.plan, offload_activations=True))
    pairs = list(zip(measure_live_bytes(away), measure_live_bytes(kept), strict=True))
    for ours, _ in pairs:
        predicted = predict_rank_memory(ours.program, away.graph, away.plan).peak_bytes
        assert ours.peak_bytes <= (1.03 if reads_files else 1.15) * predicted
        assert reads_files or predicted <= 1.03 * ours.peak_bytes
    assert max(ours.peak_bytes for ours, _ in pairs) < share * max(theirs.peak_bytes for _, theirs in pairs)


@pytest.mark.nightly
def test_nothing_is_left_by_steps_that_fail(reads_files: bool):
    """Nor by what is computed again: graphs that no backward ends."""
    plan = Plan(split_size=1, spatial_size=0, offload_activations=True, checkpoint_activations=True)
    recipe = prepare_recipe("ResNet", plan)
    (batch,) = make_batches(recipe, 0, steps=1)
    bad = {**batch, "images": batch["images"] * torch.nan}

    def work(world):
        with LiveBytes() as live:
            training, held = RankTraining(world, recipe), []
            training.step(training.cut(batch))
            for _ in range(4):
                with pytest.raises(LossError):
                    training.step(training.cut(bad))
                training.abort_step()
                held.append(live.now)
        return held

    (held,) = run_ranks(1, work)
    assert held[0] == held[-1]


@pytest.mark.nightly
def test_what_the_caller_gave_stays_and_what_is_looked_at_is_there(reads_files: bool):
    recipe = prepare_recipe("ResNet", replace(PLANS["one rank"], offload_activations=True))
    (batch,) = make_batches(recipe, 0, steps=1)

    def work(world, recipe):
        training = RankTraining(world, recipe)
        own = training.cut(batch)
        training.start(own)
        for _ in range(12):
            training.advance()
        seen = {name: tensor.detach().clone() for name, tensor in get_live_values(training.worker).items()}
        one = next(name for name in seen if name != "images")
        assert torch.equal(training.worker.peek(one), seen[one])
        while not training.worker.done:
            training.advance()
        assert torch.equal(own[0]["images"], batch["images"])
        return seen

    (seen,) = run_ranks(1, lambda world: work(world, recipe))
    kept = replace(recipe, plan=replace(recipe.plan, offload_activations=False))
    (expected,) = run_ranks(1, lambda world: work(world, kept))
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in expected)


def test_a_full_disk_is_reported_and_the_training_goes_on_when_there_is_room(monkeypatch):
    recipe = prepare_recipe("ResNet", replace(PLANS["one rank"], offload_activations=True))
    (batch,) = make_batches(recipe, 0, steps=1)

    def raise_no_space(*place: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(world):
        training = RankTraining(world, recipe)
        with monkeypatch.context() as patch:
            patch.setattr("mpi4dl_nb.engines.program.offloader._reserve", raise_no_space)
            with pytest.raises(RankError, match=r"is full: .* more are to be stored"):
                training.step(training.cut(batch))
        training.abort_step()
        assert training.updates == 0
        return training.step(training.cut(batch)).losses

    def run_step(world):
        training = RankTraining(world, replace(recipe, plan=PLANS["one rank"]))
        return training.step(training.cut(batch)).losses

    assert run_ranks(1, work) == run_ranks(1, run_step)


def test_what_is_computed_again_is_not_written(monkeypatch):
    written = []
    put = OffloadStore.put
    monkeypatch.setattr(
        OffloadStore, "put", lambda self, storage: (written.append(storage.nbytes()), put(self, storage))[1]
    )
    recipe, bytes_of = prepare_recipe("ResNet", PLANS["one rank"]), {}
    for again in (False, True):
        written.clear()
        train_two_steps(
            replace(recipe, plan=replace(recipe.plan, offload_activations=True, checkpoint_activations=again))
        )
        bytes_of[again] = sum(written)
    assert bytes_of[True] < 0.4 * bytes_of[False]


def test_only_the_pixels_of_a_rank_are_stored(monkeypatch):
    """Labels and images of one channel are cut as views of the whole batch."""
    monkeypatch.setattr(offloader, "LEAST_BYTES", 1)
    plan = Plan(split_size=1, slice_method="2x2", offload_activations=True)
    recipe = prepare(torch.nn.Conv2d(1, 2, 3, padding=1), plan, (1, 1, 64, 64), loss=torch.nn.CrossEntropyLoss())
    (batch,) = make_batches(recipe, 0, steps=1)
    sizes = []
    put = OffloadStore.put
    monkeypatch.setattr(
        OffloadStore, "put", lambda self, storage: (sizes.append(storage.nbytes()), put(self, storage))[1]
    )

    def work(world):
        training = RankTraining(world, recipe)
        training.step(training.cut(batch))

    run_ranks(plan.ranks, work)
    assert sizes
    assert max(sizes) <= 2 * 33 * 33 * 8  # a tile's labels, or its predictions


def test_of_a_result_that_is_a_view_nothing_stays(reads_files: bool):
    """A kernel of one voxel is a matrix product, whose axes are then moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 8, 1), nn.Conv3d(8, 2, 3, padding=1))
    plan = Plan(split_size=1, slice_method="2x1x1", offload_activations=True)
    recipe = prepare(model, plan, (1, 2, 16, 16, 16), lambda made, labels: made.square().mean())
    for measured in measure_live_bytes(recipe):
        first, second = (
            index
            for index, step in enumerate(measured.program.steps)
            if step.phase is Phase.FORWARD and any("conv3d" in op.kernel for op in step.instruction.local_ops)
        )
        assert measured.after[first] - measured.after[first - 1] < 8 * 8 * 16 * 16 * 4
        assert measured.after[second] - measured.after[first - 1] < 8 * 8 * 16 * 16 * 4
