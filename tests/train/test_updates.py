"""What happens at an update: optimisers, schedulers and the norm of all gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.instructions import FiniteCheckAllReduce
from mpi4dl_nb.engines.program.update import Scheduler
from mpi4dl_nb.engines.train.optimisers import Optimiser
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, compare, train_reference
from mpi4dl_nb.engines.train.recipe import Recipe, prepare, sgd
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches, record_rank_run, verify

PLAN = Plan(split_size=2, spatial_size=1, slice_method="2x2", precision="float64")
SHAPE = (3, 3, 20, 18)


def make_recipe(plan: Plan = PLAN, model: nn.Module | None = None, **rules) -> Recipe:
    torch.manual_seed(0)
    return prepare(model or resnet20_v1(), plan, SHAPE, device="cpu", **rules)


def compute_worst_error(recipe: Recipe, steps: int = 3) -> float:
    """The worst error of steps on ranks against the same in one process, in float64."""
    torch.manual_seed(0)
    model, loss, whole = resnet20_v1(), nn.CrossEntropyLoss(), make_batches(recipe, seed=0, steps=steps)

    def train(world: LoopbackWorld):
        training = RankTraining(world, recipe)
        return record_rank_run(training, map(training.cut, whole))

    records = run_ranks(recipe.plan.ranks, train)
    count = recipe.plan.micro_batches
    alone = ReferenceTraining(
        model, loss, recipe.optimiser, torch.float64, micro_batches=count, rules=recipe.rules
    )  # fmt: skip
    return compare(train_reference(alone, whole), records).worst


OPTIMISERS: dict[str, Optimiser] = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, lr_decay=0.1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimisers(name: str):
    assert compute_worst_error(make_recipe(optimiser=OPTIMISERS[name])) <= 1e-10


SCHEDULERS: dict[str, Scheduler] = {
    "each step": partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=3),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=4),
    "a function": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_step_once_after_each_update(name: str):
    recipe = make_recipe(scheduler=SCHEDULERS[name])
    assert compute_worst_error(recipe) <= 1e-10
    assert compare_rates(recipe), "the rate moves"


def compare_rates(recipe: Recipe) -> bool:
    """Whether every rank has the same rate after two steps, another one than at first."""
    whole = make_batches(recipe, seed=0, steps=2)

    def read_rates(world: LoopbackWorld) -> tuple[float, float]:
        training = RankTraining(world, recipe)
        (group,) = training.worker.optimiser_step.optimiser.param_groups
        before = group["lr"]
        record_rank_run(training, map(training.cut, whole))
        return before, group["lr"]

    found = set(run_ranks(recipe.plan.ranks, read_rates))
    ((before, after),) = found
    return before != after


def test_a_scheduler_at_its_end_refuses_the_next_step():
    """The step after which it fails has changed the weights, and counts."""
    recipe = make_recipe(scheduler=partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=2))
    (batch,) = make_batches(recipe, seed=0, steps=1)

    def train(world: LoopbackWorld) -> None:
        training = RankTraining(world, recipe)
        for _ in range(3):
            training.step(training.cut(batch))
        with pytest.raises(PlanError, match="OneCycleLR has no learning rate for another update: Tried to step 3"):
            training.step(training.cut(batch))
        assert (training.updates, training.worker.done) == (3, True)

    run_ranks(recipe.plan.ranks, train)


@pytest.mark.nightly
@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e6], ids=["far below", "below", "never reached"])
@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        Plan(split_size=1, slice_method="1x3", precision="float64"),
        Plan(split_size=1, slice_method="1x1", precision="float64"),
        Plan(split_size=3, spatial_size=0, precision="float64"),
        Plan(split_size=2, slice_method="1x2", bidirectional=True, parts=3, precision="float64"),
        Plan(split_size=2, slice_method="1x2", data_parallel=2, precision="float64"),
        Plan(split_size=2, slice_method="1x2", local_dp=3, precision="float64"),
    ],
    ids=["a joint", "tiles", "one rank", "stages", "both directions", "replicas", "shares"],
)
def test_the_norm_is_that_of_all_gradients_together(plan: Plan, clip_norm: float):
    assert compute_worst_error(make_recipe(plan, clip_norm=clip_norm), steps=2) <= 1e-10


def test_clipping_changes_what_is_learnt():
    """Or the test above would show nothing."""
    torch.manual_seed(0)
    model, loss = resnet20_v1(), nn.CrossEntropyLoss()
    recipe = make_recipe(clip_norm=0.5)
    whole = make_batches(recipe, seed=0, steps=2)
    free, bound = (
        train_reference(ReferenceTraining(model, loss, sgd, torch.float64, rules=rules), whole)
        for rules in (None, recipe.rules)
    )
    assert compare(free, [bound]).grad_rel > 0.1
    norms = [sum(g.square().sum() for g in step.values()) ** 0.5 for step in bound.gradients]
    assert max(norms) <= 0.5


@pytest.mark.nightly
def test_every_rule_at_once_in_each_precision():
    for precision in ("float64", "float32", "bfloat16", "float16"):
        plan = Plan(split_size=2, slice_method="1x2", precision=precision)
        torch.manual_seed(0)
        model = resnet20_v1()
        recipe = prepare(model, plan, SHAPE, optimiser=OPTIMISERS["sgd"], clip_norm=0.5,
                         scheduler=SCHEDULERS["cosine"], device="cpu")  # fmt: skip
        line, *_ = run_ranks(3, lambda world, r=recipe, m=model: verify(world, r, m, nn.CrossEntropyLoss(), seed=0))
        assert line["ok"], line


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [PLAN, Plan(split_size=3, spatial_size=2, slice_method="1x2")], ids=["2x2", "1x2"])
def test_each_weight_is_counted_by_one_rank(plan: Plan):
    recipe = make_recipe(plan)
    found = [
        item.counted
        for program in compile_plan(recipe.graph, plan)
        for step in program.steps
        if isinstance(item := step.instruction, FiniteCheckAllReduce)
    ]
    assert len(found) == plan.ranks
    assert sorted(name for counted in found for name in counted) == sorted(recipe.graph.trainable)


# ---- what is refused before a rank is touched


class NoScheduler:
    """Not one."""

    def __init__(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser


REFUSED: dict[str, tuple[dict[str, Callable[..., object] | float], str]] = {
    "couples weights": ({"optimiser": torch.optim.LBFGS}, "LBFGS computes the loss again as it steps and couples all"),
    "cannot be made": ({"optimiser": partial(torch.optim.SGD, lr=-1)}, "The optimiser cannot be made: ValueError: Inv"),
    "no number": ({"clip_norm": 0.0}, "clip_norm=0.0 must be a positive number, or None"),
    "not a number": ({"clip_norm": float("nan")}, "clip_norm=nan must be a positive number"),
    "wants a loss": ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "scheduler makes a ReduceLROnPlateau, but it is"),
    "no scheduler": ({"scheduler": NoScheduler}, "scheduler makes a NoScheduler, but it is stepped once"),
    "a scheduler that fails": ({"scheduler": lr_scheduler.StepLR}, "The scheduler cannot be made: TypeError"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_stepped_is_refused(kind: str):
    rules, message = REFUSED[kind]
    with pytest.raises(PlanError) as caught:
        make_recipe(Plan(split_size=1), nn.Conv2d(3, 2, 1), **rules)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
