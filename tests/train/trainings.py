"""What the tests of checkpoints train: a small model with everything that a checkpoint has to hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.checkpoint_load import load
from mpi4dl_nb.engines.train.checkpoint_save import save
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches

SHAPE, HALF = (4, 3, 12, 14), 3  # steps before the break, and as many behind it


class Net(nn.Module):
    """Batch norms that count, a dropout that draws, a weight with two names, one that is frozen, two without use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.drop = nn.Dropout(0.3)
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.third = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.third.weight = self.second[0].weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.drop(self.first(x)))
        return self.head(self.third(x) * self.scale)


def make_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


class Weighted(nn.Module):
    """A loss that is trained, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("shares", torch.linspace(0.5, 1.5, 5))

    def forward(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(prediction * self.temperature, labels, self.shares)


PLANS = {
    "one rank": Plan(split_size=1, spatial_size=0, parts=2, precision="float64"),
    "tiles and a stage": Plan(split_size=2, slice_method="2x2", parts=2, precision="float64"),
    "stages": Plan(split_size=3, spatial_size=0, parts=2, schedule="1f1b", precision="float64"),
    "zero bubble": Plan(split_size=2, spatial_size=0, parts=2, schedule="zero_bubble", precision="float64"),
    "tiles to the loss": Plan(split_size=1, slice_method="1x3", parts=2, precision="float64"),
    "shares": Plan(split_size=2, slice_method="1x2", local_dp=2, parts=2, precision="float64"),
    "both ways": Plan(split_size=2, slice_method="1x2", bidirectional=True, precision="float64"),
    "replicas": Plan(split_size=1, slice_method="1x2", data_parallel=2, precision="float64"),
}
OPTIMISERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "plain sgd": partial(torch.optim.SGD, lr=0.05),
}
SCHEDULERS = {
    "step": partial(lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.5),
    "cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=10),
    "cosine": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "none": None,
}


def make_recipe(
    plan: Plan, optimiser: str = "adam", scheduler: str = "step", model: nn.Module | None = None,
    loss: Loss | None = None,
) -> Recipe:  # fmt: skip
    traced = _prepare_recipe(plan, model or make_net(), loss) if model or loss else _make_usual_recipe(plan)
    return replace(traced, optimiser=OPTIMISERS[optimiser], scheduler=SCHEDULERS[scheduler])


@cache
def _make_usual_recipe(plan: Plan) -> Recipe:
    return _prepare_recipe(plan, make_net(), None)


def _prepare_recipe(plan: Plan, model: nn.Module, loss: Loss | None) -> Recipe:
    torch.manual_seed(7)
    return prepare(model, plan, SHAPE, loss, device="cpu")


def make_data(recipe: Recipe, steps: int = 2 * HALF) -> list[dict[str, Tensor]]:
    return make_batches(recipe, seed=3, steps=steps)


@dataclass(frozen=True)
class Done:
    """What ranks did together: the loss of each step by micro-batch, and their tensors by name."""

    losses: tuple[Mapping[int, float], ...]
    tensors: Mapping[str, Tensor]
    saved: Path | None = None


def collect_tensors(training: RankTraining) -> dict[str, Tensor]:
    """Weights, buffers and the optimiser's state, by name."""
    found = training.copy_tensors()
    held = found["weights"] | found["buffers"] | found["kept"]
    optimiser = training.worker.optimiser_step.optimiser
    names = {id(weight): name for name, weight in training.weights.items()}
    states = optimiser.state.items() if optimiser else ()
    return held | {
        f"{names[id(weight)]}/{key}": value.detach().cpu().clone()
        for weight, state in states
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def copy_state(training: RankTraining) -> dict[str, Any]:
    """All that a load might change, as copies."""
    descent = training.worker.optimiser_step
    moved = (descent.optimiser, descent.scheduler)
    return {
        "tensors": collect_tensors(training),
        "states": copy.deepcopy([each.state_dict() if each else None for each in moved]),
        "objects": [id(each) for each in (descent, *moved)],
        "numbers": (training.worker.steps, training.worker.seed, descent.scale, descent.good_steps),
        "random": torch.get_rng_state(),
    }


def is_same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return type(one) is type(other) and one == other


def run_on_ranks(
    recipe: Recipe, steps: Sequence[Mapping[str, Tensor]], resume: Path | None = None, into: Path | None = None,
    look: Callable[[RankTraining], object] | None = None,
) -> Done:  # fmt: skip
    """Load, train, save: of each what is asked for. Copies of a tensor on several ranks must be the same."""

    def work(world: LoopbackWorld):
        training = RankTraining(world, recipe)
        if resume:
            load(training, resume)
        losses = [dict(training.step(training.cut(whole)).losses) for whole in steps]
        saved = save(training, into) if into else None
        if look:
            look(training)
        return losses, collect_tensors(training), saved

    ranks = run_ranks(recipe.plan.ranks, work)
    tensors: dict[str, Tensor] = {}
    for _, held, _ in ranks:
        for name, tensor in held.items():
            assert torch.equal(tensors.setdefault(name, tensor), tensor), f"{name} is another one on another rank"
    losses = tuple(
        dict(pair for rank, _, _ in ranks for pair in rank[step].items()) for step in range(len(steps))
    )  # fmt: skip
    return Done(losses, tensors, ranks[0][2])


def compute_distance(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest of all tensors' relative errors."""
    assert mine.keys() == theirs.keys()
    return max(
        float((mine[name].double() - theirs[name].double()).norm() / max(float(theirs[name].double().norm()), 1e-300))
        for name in mine
    )
