"""ReLUs write over what they read: the same bits in no more memory, and only where nothing asks for it again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpi4dl_nb.engines.comm.loopback import run_ranks
from mpi4dl_nb.engines.compiler.compile import compile_plan
from mpi4dl_nb.engines.graph.model_graph import Ref, TensorSpec
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.kernel_effects import LiveBytes, LocalTensor, infer_effect
from mpi4dl_nb.engines.program import kernels, segment
from mpi4dl_nb.engines.program.effects import LocalOp
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.segment import FORGETFUL, find_in_place
from mpi4dl_nb.engines.train.recipe import Recipe, prepare
from mpi4dl_nb.engines.train.training import RankTraining
from mpi4dl_nb.engines.train.verify import make_batches


def make_activation(source: str, out: str = "z", kernel: str = "aten.relu.default") -> LocalOp:
    return LocalOp(out, kernel, (Ref(source),))


def make_op(kernel: str, *read: str) -> LocalOp:
    return LocalOp("y", kernel, tuple(map(Ref, read)))


NORM = make_op("tile.whole_batch_norm", "x", "gain", "offset")
FIRST = LocalOp("y0", "getitem", (Ref("y"), 0))


@pytest.mark.parametrize(
    ("ops", "outputs", "found"),
    [
        ([make_op("aten.conv2d.default", "x", "w"), make_activation("y")], ("z",), {"z"}),
        ([NORM, FIRST, LocalOp("y1", "getitem", (Ref("y"), 1)), make_activation("y0")], ("y1", "z"), {"z"}),
        ([NORM, FIRST, LocalOp("same", "getitem", (Ref("y"), 0)), make_activation("y0")], ("same", "z"), set()),
        ([FIRST, make_activation("y0")], ("z",), set()),  # of an input
        ([make_activation("x")], ("z",), set()),
        ([make_op("aten.add.Tensor", "a", "b"), make_activation("y")], ("y", "z"), set()),
        (
            [make_op("aten.add.Tensor", "a", "b"), make_activation("y"), make_activation("y", "again")],
            ("z", "again"),
            set(),
        ),
        # of an operator whose backward reads what it made
        ([make_op("aten.sigmoid.default", "x"), make_activation("y")], ("z",), set()),
        ([make_op("aten.add.Tensor", "a", "b"), make_activation("y", kernel="aten.silu.default")], ("z",), set()),
    ],
)
def test_a_relu_writes_over_what_nobody_asks_for_again(ops: list[LocalOp], outputs: tuple[str, ...], found: set[str]):
    assert find_in_place(Compute("some", tuple(ops), ("x",), outputs, True)) == found


class Net(nn.Module):
    """ReLUs behind a norm, a convolution, a transposed one and a sum; one of them reads what another reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(size, 8, 3, padding=1) for size in (3, 8, 8))
        self.norm, self.up, self.head = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        y = self.third(x)
        y = torch.relu(torch.relu(y) + torch.sigmoid(y))
        return self.head(torch.relu(self.up(y)).mean((2, 3)))


PLANS = {
    "whole": Plan(split_size=1, spatial_size=0),
    "again, in half precision": Plan(
        split_size=2, spatial_size=0, checkpoint_activations=True, precision="bfloat16", parts=2
    ),
    "tiles": Plan(split_size=1, slice_method="1x2"),
    "weights later": Plan(split_size=2, spatial_size=0, schedule="zero_bubble", parts=2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PLANS)
def test_the_same_bits(name: str, monkeypatch):
    trained, _ = _train_ranks(PLANS[name])
    monkeypatch.setattr(segment, "find_in_place", lambda _: frozenset())
    for ours, theirs in zip(trained, _train_ranks(PLANS[name])[0], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_no_more_memory(monkeypatch):
    _, (held,) = _train_ranks(PLANS["whole"])  # messages would count from when they come
    monkeypatch.setattr(segment, "find_in_place", lambda _: frozenset())
    assert held <= _train_ranks(PLANS["whole"])[1][0]


def _train_ranks(plan: Plan) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Each rank's weights and buffers after two steps, and the most bytes that it held."""
    recipe = _prepare_recipe(plan)

    def train(world):
        training = RankTraining(world, recipe)
        with LiveBytes() as live:
            for batch in make_batches(recipe, 0, steps=2):
                training.step(training.cut(batch))
        return {name: tensor.detach().clone() for name, tensor in training.held.items()}, live.peak

    weights, held = zip(*run_ranks(plan.ranks, train), strict=True)
    return list(weights), list(held)


def _prepare_recipe(plan: Plan) -> Recipe:
    torch.manual_seed(0)
    return prepare(Net(), plan, (plan.parts, 3, 16, 16), device="cpu")


def test_no_kernel_keeps_what_is_written_over():
    recipe = _prepare_recipe(PLANS["whole"])
    (program,) = compile_plan(recipe.graph, recipe.plan)
    called = {op.kernel for item in program.forward if isinstance(item, Compute) for op in item.ops}
    assert len([name for item in program.forward if isinstance(item, Compute) for name in find_in_place(item)]) == 4
    image, weight = (
        LocalTensor.of(TensorSpec((2, 8, 6, 6), "float32"), True),
        LocalTensor.of(TensorSpec((8, 8, 3, 3), "float32"), True),
    )
    line, taps = (LocalTensor.of(TensorSpec(shape, "float32"), True) for shape in ((2, 8, 6), (8, 8, 3)))
    volume, block = (LocalTensor.of(TensorSpec(shape, "float32"), True) for shape in ((2, 8, 6, 6, 6), (8, 8, 3, 3, 3)))
    kept = LocalTensor.of(TensorSpec((8,), "float32"), False)
    vector, moments = (
        LocalTensor.of(TensorSpec((8,), "float32"), True),
        LocalTensor.of(TensorSpec((1, 2, 8), "float64"), True),
    )
    asked = {
        "aten.conv1d.default": (line, taps, None, [1], [1]),
        "aten.conv2d.default": (image, weight, None, [1, 1], [1, 1]),
        "aten.conv3d.default": (volume, block, None, [1, 1, 1], [1, 1, 1]),
        "tile.conv_transpose": (image, weight, None, [2, 2], [0, 0], [0, 0], 1, [1, 1], ((0, 0), (0, 0))),
        "tile.batch_norm": (image, moments, vector, vector, [72], 1e-5),
        "tile.whole_batch_norm": (image, vector, vector, 1e-5),
        "aten.batch_norm.default": (image, vector, vector, kept, kept, False, 0.1, 1e-5, True),
        "aten.add.Tensor": (image, image),
    }
    assert asked.keys() == set(FORGETFUL)
    assert called & asked.keys() >= {"aten.conv2d.default", "tile.whole_batch_norm", "aten.add.Tensor"}
    for kernel, arguments in asked.items():
        effect = infer_effect(kernel, arguments, {})
        assert not effect.saves_made, kernel
        assert effect.made[0].shares is None, kernel


def test_a_kernel_of_ones_own_is_called(monkeypatch):
    ops = make_op("aten.conv2d.default", "x", "w"), make_activation("y")
    monkeypatch.setitem(kernels._KERNELS, "aten.relu.default", torch.relu)
    assert not find_in_place(Compute("some", ops, ("x",), ("z",), True))
