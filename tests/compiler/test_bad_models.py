"""Models that tiles cannot run: refused with operator, module, line and mend. Never a silent wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.errors import PlanError, TraceError
from mpi4dl_nb.engines.graph.model_graph import TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.train.recipe import prepare
from tests.exact import (
    assert_exact,
    close,
    compute_weighted_sum,
    make_tiled_plan,
    make_whole_numbers,
    with_whole_weights,
)

Function = Callable[[Tensor], Tensor]


class Op(nn.Module):
    """A plain function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """Two layers, the second of which ends in the operator: (1, 2, H, W) -> what it makes of (1, 4, H, W)."""

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.stem, self.second, self.op = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.second(self.stem(x)))


# ---- operators without a rule


class RunningSum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(2)


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).real


class ItselfBelowItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=2)


class RightHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, dim=-1)[1]


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.permute(0, 1, 3, 2)


class ShareOfTheRow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


# Whoever writes an entry for one of these strikes it here. But for the last one they run on images of few pixels.
LARGE = (1, 2, 136, 128)
BAD: dict[type[nn.Module], str] = {
    RunningSum: "aten.cumsum.default",
    ItselfBelowItself: "aten.cat.default",
    RightHalf: "aten.chunk.default",
    Product: "aten.matmul.default",
    ShareOfTheRow: "aten.softmax.int",
    Spectrum: "aten.fft_fft2.default",
}
every_bad_operator = pytest.mark.parametrize(("op", "operator"), BAD.items(), ids=[op.__name__ for op in BAD])


def find_line(op: type[nn.Module]) -> tuple[int, str]:
    """Number and text of the line in its forward."""
    first = op.forward.__code__.co_firstlineno
    return first + 1, Path(__file__).read_text(encoding="utf-8").splitlines()[first].strip()


@pytest.mark.sampled(4)
@every_bad_operator
@pytest.mark.parametrize("grid", ["1x2", "2x1", "2x2"])
def test_an_operator_without_a_rule_is_refused_with_the_mend(op: type[nn.Module], operator: str, grid: str):
    with pytest.raises(TraceError) as caught:
        prepare(Net(op()), make_tiled_plan(grid), LARGE, lambda prediction, labels: prediction.sum())
    told, (line, text) = str(caught.value), find_line(op)
    assert told.startswith(f"{operator} (reads ")
    assert f'It is in op, "{__file__}", line {line}: {text}. ' in told
    assert "Either end the spatial stages before it (a smaller spatial_size, or another balance)" in told
    assert (
        f'write a rule: a function like those in engines/compiler/entries, under @register_rule("{operator}").' in told
    )


@pytest.mark.sampled(2)
@every_bad_operator
@pytest.mark.parametrize("grid", ["1x1", "1x2", "2x2"])
def test_the_mend_mends(op: type[nn.Module], operator: str, grid: str):
    """Behind the joint, on one rank, any operator runs, and is exact."""
    plan = Plan(split_size=2, spatial_size=1, slice_method=grid, balance=(1, 1), precision="float64")
    same = close if op in (ShareOfTheRow, Spectrum) else torch.equal
    assert_exact(with_whole_weights(Net(op())), make_whole_numbers(1, 2, 8, 8), plan, same=same)


def test_the_error_comes_before_anything_runs():
    """A plan with an operator that it cannot run is refused by prepare, on the machine of the user."""
    with pytest.raises(TraceError, match=r"^aten\.fft_fft2\.default "):
        prepare(nn.Sequential(nn.Conv2d(2, 2, 1), Spectrum()), make_tiled_plan("2x2"), (1, 2, 129, 128))


class Position(nn.Module):
    def __init__(self, *size_px: int) -> None:
        super().__init__()
        self.code = nn.Parameter(make_whole_numbers(1, 2, *size_px))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.code


def test_pixels_that_the_model_owns_are_cut():
    assert_exact(nn.Sequential(Position(8, 8)), make_whole_numbers(1, 2, 8, 8), make_tiled_plan("2x2"))


def test_more_pixels_than_the_image_has_are_gathered_or_refused():
    """One row of the image meets eight rows of the model."""
    assert_exact(nn.Sequential(Position(8, 8)), make_whole_numbers(1, 2, 1, 8), make_tiled_plan("1x2"))
    with pytest.raises(TraceError) as caught:
        prepare(nn.Sequential(Position(8, 16_385)), make_tiled_plan("1x2"), (1, 2, 1, 16_385), compute_weighted_sum)
    told = str(caught.value)
    assert told.startswith("aten.add.Tensor in 0, ")
    assert "joins a tiled value of (1, 16385) pixels with model.0.code of shape (1, 2, 8, 16385)" in told
    assert "return x + self.code" in told
    assert "end the spatial stages before this layer (spatial_size, balance)" in told


@pytest.mark.parametrize("grid", ["1x2", "2x2"])
def test_draws_without_a_rule_are_refused(grid: str):
    """Whether they have pixels or not: each tile would draw numbers of its own."""
    told = get_verdict(lambda x: x * torch.empty_like(x).cauchy_(), grid)
    assert told.startswith("aten.cauchy.default (reads empty_like) draws random numbers, which the ranks")
    told = get_verdict(lambda x: x * torch.empty(1, 1).cauchy_(), grid)
    assert told.startswith("aten.cauchy.default (reads empty) draws random numbers, which the ranks")


# ---- either exact or refused


def get_verdict(model: nn.Module | Function, grid: str, **how: object) -> str:
    """`exact`, or why it was refused. Anything else fails: wrong numbers, or an error that is not ours."""
    module = model if isinstance(model, nn.Module) else Op(model)
    try:
        assert_exact(module.double(), make_whole_numbers(1, 4, 8, 8, seed=3), make_tiled_plan(grid), **how)
    except TraceError as error:
        return str(error)
    return "exact"


class WithConv(nn.Module):
    """A kernel that tells rows from columns, before or behind which axes are exchanged."""

    def __init__(self, order: tuple[int, ...], conv: nn.Module) -> None:
        super().__init__()
        self.order, self.conv = order, with_whole_weights(conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.permute(self.order))


ACROSS, LAST = (0, 1, 3, 2), (0, 2, 3, 1)
OTHER_AXES: dict[str, Callable[[], nn.Module | Function]] = {
    "conv": lambda: WithConv(ACROSS, nn.Conv2d(4, 4, (3, 1), padding=(1, 0))),
    "conv over channels last": lambda: WithConv(LAST, nn.Conv2d(8, 4, (3, 1), padding=(1, 0))),
    "transposed conv": lambda: WithConv(ACROSS, nn.ConvTranspose2d(4, 4, (3, 2), stride=(1, 2))),
    "max pool": lambda: lambda x: F.max_pool2d(x.permute(ACROSS), (3, 1), 1, (1, 0)),
    "average pool": lambda: lambda x: F.avg_pool2d(x.permute(ACROSS), (2, 1), divisor_override=1),
    "adaptive pool": lambda: lambda x: F.adaptive_avg_pool2d(8 * x.permute(ACROSS), (4, 8)),
    "global pool over channels last": lambda: lambda x: F.adaptive_avg_pool2d(32 * x.permute(LAST), 1).flatten(1),
    "max pool over channels last": lambda: lambda x: F.max_pool2d(x.permute(LAST), (2, 1)),
    "upsample": lambda: lambda x: F.interpolate(x.permute(ACROSS), scale_factor=(2, 1)),
    "pad": lambda: lambda x: F.pad(x.permute(ACROSS), (1, 2, 0, 0)),
    "pad of channels last": lambda: lambda x: F.pad(x.permute(LAST), (1, 1)),
    "slice": lambda: lambda x: x.permute(ACROSS)[:, :, 1:],
    "sum with itself": lambda: lambda x: x.permute(ACROSS) + x,
    "as it is": lambda: lambda x: x.permute(ACROSS) * 2,
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", OTHER_AXES)
@pytest.mark.parametrize("grid", ["1x1", "1x2", "2x2"])
def test_rows_and_columns_on_other_axes(name: str, grid: str):
    """A model may exchange rows and columns, or keep channels last. One rank runs whatever PyTorch runs."""
    told = get_verdict(OTHER_AXES[name](), grid)
    assert told == "exact" or grid != "1x1", told


@pytest.mark.parametrize("grid", ["1x1", "1x2", "2x2"])
def test_batch_norm_over_channels_last(grid: str):
    told = get_verdict(lambda x: F.batch_norm(x.permute(LAST), None, None, training=True), grid, same=close)
    assert told == "exact" or grid != "1x1", told


def compute_cross_entropy_across(prediction: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(prediction.permute(ACROSS), labels)


@pytest.mark.parametrize("grid", ["1x1", "1x2", "2x2"])
def test_cross_entropy_across(grid: str):
    labels = make_whole_numbers(1, 8, 8, low=0, high=3).long()
    told = get_verdict(nn.Conv2d(4, 4, 1), grid, labels=labels, loss=compute_cross_entropy_across, same=close)
    assert told == "exact" or grid != "1x1", told


TWO_TILED: dict[str, Function] = {
    "conv by pixels of the image": lambda x: F.conv2d(x, x[:, :, :4, :4], padding=1),
    "conv by the image": lambda x: F.conv2d(x, x, padding=4),
    "transposed conv by the image": lambda x: F.conv_transpose2d(x, x.permute(1, 0, 2, 3)),
    "slope by pixel": lambda x: F.prelu(x.permute(LAST), x.sum((0, 1, 3))),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TWO_TILED)
@pytest.mark.parametrize("grid", ["1x1", "2x2"])
def test_weights_that_are_pixels(name: str, grid: str):
    told = get_verdict(TWO_TILED[name], grid)
    assert told == "exact" or grid != "1x1", told


@pytest.mark.parametrize("grid", ["1x1", "2x1", "2x2"])
def test_a_loss_with_a_weight_for_each_pixel(grid: str):
    judge = nn.BCEWithLogitsLoss(weight=make_whole_numbers(8, 8, low=1, high=3))
    told = get_verdict(nn.Conv2d(4, 4, 1), grid, loss=judge, same=close)
    assert told == "exact" or grid != "1x1", told


class Remembers(nn.Module):
    """Changes a buffer of its own in its forward."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4).double())
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def count(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.add_(1)
    return x * 2


def count_in_threes(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.add_(1, alpha=3)
    return x * 2


def count_and_use(module: nn.Module, x: Tensor) -> Tensor:
    module.seen += 2
    return x * module.seen[None, :, None, None]


def add_sums(module: nn.Module, x: Tensor) -> Tensor:
    module.seen += x.detach().sum((0, 2, 3))
    return x * 2


def scale_sums(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.mul_(0.5).add_(x.detach().sum((0, 2, 3)))
    return x * 2


def copy_sums(module: nn.Module, x: Tensor) -> Tensor:
    module.seen.copy_(x.detach().sum((0, 2, 3)))
    return x * 2


def replace_sums(module: nn.Module, x: Tensor) -> Tensor:
    module.seen = module.seen * 0.5 + x.detach().sum((0, 2, 3))
    return x * 2


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "change", [count, count_in_threes, count_and_use, add_sums, scale_sums, copy_sums, replace_sums]
)
@pytest.mark.parametrize("grid", ["1x1", "2x2"])
def test_buffers_that_a_model_changes_itself(change: Callable[[nn.Module, Tensor], Tensor], grid: str):
    """Batch norm's are known. Others move as in one process, or the model is refused."""
    told = get_verdict(Remembers(change), grid)
    assert told == "exact" or "aten." in told or "buffer" in told or "puts another tensor in the place of" in told, told


def sum_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        total = x.sum((2, 3), keepdim=True)
    return x * total


def pick_by_value(x: Tensor) -> Tensor:
    return x[x > 0]


def return_input(x: Tensor) -> Tensor:
    return x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [sum_without_gradient, pick_by_value, return_input])
@pytest.mark.parametrize("grid", ["1x1", "2x2"])
def test_a_model_is_run_or_refused_but_never_an_inner_error(function: Function, grid: str):
    assert get_verdict(function, grid)


def test_a_tensor_that_the_loss_keeps_to_itself():
    """It is no module's: ranks get it with the graph."""
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    labels = make_whole_numbers(1, 8, 8, low=0, high=3).long()
    told = get_verdict(
        nn.Conv2d(4, 4, 1), "2x2", labels=labels, same=close,
        loss=lambda prediction, labels: F.cross_entropy(prediction, labels, weight),
    )  # fmt: skip
    assert told == "exact"


class InTurn(nn.Module):
    """The same convolution under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class TiedWeights(nn.Module):
    """Two convolutions with one kernel and biases of their own, and a third one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


SHARED: dict[str, Callable[[], nn.Module]] = {
    "in two places": lambda: nn.Sequential(conv := nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), conv),
    "under two names": InTurn,
    "one weight of two layers": TiedWeights,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("grid", ["1x1", "1x2", "2x2"])
def test_one_tensor_used_twice(name: str, grid: str):
    """Its gradients add up over both uses, also where they lie in two stages."""
    assert get_verdict(with_whole_weights(SHARED[name]()), grid) == "exact"
    for spatial in (1, 2):
        plan = Plan(split_size=2, spatial_size=spatial, slice_method=grid, precision="float64")
        assert_exact(with_whole_weights(SHARED[name]()), make_whole_numbers(1, 4, 8, 8, seed=3), plan)


class NormInTwoPlaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(self.first(x))))


def test_a_batch_norm_in_two_stages_is_refused():
    """Its running statistics move with every use, in the order of one process."""
    plan = Plan(split_size=2, spatial_size=1, num_spatial_parts=4, precision="float64")
    with pytest.raises(PlanError, match=r"stages 0 and 1 both use model\.norm\.\S+, which counts what it saw"):
        prepare(NormInTwoPlaces(), plan, (1, 4, 8, 8), compute_weighted_sum, labels=TensorSpec((1, 4, 8, 8), "float64"))
    assert get_verdict(NormInTwoPlaces().double(), "2x2", same=close) == "exact"


SWITCHED_OFF = [nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.Dropout2d(0.5)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dropout", SWITCHED_OFF, ids=["dropout", "in place", "of channels"])
@pytest.mark.parametrize("grid", ["1x1", "2x2"])
def test_dropout_that_is_switched_off_is_nothing(dropout: nn.Module, grid: str):
    """Before the global pool and behind it, as classifiers have it."""
    before = nn.Sequential(nn.Conv2d(4, 4, 1), dropout)
    assert get_verdict(with_whole_weights(before).eval(), grid) == "exact"
    behind = nn.Sequential(nn.Conv2d(4, 4, 1), Op(lambda x: x.sum((2, 3), keepdim=True)), dropout, nn.Flatten())
    assert get_verdict(with_whole_weights(behind).eval(), grid) == "exact"


@pytest.mark.parametrize("grid", ["1x2", "2x2"])
def test_dropout_behind_the_global_pool(grid: str):
    """All tiles hold the same value there, and draw the same mask."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), Op(lambda x: x.sum((2, 3))), nn.Dropout(0.5))
    assert get_verdict(with_whole_weights(model), grid) == "exact"
