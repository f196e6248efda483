"""What a user's function makes of the parameters: on ranks what it is in one process, or refused before they start.

The reference is a plain float64 loop of PyTorch over the whole model.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.optimiser_trial import count_states
from mpi4dl_nb.engines.train.optimisers import collect_parameter_specs
from mpi4dl_nb.engines.train.recipe import prepare

SHAPE = (4, 3, 12, 10)
STAGES = Plan(split_size=3, spatial_size=0, precision="float64")
TILES = Plan(split_size=2, spatial_size=1, slice_method="1x2", precision="float64")
MIRRORED = Plan(split_size=2, spatial_size=0, bidirectional=True, parts=2, precision="float64")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.body = nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)  # of no use in forward

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.stem(images)).relu()).relu().mean((2, 3)))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def make_batches(steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SHAPE, generator=generator).double(), torch.randint(3, SHAPE[:1], generator=generator))
        for _ in range(steps)
    ]


def train_in_one_process(model: nn.Module, optimiser: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]):
    """The losses of a plain loop; the model is trained."""
    losses = []
    for images, labels in batches:
        optimiser.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


# The same functions make the optimiser of a plain model, and those of ranks.


def group_by_layer(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    rates = {"stem": 0.01, "norm": 0.02, "body": 0.05, "head": 0.2, "spare": 0.3}
    return torch.optim.SGD(
        [{"params": [(n, p)], "lr": rates[n.split(".")[0]]} for n, p in named_parameters], momentum=0.9
    )


def group_by_decay(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    named = list(named_parameters)
    plain = [p for n, p in named if n.startswith("norm") or n.endswith("bias")]
    decayed = [p for n, p in named if not (n.startswith("norm") or n.endswith("bias"))]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0}], lr=0.01)


def make_optimiser_of_head(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    named = list(named_parameters)
    for name, weight in named:
        weight.requires_grad_(name.startswith("head"))
    return torch.optim.SGD([p for n, p in named if n.startswith("head")], lr=0.1, momentum=0.9)


def group_by_position(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD([{"params": params[:3], "lr": 0.01}, {"params": params[3:], "lr": 0.3}], lr=1.0)


def group_by_shape(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    params = list(params)
    matrices, others = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    return torch.optim.Adam([{"params": matrices, "lr": 0.02}, {"params": others}], lr=0.1)


NAMED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "by layer": group_by_layer,
    "norms are not decayed": group_by_decay,
    "head only": make_optimiser_of_head,
}
LISTED = {"by position": group_by_position, "by shape": group_by_shape}


def get_optimiser_function(name: str) -> Callable[..., torch.optim.Optimizer]:
    return (LISTED | NAMED)[name]


def make_plain_optimiser(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return LISTED[name](model.parameters()) if name in LISTED else NAMED[name](model.named_parameters())


def assert_trained_alike(training: Training, model: nn.Module, losses: list[float], wanted: list[float]) -> None:
    assert losses == pytest.approx(wanted, rel=1e-12)
    state = training.state_dict()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", [STAGES, TILES, MIRRORED], ids=["stages", "tiles", "both directions"])
@pytest.mark.parametrize("name", [*NAMED, *LISTED])
def test_groups_mean_on_ranks_what_they_mean_in_one_process(name: str, plan: Plan):
    model, before = make_net(), make_net().state_dict()
    batches = make_batches()
    if plan is MIRRORED:
        batches = [(torch.cat([x, x.flip(0)]), torch.cat([y, y.flip(0)])) for x, y in batches]
    wanted = train_in_one_process(model, make_plain_optimiser(name, model), batches)
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(make_net(), plan, cluster, SHAPE, optimiser=get_optimiser_function(name))
        assert_trained_alike(training, model, [training.step(*batch) for batch in batches], wanted)
        assert training.verify()["ok"]
    moved = {key.split(".")[0] for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert moved == ({"head"} if name == "head only" else {"stem", "norm", "body", "head"})


@pytest.mark.nightly
def test_over_mpi_two_groups_with_a_rate_each_and_the_head_alone():
    """The ranks are other processes, and the first stage has none of the head's parameters.

    The functions stand here, as in a cell: ranks cannot import this file.
    """

    def make_optimiser_with_two_rates(named_parameters):
        named = dict(named_parameters)
        head = [named.pop("head.weight"), named.pop("head.bias")]
        return torch.optim.SGD([{"params": head, "lr": 0.2}, {"params": named.values()}], lr=0.01, momentum=0.9)

    def make_head_optimiser(named_parameters):
        named = dict(named_parameters)
        for name, weight in named.items():
            weight.requires_grad_(name.startswith("head"))
        return torch.optim.SGD([(n, p) for n, p in named.items() if n.startswith("head")], lr=0.1)

    plan = Plan(split_size=2, spatial_size=0, precision="float64")
    with Cluster(2) as cluster:
        for make in (make_optimiser_with_two_rates, make_head_optimiser):
            layers = {"stem": nn.Conv2d(3, 4, 3), "act": nn.ReLU(), "body": nn.Conv2d(4, 6, 3)}
            layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(6, 3)}
            model = nn.Sequential(OrderedDict(layers)).double()
            mine = copy.deepcopy(model)
            wanted = train_in_one_process(model, make(model.named_parameters()), make_batches())
            training = Training(mine, plan, cluster, SHAPE, optimiser=make)
            assert_trained_alike(training, model, [training.step(*batch) for batch in make_batches()], wanted)


def test_a_scheduler_has_a_rule_for_each_group_on_every_stage_and_goes_on_under_another_plan(tmp_path: Path):
    """`LambdaLR` with a list wants all groups, also on a stage that has no weight of some."""
    paced = partial(lr_scheduler.LambdaLR, lr_lambda=[lambda step: 1 / (1 + step)] + [lambda step: 1.0] * 7)
    layers = ("stem", "norm", "body", "head")

    def make(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        named = [(n, p) for n, p in named_parameters if not n.startswith("spare") or p.requires_grad_(False) is None]
        groups = [
            {"params": [p for n, p in named if n == f"{layer}.{of}"]} for layer in layers for of in ("weight", "bias")
        ]
        return torch.optim.SGD(groups, lr=0.2, momentum=0.9)

    model, batches = make_net(), make_batches(5)
    optimiser = make(model.named_parameters())
    rates = paced(optimiser)
    for batch in batches:
        train_in_one_process(model, optimiser, [batch])
        rates.step()
    with Cluster(3, backend="loopback") as cluster:
        first = Training(make_net(), STAGES, cluster, SHAPE, optimiser=make, scheduler=paced)
        for batch in batches[:3]:
            first.step(*batch)
        first.save(tmp_path)
        second = Training(make_net(), TILES, cluster, SHAPE, optimiser=make, scheduler=paced)
        second.load(tmp_path)
        for batch in batches[3:]:
            second.step(*batch)
        assert_trained_alike(second, model, [], [])


# ---- matrices


class Orthogonal(torch.optim.Optimizer):
    """Moves matrices by an orthogonal one, as Muon does, and everything else by its gradient."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        for group in self.param_groups:
            if group.get("orthogonal") and any(p.ndim < 2 or min(p.shape) < 2 for p in group["params"]):
                raise ValueError("matrices only")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p].setdefault("momentum", torch.zeros_like(p))
                held.mul_(group["momentum"]).add_(p.grad)
                move = held
                if group.get("orthogonal"):
                    turned = held.flatten(1) / held.norm()
                    for _ in range(3):
                        turned = 1.5 * turned - 0.5 * turned @ turned.T @ turned
                    move = turned.view_as(held)
                p.add_(move, alpha=-group["lr"])


def make_orthogonal(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    params = list(params)
    matrices, others = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return Orthogonal([{"params": matrices, "orthogonal": True}, {"params": others}])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", [STAGES, TILES], ids=["stages", "tiles"])
def test_an_optimiser_of_matrices_is_tried_on_the_models_shapes(plan: Plan):
    model = make_net()
    wanted = train_in_one_process(model, make_orthogonal(model.parameters()), make_batches())
    with Cluster(plan.ranks, backend="loopback") as cluster:
        training = Training(make_net(), plan, cluster, SHAPE, optimiser=make_orthogonal)
        assert_trained_alike(training, model, [training.step(*batch) for batch in make_batches()], wanted)
        assert training.memory()  # counts the optimiser's state on the same shapes


def make_muon(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    named = list(named_parameters)
    for name, weight in named:
        weight.requires_grad_(name == "head.weight")
    return torch.optim.Muon([(n, p) for n, p in named if n == "head.weight"], lr=0.02)


def test_torchs_muon_moves_the_matrix_that_it_is_given():
    model = make_net()
    wanted = train_in_one_process(model, make_muon(model.named_parameters()), make_batches())
    with Cluster(3, backend="loopback") as cluster:
        training = Training(make_net(), STAGES, cluster, SHAPE, optimiser=make_muon)
        losses = [training.step(*batch) for batch in make_batches()]
    assert losses == pytest.approx(wanted, rel=1e-6)  # it rounds to bfloat16 inside
    with pytest.raises(PlanError, match=r"Muon only supports 2D parameters .*4, 3, 3, 3"):
        prepare(make_net(), STAGES, SHAPE, optimiser=torch.optim.Muon)


@pytest.mark.parametrize(
    ("optimiser", "states"),
    [(torch.optim.SGD, 0), (partial(torch.optim.SGD, momentum=0.9), 1), (torch.optim.Adam, 2),
     (partial(torch.optim.Adam, amsgrad=True), 3), (make_orthogonal, 1), (make_muon, 1)],
)  # fmt: skip
def test_states_are_counted_on_the_models_shapes(optimiser: Callable[..., Any], states: int):
    assert count_states(optimiser, collect_parameter_specs(make_net(), None, torch.float32)) == states


def test_states_are_counted_on_a_large_weight_if_all_are_large(monkeypatch):
    monkeypatch.setattr("mpi4dl_nb.engines.train.optimiser_trial._COUNTED", 3)
    specs = collect_parameter_specs(nn.Linear(2, 2, bias=False), None, torch.float32)
    assert count_states(torch.optim.Adam, specs) == 2


# ---- refused before a rank starts


class Normed(torch.optim.SGD):
    """Divides by the norm of all gradients that it has: on a rank those of its stage."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise, which each rank would draw by itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p))
        return super().step(closure)


GIVEN, CALLS = make_net(), count(1)
SGD = partial(torch.optim.SGD, lr=0.1)


def make_unfreezing_optimiser(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return SGD([weight.requires_grad_() for weight in params])


def select_by_name(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return SGD([p for n, p in named_parameters if "head" not in n])


def make_hooked_optimiser(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    given = list(params)
    given[0].register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return SGD(given)


NO_GROUP, UNPACKED = "The optimiser has no group for ", "The optimiser cannot be made: ValueError: too many values to "
REFUSED: dict[str, tuple[Any, str]] = {
    "the model's own": (lambda params: SGD(GIVEN.parameters()), "The optimiser has 10 parameters that its function w"),
    "some of its own": (lambda params: SGD([*params, nn.Parameter(torch.zeros(2))]), "The optimiser has 1 parameters"),
    "copies": (lambda params: SGD([nn.Parameter(p.detach().clone()) for p in params]), "The optimiser has 10 param"),
    "a slice": (lambda params: SGD(list(params)[-2:]), f"{NO_GROUP}8 of the 10 parameters that its function was gi"),
    "by names": (select_by_name, f"{NO_GROUP}2 of the 10 parameters that its function was given: head.weight, head."),
    "pairs unasked": (lambda ps: SGD([p for n, p in ps]),
                      f"{UNPACKED}unpack (expected 2). It is given (name, parameter) pairs if its first argument is"),
    "an optimiser": (SGD(GIVEN.parameters()), "optimiser is a SGD, not a function."),
    "no optimiser": (lambda params: None, "optimiser makes a NoneType, not a torch.optim.Optimizer"),
    "two optimisers": (lambda params: [SGD(params)], "optimiser makes a list, not a torch.optim.Optimizer"),
    "rates by chance": (lambda params: torch.optim.SGD(params, lr=random.random()), "The optimiser's function gives "),
    "rates by the calls": (lambda params: torch.optim.SGD(params, lr=next(CALLS)), "The optimiser's function gives "),
    "a norm of all": (partial(Normed, lr=0.1), "The optimiser moves "),
    "drawn at random": (partial(Noisy, lr=0.1), "The optimiser moves a weight otherwise when it steps again from the "),
    "a hook of a gradient": (make_hooked_optimiser,
                             "The optimiser's function gives stem.weight a hook of its gradient, which a rank"),
    "sparse gradients": (torch.optim.SparseAdam, "The optimiser SparseAdam cannot step: RuntimeError: SparseAdam doe"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_train_something_else_is_refused(kind: str):
    optimiser, message = REFUSED[kind]
    with pytest.raises(PlanError) as caught:
        prepare(make_net(), STAGES, SHAPE, optimiser=optimiser)
    if kind == "a norm of all":
        assert "otherwise where it has not all weights of the model" in str(caught.value)
    else:
        assert str(caught.value).startswith(message), caught.value
    assert "\n" not in str(caught.value)


def test_what_is_in_no_group_is_named_and_how_to_freeze_it_is_said():
    with pytest.raises(PlanError) as caught:
        prepare(make_net(), STAGES, SHAPE, optimiser=lambda params: SGD(list(params)[-2:]))
    assert "given: stem.weight, stem.bias, norm.weight and 5 more. To freeze them call requires_grad_(" in str(
        caught.value
    )


def test_a_rate_by_a_weights_value_is_refused_where_it_depends_on_other_weights():
    def group_by_size(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        sizes = [float(p.detach().norm()) for p in params]
        middle = sorted(sizes)[len(sizes) // 2]
        rates = [0.1 if size > middle else 0.2 for size in sizes]
        return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in zip(params, rates, strict=True)], lr=1.0)

    with pytest.raises(PlanError, match="choose by the names, positions or shapes"):
        prepare(make_net(), STAGES, SHAPE, optimiser=group_by_size)
    prepare(make_net(), Plan(split_size=1), SHAPE, optimiser=group_by_size)


def test_what_couples_weights_runs_where_each_rank_has_all():
    plan = Plan(split_size=1, slice_method="1x2", precision="float64")
    model, normed = make_net(), partial(Normed, lr=0.1)
    wanted = train_in_one_process(model, normed(model.parameters()), make_batches())
    with Cluster(2, backend="loopback") as cluster:
        training = Training(make_net(), plan, cluster, SHAPE, optimiser=normed)
        assert_trained_alike(training, model, [training.step(*batch) for batch in make_batches()], wanted)


def test_what_the_model_freezes_is_given_and_stays_frozen():
    """As `model.parameters()` has it, so that positions are those of the model."""
    model, mine = make_net(), make_net()
    for each in (model, mine):
        each.body.requires_grad_(False)
    wanted = train_in_one_process(model, group_by_position(model.parameters()), make_batches())
    with Cluster(3, backend="loopback") as cluster:
        training = Training(mine, STAGES, cluster, SHAPE, optimiser=group_by_position)
        assert_trained_alike(training, model, [training.step(*batch) for batch in make_batches()], wanted)
        with pytest.raises(
            PlanError, match=r"sets requires_grad on body.weight, body.bias, which the model has frozen"
        ):
            Training(mine, STAGES, cluster, SHAPE, optimiser=make_unfreezing_optimiser)


def test_a_scheduler_paces_the_optimiser_that_it_is_given():
    other = SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(PlanError, match="scheduler paces another optimiser"):
        prepare(make_net(), STAGES, SHAPE, scheduler=lambda optimiser: lr_scheduler.StepLR(other, 1))


def test_a_model_without_weights_has_nothing_to_pace():
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    plan = Plan(split_size=1, spatial_size=0)
    recipe = prepare(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), plan, (2, 3, 8, 8), scheduler=scheduler)
    assert recipe.make_optimiser({}) is None


class Penalised(nn.Module):
    """A loss that holds the model, to bound its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(prediction, labels) + 0.1 * self.model.head.weight.square().sum()


def test_a_loss_that_reads_the_models_weights_is_refused():
    """Ranks would hold, and train, a second copy of them."""
    model = make_net()
    with pytest.raises(PlanError, match=r"The loss holds the model's parameter head.weight \(as model.head.weight\)"):
        prepare(model, STAGES, SHAPE, loss=Penalised(model))


def test_a_function_leaves_the_model_as_it_is():
    model = make_net()
    before = copy.deepcopy(model.state_dict())
    prepare(model, STAGES, SHAPE, optimiser=get_optimiser_function("head only"))
    assert all(weight.requires_grad for weight in model.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def make_grouping_by_identity(model: Net) -> Callable[..., Any]:
    """The head at a rate of its own, as it is often written: by the identity of the user's own parameters."""
    ids = {id(weight) for weight in model.head.parameters()}

    def group_by_identity(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        head, rest = [], []
        for weight in parameters:
            (head if id(weight) in ids else rest).append(weight)
        return torch.optim.SGD([{"params": rest, "lr": 0.01}, {"params": head, "lr": 0.1}])

    return group_by_identity


def test_groups_by_identity_are_refused_and_the_model_is_as_it_was():
    model = make_net()
    model.stem.weight.requires_grad_(False)
    with pytest.raises(PlanError, match=r"head\.weight, head\.bias into another group.* identity"):
        prepare(model, STAGES, SHAPE, optimiser=make_grouping_by_identity(model))
    assert not model.stem.weight.requires_grad
    assert model.head.weight.requires_grad


def test_a_function_that_freezes_the_users_own_model_is_refused_and_the_model_is_as_it_was():
    model = make_net()

    def make_freezing_optimiser(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        model.body.requires_grad_(False)
        return SGD(parameters)

    with pytest.raises(PlanError, match=r"requires_grad of the model's own body\.weight, body\.bias, and not"):
        prepare(model, STAGES, SHAPE, optimiser=make_freezing_optimiser)
    assert model.body.weight.requires_grad
    model.body.requires_grad_(False)  # the remedy: what is frozen before is no change
    assert "model.body.weight" not in prepare(model, STAGES, SHAPE, optimiser=make_freezing_optimiser).graph.trainable


def test_a_tensor_learning_rate_is_that_of_the_ranks_too():
    rate = torch.tensor(0.1)
    function = partial(torch.optim.SGD, lr=rate)
    prepare(make_net(), STAGES, SHAPE, optimiser=function, scheduler=partial(lr_scheduler.LinearLR, start_factor=0.1))
    assert rate == torch.tensor(0.1)


def test_a_group_that_no_parameter_of_the_model_is_in_is_right():
    def group_by_name(named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        pairs = list(named_parameters)
        groups = [[w for n, w in pairs if "absent" in n], [w for n, w in pairs if "absent" not in n]]
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1)

    prepare(make_net(), STAGES, SHAPE, optimiser=group_by_name)
