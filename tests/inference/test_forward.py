"""Prediction by all ranks together is that of one process, under any plan; the model itself is only read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.comm.world import Message, Pending
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.inference.rank_predictor import (
    RankPredictor,
    fetch_tensors,
    join_predictions,
    prepare_prediction,
)
from mpi4dl_nb.engines.models import UNet
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.train.training import cut_inputs
from tests.exact import make_whole_numbers, with_whole_weights
from tests.inference.test_turns import fill_statistics
from tests.inference.turning import predict_alone
from tests.zoo import Segmenter

PLANS = {
    "tiles": Plan(split_size=1, slice_method="2x3", precision="float64"),
    "fused halos": Plan(split_size=1, slice_method="2x2", halo_d2=True, fused_layers=3, precision="float64"),
    "stages": Plan(
        split_size=3, spatial_size=2, num_spatial_parts=(4, 2), slice_method=("square", "vertical"), precision="float64"
    ),
    "micro-batches": Plan(split_size=3, slice_method="1x2", parts=2, schedule="1f1b", precision="float64"),
    "both ways": Plan(split_size=2, spatial_size=0, parts=2, bidirectional=True, schedule="gems", precision="float64"),
    "shares": Plan(split_size=2, slice_method="1x2", local_dp=2, data_parallel=2, precision="float64"),
    "zero bubble": Plan(split_size=2, spatial_size=0, parts=2, schedule="zero_bubble", precision="float64"),
}


def predict_on_ranks(model: nn.Module, plan: Plan, images: Tensor) -> Tensor:
    shape = (len(images) // plan.batches, *images.shape[1:])
    recipe = prepare_prediction(model, plan, shape)
    programs = compile_plan(recipe.graph, plan)
    assert all(step.phase is Phase.FORWARD for program in programs for step in program.steps)
    told = run_ranks(
        plan.ranks,
        lambda world: RankPredictor(world, recipe).predict(cut_inputs(programs[world.rank], {"images": images})),
    )
    return join_predictions(programs, told, recipe.graph.specs[recipe.graph.prediction])


class Classifier(nn.Module):
    """A skip over several layers, batch norms, dropout that is over in evaluation, a global pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.third = nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.last, self.drop, self.head = nn.BatchNorm2d(6, momentum=0.3), nn.Dropout(0.5), nn.Linear(6, 5)

    def forward(self, x):
        skip = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.last(self.third(torch.cat([self.second(skip), skip], 1))))
        return self.head(self.drop(x).mean((2, 3)))


class ReadAgain(nn.Module):
    """A second output reads the first through windows, which fused halos make wider."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 5, padding=2)

    def forward(self, x):
        return (first := self.first(x)), self.second(first.relu())


def test_another_output_does_not_widen_the_first_of_fused_layers():
    torch.manual_seed(0)
    model, images = ReadAgain(), torch.randn(2, 3, 20, 36, dtype=torch.float64)
    expected = copy.deepcopy(model).double().eval()(images)[0]
    assert torch.allclose(predict_on_ranks(model, PLANS["fused halos"], images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("make", [Classifier, Segmenter])
def test_any_plan(name: str, make: type[nn.Module]):
    torch.manual_seed(0)
    plan, model = PLANS[name], fill_statistics(make())
    before = copy.deepcopy(model.state_dict())
    images = torch.randn(2 * plan.parts * plan.batches, 3, 20, 36, dtype=torch.float64)
    made = predict_on_ranks(model, plan, images)
    assert torch.allclose(made, predict_alone(model, images), rtol=1e-12, atol=1e-12)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class Asked:
    """Messages under way, and whether anybody was told that they have gone."""

    def __init__(self, pending: Pending) -> None:
        self.pending, self.gone = pending, False

    def wait(self) -> None:
        self.pending.wait()
        self.gone = True

    def is_completed(self) -> bool:
        """As over MPI, where what is long leaves when the receiver is there: not when it is first looked for."""
        return False


class SlowWorld:
    """Remembers what was sent."""

    def __init__(self, world: LoopbackWorld) -> None:
        self.world, self.sent = world, []

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Asked:
        self.sent.append(Asked(self.world.exchange(sends, receives)))
        return self.sent[-1]

    def prepare(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], Asked]:
        return lambda: self.exchange(sends, receives)

    def __getattr__(self, name: str) -> object:
        return getattr(self.world, name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_what_was_sent_has_gone_before_a_prediction_ends(name: str):
    """Over MPI the last tiles of a stage were still leaving when the next prediction got their memory: held-out
    images got scores of 1e35, and a loss that was not a number."""
    plan, model = PLANS[name], fill_statistics(Classifier())
    images = torch.randn(2 * plan.parts * plan.batches, 3, 20, 36, dtype=torch.float64)
    recipe = prepare_prediction(model, plan, (2 * plan.parts, *images.shape[1:]))

    def work(world: LoopbackWorld) -> list[Asked]:
        slow = SlowWorld(world)
        rank = RankPredictor(slow, recipe)
        rank.predict(rank.cut({"images": images}))
        return slow.sent

    sent = [asked for rank in run_ranks(plan.ranks, work) for asked in rank]
    assert sent
    assert all(asked.gone for asked in sent)


def test_whole_numbers_to_the_bit():
    model = with_whole_weights(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3, 2)))
    images = make_whole_numbers(2, 3, 21, 30)
    assert torch.equal(predict_on_ranks(model, PLANS["tiles"], images), predict_alone(model, images))


def test_half_precision_is_that_of_autocast():
    torch.manual_seed(0)
    model, images = fill_statistics(UNet(width=4)), torch.randn(1, 3, 32, 48)
    plan = Plan(split_size=1, slice_method="2x2", precision="bfloat16")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        usual = copy.deepcopy(model).eval()(images).float()
    exact = predict_alone(model, images.double())
    made = predict_on_ranks(model, plan, images).double()
    assert (made - exact).norm() <= 4 * (usual - exact).norm()
    assert (made - exact).norm() > 0


def test_nothing_of_a_prediction_is_kept_for_backward():
    recipe = prepare_prediction(Classifier(), PLANS["tiles"], (2, 3, 20, 36))
    images = torch.randn(2, 3, 20, 36, dtype=torch.float64)

    def work(world):
        rank = RankPredictor(world, recipe)
        rank.predict(cut_inputs(rank.program, {"images": images}))
        return [bool(lane._graphs or lane._late or lane.values) for lane in rank.worker.micro_batch_states.values()]

    assert run_ranks(6, work) == [[False]] * 6


def test_weights_come_from_the_ranks_that_hold_them():
    """Here another rank holds each stage than the one that needs it."""
    torch.manual_seed(0)
    plan = Plan(split_size=2, spatial_size=0, precision="float64")
    model, images = fill_statistics(Classifier()), torch.randn(2, 3, 20, 36, dtype=torch.float64)
    recipe = prepare_prediction(model, plan, images.shape)
    programs = compile_plan(recipe.graph, plan)

    def work(world):
        other = programs[1 - world.rank]
        held = {name: recipe.state[name] for name in (*other.weights, *other.buffers)}
        return RankPredictor(world, recipe, held).predict(cut_inputs(programs[world.rank], {"images": images}))

    made = join_predictions(programs, run_ranks(2, work), recipe.graph.specs[recipe.graph.prediction])
    assert torch.allclose(made, predict_alone(model, images), rtol=1e-12, atol=1e-12)


def test_a_weight_that_no_rank_holds():
    with pytest.raises(PlanError, match=r"No rank holds model\.lost"):
        run_ranks(2, lambda world: fetch_tensors(world, {"model.there": torch.ones(1)}, ["model.there", "model.lost"]))


def test_a_model_that_cannot_take_the_images():
    with pytest.raises(TraceError, match="UNet cannot be traced"):
        prepare_prediction(UNet(), PLANS["tiles"], (1, 3, 21, 20))


class Mean(nn.Module):
    """One number for all images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).mean()


def test_one_number_for_all_images_is_no_prediction():
    with pytest.raises(TraceError, match=r"one number for all images.*take the mean or the sum in the loss"):
        prepare_prediction(Mean(), Plan(split_size=1, spatial_size=0), (2, 3, 8, 8))
