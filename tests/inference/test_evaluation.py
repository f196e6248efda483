"""Held-out images, judged on ranks under any plan: the scores of one process, from own pixels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.geometry.tiles import Tile
from mpi4dl_nb.engines.images.dataset import SyntheticImages
from mpi4dl_nb.engines.inference.evaluation import HeldOutSet, RankEvaluation, evaluate_on_ranks
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.training_events import Scores, count_predictions

SIZE, CLASSES = (16, 24), 3
PLANS = {
    "tiles": Plan(split_size=2, num_spatial_parts=4),
    "mirrored": Plan(split_size=2, spatial_size=0, bidirectional=True, times=2, parts=2),
    "shared": Plan(split_size=2, num_spatial_parts=2, slice_method="vertical", local_dp=2, data_parallel=2),
    "interleaved": Plan(split_size=4, spatial_size=0, parts=2, schedule="interleaved", stages_per_rank=2),
}


class Net(nn.Module):
    """Batch norm and dropout tell whether it is judged in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3 if not i else 4, 4, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x)).relu()
        return self.last(self.drop(x.mean((2, 3))))


class Recorded(SyntheticImages):
    """Notes which pixels are read."""

    def __init__(self) -> None:
        super().__init__(5, SIZE, CLASSES, seed=3)
        self.read: set[Tile] = set()

    def part(self, index: int, tile: Tile, draw: int | None = None) -> Tensor:
        self.read.add(tile)
        return super().part(index, tile, draw)


def train_and_evaluate(plan: Plan, images: SyntheticImages) -> tuple[list[Scores], nn.Module]:
    """After one step of training: what every rank is told, and the model as it is then."""
    torch.manual_seed(0)
    model, loss = Net().double(), nn.CrossEntropyLoss()
    shape = (4 * plan.parts, 3, *SIZE)
    recipe = prepare(model, Plan(**{**plan.__dict__, "precision": "float64"}), shape)
    specs = recipe.step_specs
    batch = {"images": torch.randn(specs["images"].shape).double(), "labels": torch.zeros(specs["labels"].shape).long()}
    held_out = HeldOutSet(model, loss, recipe, images)

    def work(world: LoopbackWorld) -> tuple[Scores, dict[str, Tensor]]:
        training = RankTraining(world, recipe)
        training.step(training.cut(batch))
        evaluation = RankEvaluation(world, training, held_out.forward, specs["labels"], images)
        before = {name: tensor.detach().clone() for name, tensor in training.held.items()}
        scores = evaluate_on_ranks(world, training, held_out, evaluation)
        assert all(torch.equal(tensor, before[name]) for name, tensor in training.held.items())
        return scores, before

    told = run_ranks(plan.ranks, work)
    state = {name.removeprefix("model."): tensor for _, held in told for name, tensor in held.items()}
    model.load_state_dict(state)
    return [scores for scores, _ in told], model.eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_judge_as_one_process(plan: Plan):
    images = SyntheticImages(5, SIZE, CLASSES, seed=3)
    found, model = train_and_evaluate(plan, images)
    whole = torch.stack([images.part(index, Tile.whole(*SIZE)) for index in range(5)]).double()
    labels = torch.tensor([images.label(index) for index in range(5)])
    with torch.no_grad():
        answers = model(whole)
    for scores in found:
        assert scores.loss == pytest.approx(nn.functional.cross_entropy(answers, labels).item(), rel=1e-12)
        assert scores.counts == count_predictions(answers, labels)


def test_ranks_read_their_own_pixels():
    images = Recorded()
    train_and_evaluate(PLANS["tiles"], images)
    assert len(images.read) == 4
    assert all(tile.shape == (SIZE[0] // 2, SIZE[1] // 2) for tile in images.read)
