"""Combinations in which ranks once computed something else than one process, or waited for ever."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler import local_rules
from mpi4dl_nb.engines.compiler.trace_cache import Loss
from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program.effects import Phase
from mpi4dl_nb.engines.train.oracle import ReferenceTraining
from mpi4dl_nb.engines.train.recipe import prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import verify
from tests.zoo import Segmenter, Skips


class LongSkip(nn.Module):
    """What the first layer makes is read by three later ones; a value of no image is read in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if not n else 4, 4, 3, padding=1) for n in range(4))
        self.gain = nn.Parameter(torch.linspace(0.1, 0.4, 4).view(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.layers[0](x))
        x = torch.relu(self.layers[1](first))
        gain = self.gain.exp()
        x = (x + first) * gain
        x = torch.relu(self.layers[2](x))
        return ((self.layers[3](x) + first) * gain).mean((2, 3))


class OneNormTwice(nn.Module):
    """The same batch norm behind two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3))


class Distilled(nn.Module):
    """A student is compared with a teacher that is not trained; both read the same image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.teacher, self.student = (nn.Conv2d(3 if not n else 4, 4, 3, padding=1) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.backbone(x)
        with torch.no_grad():
            aim = self.teacher(shared)
        return (self.student(shared) - aim).square().mean((2, 3))


class SeveralOutputs(nn.Module):
    """Operators of several outputs behind the first layer; one of them splits a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 80).view(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x).chunk(2, 1)
        pooled, places = nn.functional.max_pool2d(self.second(torch.cat([one, two.relu()], 1)), 2, return_indices=True)
        found, _ = (pooled + places.sin() / 8).max(2)
        keys, values = self.weight.chunk(2)
        rows = found.mean(2)
        return functional.linear(rows, keys).sigmoid() * functional.linear(rows, values)


class Sequence(nn.Module):
    """Rows of an image, read one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.recurrent, self.last = nn.Conv2d(3, 4, 3), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(self.first(x).relu().flatten(2).transpose(1, 2))[0].mean(1))


def compute_mean_by_hand(prediction: Tensor, labels: Tensor) -> Tensor:
    """A mean whose divisor is a constant of the whole micro-batch."""
    each = functional.cross_entropy(prediction, labels, reduction="none")
    return (each * torch.full((len(labels),), 1.0 / len(labels), dtype=each.dtype)).sum()


CORNERS: dict[str, tuple[nn.Module, dict[str, Any], Loss]] = {
    "a skip to two stages of one rank": (
        LongSkip(), {"split_size": 4, "schedule": "interleaved", "stages_per_rank": 2}, nn.CrossEntropyLoss(),
    ),
    "the same, shared": (
        LongSkip(), {"split_size": 4, "schedule": "interleaved", "stages_per_rank": 2, "local_dp": 2},
        nn.CrossEntropyLoss(),
    ),
    "one norm twice": (OneNormTwice(), {"split_size": 1, "parts": 2, "accumulate": 2}, nn.CrossEntropyLoss()),
    "one norm twice, on tiles": (
        OneNormTwice(), {"split_size": 1, "spatial_size": 1, "slice_method": "1x2", "parts": 2}, nn.CrossEntropyLoss(),
    ),
    "a constant of the number of images": (Skips(), {"split_size": 2, "local_dp": 2}, compute_mean_by_hand),
    "class weights that differ between shares": (
        Skips(), {"split_size": 2, "local_dp": 2},
        nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 3.0, 4.0]), ignore_index=1),
    ),
    "a layer without gradients that ends a stage": (
        Distilled(),
        {
            "split_size": 2, "spatial_size": 1, "slice_method": "1x2", "balance": (2, 1),
            "halo_d2": True, "fused_layers": 2,
        },
        nn.CrossEntropyLoss(),
    ),
    "several outputs, shared": (
        SeveralOutputs(), {"split_size": 2, "spatial_size": 1, "slice_method": "1x2", "local_dp": 2},
        nn.CrossEntropyLoss(),
    ),
    "several outputs of a weight that waits": (
        SeveralOutputs(), {"split_size": 2, "schedule": "zero_bubble", "parts": 2}, nn.CrossEntropyLoss(),
    ),
    "a recurrent layer whose weights wait": (
        Sequence(), {"split_size": 2, "schedule": "zero_bubble", "parts": 2}, nn.CrossEntropyLoss(),
    ),
    "a group norm whose weights wait": (
        Segmenter(), {"split_size": 4, "schedule": "zero_bubble", "parts": 2, "local_dp": 2}, nn.CrossEntropyLoss(),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of torch.export, for weights of the GRU
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CORNERS)
def test_exact(name: str):
    model, knobs, loss = CORNERS[name]
    torch.manual_seed(0)
    plan = Plan(**{"spatial_size": 0, "precision": "float64", **knobs})
    recipe = prepare(model, plan, (4, 3, 12, 16), loss)
    told = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))[0]
    assert told["ok"], told


class OfImages(nn.Module):
    """A function of an image (N, 4, H, W), between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


IN_MEMORY_ORDER = {
    "every other column": lambda x: x.as_strided((*x.shape[:3], 8), (768, 192, 16, 2)).mean((2, 3)),
    "complex": lambda x: torch.view_as_complex(x.view(*x.shape[:3], 8, 2)).abs().mean((2, 3)),
    "complex, by pairs of columns": lambda x: torch.view_as_complex(x[..., :2]).abs().mean(2),
    "as bits and back": lambda x: (x + x.detach().view(torch.int32).view(torch.float64)).mean((2, 3)),
    "in the shape of another": lambda x: x.view_as(x.new_empty(x.shape[0], 4, 16, 12)).softmax(2).square().sum((2, 3)),
}


@pytest.mark.parametrize("name", IN_MEMORY_ORDER)
def test_operators_that_read_the_order_in_memory_are_exact(name: str):
    """Ranks have images with channels last."""
    torch.manual_seed(0)
    model, loss = OfImages(IN_MEMORY_ORDER[name]), nn.CrossEntropyLoss()
    plan = Plan(split_size=1, spatial_size=0, parts=2, precision="float64")
    recipe = prepare(model, plan, (4, 3, 12, 16), loss)
    told = run_ranks(1, lambda world: verify(world, recipe, model, loss, 0))[0]
    assert told["ok"], told


def test_the_memory_of_a_view_is_refused():
    for function in (lambda x: x.permute(0, 2, 3, 1), lambda x: x[:, :2], lambda x: x[1:]):
        model = OfImages(lambda x, cut=function: x.mean((2, 3)) + cut(x).as_strided((4,), (1,)))
        with pytest.raises(TraceError, match=r"as_strided.* reads the memory of a view .* Call .contiguous\(\)"):
            prepare(model, Plan(spatial_size=0), (4, 3, 12, 16))


def write_some(x: Tensor) -> Tensor:
    x = 2 * x
    x[[0, 1]] = 0.5
    return x.mean((2, 3))


def write_masked(x: Tensor) -> Tensor:
    x = 2 * x
    x[x > 1] = 0.5
    return x.mean((2, 3))


@pytest.mark.parametrize("write", [write_some, write_masked])
def test_images_that_ranks_share_are_written_by_their_numbers_in_the_batch(write: Callable[[Tensor], Tensor]):
    """Both of the first two are images of the first rank; a mask has an entry for each image."""
    plan = Plan(split_size=2, spatial_size=0, local_dp=2, precision="float64")
    check_exact(OfImages(write), plan, nn.CrossEntropyLoss())


def check_exact(model: nn.Module, plan: Plan, loss: Loss) -> None:
    recipe = prepare(model, plan, (4, 3, 12, 16), loss)
    comparison = run_ranks(plan.ranks, lambda world: verify(world, recipe, model, loss, 0))[0]
    assert comparison["ok"], comparison


class Looked(nn.Module):
    """A table of numbers for each image."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first, self.table = nn.Conv2d(3, 4, 3), nn.Embedding(7, 4, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).mean((2, 3)) * self.table(torch.arange(4, device=x.device))


class ComplexFactor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.factor = nn.Conv2d(3, 4, 3), nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x).mean((2, 3)) * self.factor).abs()


def test_gradients_of_other_kinds_are_refused_with_the_mend():
    with pytest.raises(TraceError, match=r"aten.embedding.default in table.* makes a sparse gradient.* sparse=False"):
        prepare(Looked(sparse=True), Plan(spatial_size=0, split_size=1), (4, 3, 12, 16))
    prepare(Looked(sparse=False), Plan(spatial_size=0, split_size=1), (4, 3, 12, 16))
    with pytest.raises(TraceError, match=r"The parameter factor is torch.complex64.*torch.view_as_complex"):
        prepare(ComplexFactor(), Plan(spatial_size=0, split_size=1), (4, 3, 12, 16))
    prepare(ComplexFactor().requires_grad_(False).eval(), Plan(spatial_size=0, split_size=1), (4, 3, 12, 16))


def test_a_step_that_was_given_up_leaves_no_message_behind():
    """The gradients of one replica are on their way when the other one fails."""
    plan = Plan(split_size=1, spatial_size=0, data_parallel=2, precision="float64")
    recipe = prepare(Skips(), plan, (2, 3, 12, 16))
    good = {"images": torch.ones(4, 3, 12, 16).double(), "labels": torch.tensor([0, 1, 2, 3])}
    bad = {**good, "images": 1e3 * good["images"]}

    begun = threading.Event()

    def work(world: LoopbackWorld) -> dict[int, float]:
        training = RankTraining(world, recipe)
        training.start(training.cut(bad))
        training.worker.step()  # both count the labels
        if world.rank == 1:
            while training.program.steps[training.worker.position].phase is not Phase.UPDATE:
                training.worker.step()
            begun.set()
        else:
            assert begun.wait(timeout=30)
            world.revoke()
        world.recover()
        return dict(training.step(training.cut(good)).losses)

    losses = run_ranks(2, work)
    assert all(0 < loss < 10 for found in losses for loss in found.values())


def test_what_no_gradient_asks_for_is_let_go():
    model = Skips()
    for parameter in (*model.first.parameters(), *model.norm.parameters(), *model.second.parameters()):
        parameter.requires_grad_(False)
    plan = Plan(split_size=1, spatial_size=1, slice_method="1x2", precision="float64")
    recipe = prepare(model.double(), plan, (2, 3, 12, 16))
    whole = {"images": torch.ones(2, 3, 12, 16).double(), "labels": torch.tensor([0, 1])}

    def collect_leaves(world: LoopbackWorld) -> set[str]:
        training = RankTraining(world, recipe)
        training.start(training.cut(whole))
        while training.worker.program.steps[training.worker.position].phase is Phase.FORWARD:
            training.worker.step()
        names = set(training.worker.micro_batch_states[0].leaves)
        while not training.worker.done:
            training.worker.step()
        return names

    for names in run_ranks(2, collect_leaves):
        assert not any("conv2d.moments" in name or name == "relu" or "images.window" in name for name in names)


class Behind(nn.Module):
    """A function behind a convolution: (N, 3, H, W) -> (N, 5)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Conv2d(3, 4, 3), nn.Linear(4, 5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.last(self.first(x).mean((2, 3))))


def compute_image_loss(prediction: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(prediction.mean(1), labels.to(prediction.dtype))


class OverTime(nn.Module):
    """Takes the images for the times of one series."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


def draw_factors(x: Tensor) -> Tensor:
    return x * torch.poisson(torch.ones(5))


JOINED = {
    "joined": (lambda x: x + x.median(), nn.CrossEntropyLoss()),
    "in pairs": (lambda x: x + torch.pdist(x).square().mul(-2).exp().mean().log(), nn.CrossEntropyLoss()),
    "a series": (OverTime(), nn.CrossEntropyLoss()),
    "tiled": (lambda x: x + x.tile(2, 1).mean(), nn.CrossEntropyLoss()),
    "sorted": (lambda x: x.msort(), nn.CrossEntropyLoss()),
    "all axes": (lambda x: torch.fft.fftn(x).abs(), nn.CrossEntropyLoss()),
    "repeated": (lambda x: x.repeat(2, 1)[: len(x)], nn.CrossEntropyLoss()),
    "images as classes": (lambda x: x, compute_image_loss),
    "by distance": (lambda x: x + torch.cdist(x, x) @ x, nn.CrossEntropyLoss()),
    "a diagonal": (lambda x: x + (x @ x.T).diag()[:, None], nn.CrossEntropyLoss()),
    "an orthogonal basis": (lambda x: torch.linalg.qr(x[:, :2])[0] @ x[:2], nn.CrossEntropyLoss()),
    "split at once": (lambda x: x + x[:, 0].hsplit(2)[1].repeat(2)[:, None], nn.CrossEntropyLoss()),
    "picked": (lambda x: x + x.flatten().take(torch.arange(len(x)))[:, None], nn.CrossEntropyLoss()),
}
ALONG = {
    "along the images": (lambda x: x.softmax(0), nn.CrossEntropyLoss()),
    "their mean": (lambda x: x - x.mean(0) + x.var(0) + x.amax(0), nn.CrossEntropyLoss()),
    "their products": (lambda x: x + x @ (x.T @ x), nn.CrossEntropyLoss()),
    "similar": (lambda x: (x @ x.T)[:, :3].exp(), nn.CrossEntropyLoss()),
    "rolled": (lambda x: x.roll(1), nn.CrossEntropyLoss()),
    "overlapping": (lambda x: x + x.unfold(0, 2, 1).square().mean(), nn.CrossEntropyLoss()),
    "one more": (lambda x: x + functional.pad(x, (0, 0, 1, 0)).mean(), nn.CrossEntropyLoss()),
    "mixed": (lambda x: 0.7 * x + 0.3 * x.flip(0), nn.CrossEntropyLoss()),
    "the first": (lambda x: x + x[:1] + x[1], nn.CrossEntropyLoss()),
    "times before images": (
        lambda x: x[..., None].permute(1, 0, 2).reshape(5 * len(x), 1).reshape(5, len(x)).T, nn.CrossEntropyLoss(),
    ),
}  # fmt: skip
SHARING = ({"split_size": 1}, {"split_size": 2, "slice_method": "1x2", "spatial_size": 1})


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")  # of torch.export, for weights of the GRU
@pytest.mark.parametrize("name", [*JOINED, *ALONG])
def test_what_joins_the_images_of_several_ranks_is_exact(name: str):
    function, loss = (JOINED | ALONG)[name]
    for knobs in SHARING:
        check_exact(Behind(function), Plan(**{"spatial_size": 0, **knobs}, local_dp=2, precision="float64"), loss)


@pytest.mark.parametrize("name", sorted(ALONG.keys() - {"similar", "rolled"}))  # all pairs, and a flat roll
def test_what_is_summed_or_exchanged_along_the_images_is_exact_at_any_size(name: str, monkeypatch: pytest.MonkeyPatch):
    """Nothing is gathered."""
    monkeypatch.setattr(local_rules, "WHOLE_PX", 3)
    function, loss = ALONG[name]
    check_exact(Behind(function), Plan(split_size=1, spatial_size=0, local_dp=2, precision="float64"), loss)


def count_classes(prediction: Tensor, labels: Tensor) -> Tensor:
    counts = torch.zeros(4, dtype=torch.long).index_add(0, labels % 2, torch.ones_like(labels))
    return (functional.cross_entropy(prediction, labels, reduction="none") * counts).mean()


def count_more_classes(prediction: Tensor, labels: Tensor) -> Tensor:
    counts = torch.zeros(4, dtype=torch.long).scatter_add(0, labels % 4, torch.ones_like(labels))
    return (functional.cross_entropy(prediction, labels, reduction="none") * counts).mean()


@pytest.mark.parametrize("loss", [count_classes, count_more_classes])
def test_as_many_classes_as_images_are_no_images(loss: Loss):
    check_exact(Behind(lambda x: x), Plan(split_size=1, spatial_size=0, local_dp=2, precision="float64"), loss)


def test_the_first_axis_of_a_layer_may_be_time():
    weight, bias = torch.rand(3, 4, 4).double(), torch.rand(4).double()

    def convolve(x: Tensor) -> Tensor:
        return torch.conv_tbc(x.flatten(2).transpose(1, 2).contiguous(), weight, bias, 1).mean(1)

    check_exact(
        OfImages(convolve), Plan(split_size=1, spatial_size=0, local_dp=2, precision="float64"), nn.CrossEntropyLoss()
    )


def test_large_images_are_computed_one_by_one_by_operators_without_a_rule():
    def rotate(x: Tensor) -> Tensor:
        return torch.fft.rfft2(x.rot90(1, (2, 3)).argsort(1) * x).abs().mean((2, 3))

    prepare(OfImages(rotate), Plan(split_size=1, spatial_size=0, local_dp=2), (8, 3, 512, 512))


@pytest.mark.parametrize("seed", [2, 11, 15])
def test_rounding_that_an_ulp_does_not_change_is_no_fault(seed: int):
    """The softmax gradients of four images add up to the same multiple of an ulp for many weights, and not to 0."""
    torch.manual_seed(seed)
    plan = Plan(split_size=1, spatial_size=0, local_dp=2, precision="float64")
    check_exact(Behind(lambda x: x), plan, compute_image_loss)


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("name", ["drawn", *JOINED])
def test_what_images_of_several_ranks_cannot_do_is_refused_with_the_mend(name: str, monkeypatch: pytest.MonkeyPatch):
    """Behind the spatial stages, to end them earlier would not help. Few numbers are gathered: here they are many."""
    function, loss = {"drawn": (draw_factors, nn.CrossEntropyLoss()), **JOINED}[name]
    monkeypatch.setattr(local_rules, "WHOLE_PX", 3)
    for knobs in SHARING:
        with pytest.raises(TraceError, match=r"local_dp ranks share the images .* Use local_dp=1, or data_parallel"):
            prepare(Behind(function), Plan(**{"spatial_size": 0, **knobs}, local_dp=2), (4, 3, 12, 16), loss)
    prepare(Behind(function), Plan(spatial_size=0, data_parallel=2), (4, 3, 12, 16), loss)


class ByClass(nn.Module):
    """A loss that looks up a factor for each label."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factors", torch.linspace(0.5, 1.5, 5))

    def forward(self, prediction: Tensor, labels: Tensor) -> Tensor:
        return (self.factors[labels] * functional.cross_entropy(prediction, labels, reduction="none")).mean()


def with_an_axis(prediction: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(prediction[:, :1], labels[:, None].to(prediction.dtype))


SHARED = {
    "channels last": (
        lambda x: functional.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2).mean((2, 3)),
        nn.CrossEntropyLoss(),
    ),
    "an axis more": (lambda x: torch.stack([x.mean((2, 3)), x.amax((2, 3))], 1).mean(1), with_an_axis),
    "a table": (lambda x: x.mean((2, 3)), ByClass()),
    "more channels": (lambda x: x.tile((1, 4, 1, 1))[:, 3:7].mean((2, 3)), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("name", SHARED)
def test_ranks_share_images_that_each_operator_treats_alone(name: str):
    torch.manual_seed(0)
    function, loss = SHARED[name]
    model, plan = OfImages(function), Plan(split_size=2, spatial_size=0, local_dp=2, precision="float64")
    check_exact(model, plan, loss)


def test_one_process_takes_labels_without_images():
    reference = ReferenceTraining(nn.Conv2d(3, 2, 1), lambda p, y: (p * y).sum(), torch.optim.SGD)
    assert math.isfinite(reference.step({"images": torch.randn(2, 3, 4, 4), "labels": torch.tensor(2.0)}))


def test_labels_without_images_are_refused_before_they_are_cut():
    for knobs in ({"parts": 2}, {"accumulate": 2}, {"local_dp": 2}):
        with pytest.raises(PlanError, match=r"labels of shape \(\) .* first axis"):
            prepare(
                Skips(), Plan(spatial_size=0, **knobs), (4, 3, 12, 16), lambda p, y: (p * y).sum(),
                labels=TensorSpec((), "float32"),
            )  # fmt: skip


class Features(nn.Module):
    """Returns what the first of three layers makes before the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if not n else 4, 4, 3, padding=1) for n in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.layers[0](x)
        return features, self.layers[2](self.layers[1](features)).mean((2, 3))


def test_a_prediction_that_the_last_stage_does_not_have_is_refused():
    def compute_loss(made: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return functional.cross_entropy(made[1], labels)

    labels = TensorSpec((4,), "int64")
    with pytest.raises(PlanError, match="stage 2 neither makes nor reads the model's first output"):
        prepare(Features(), Plan(split_size=3, spatial_size=0), (4, 3, 12, 16), compute_loss, labels=labels)
    prepare(Features(), Plan(split_size=1, spatial_size=0), (4, 3, 12, 16), compute_loss, labels=labels)
