"""Entries and kernels that a user writes in a cell: the ranks get them by value."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import Tensor, nn

from mpi4dl_nb import Cluster, Training
from mpi4dl_nb.engines.compiler import operator_table
from mpi4dl_nb.engines.compiler.operator_table import UserOps, is_user_defined, register_rule
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.geometry.windows import SlidingWindow
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program import kernels
from mpi4dl_nb.engines.program.kernels import get_kernel, register_kernel
from tests.exact import assert_exact, close, make_tiled_plan, make_whole_numbers, with_whole_weights

SHAPE = 2, 3, 10, 14


@pytest.fixture(autouse=True)
def _leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    for module, name in ((operator_table, "_TABLE"), (kernels, "_KERNELS")):
        monkeypatch.setattr(module, name, getattr(module, name).copy())


@pytest.fixture(scope="module", autouse=True)
def blur() -> torch.library.CustomOpDef:
    """(N, C, H, W) -> the mean over 3 x 3 pixels, zeros outside: an operator that PyTorch does not know."""

    @torch.library.custom_op("cell::blur", mutates_args=())
    def compute_blur(x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 3, 1, 1)

    compute_blur.register_fake(torch.empty_like)
    compute_blur.register_autograd(lambda ctx, grad: nn.functional.avg_pool2d(grad, 3, 1, 1))
    return compute_blur


def add_blur() -> None:
    """As a cell would."""

    @register_kernel("cell.blur.default")
    def compute_tile_blur(window: Tensor, padding: int = 1) -> Tensor:
        return torch.nn.functional.avg_pool2d(window, 3, 1, padding)

    @register_rule("cell.blur.default", images=("x",))
    def add_blur_op(b, node):
        rule = SlidingWindow(kernel=3, padding=1)
        window = b.read_window(node.arguments["x"], node.spec.shape[-2:], rule, rule)
        b.add_local_op(node.name, "cell.blur.default", b.pad_window(window), 0, like=node.spec, axes=(-2, -1))


class Blurred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.cell.blur(self.head(torch.relu(torch.ops.cell.blur(self.stem(x)))))


def test_without_an_entry_it_is_refused():
    with pytest.raises(
        TraceError, match=r'(?s)^cell.blur.default .* write a rule.*@register_rule\("cell.blur.default"\)'
    ):
        assert_exact(Blurred().double(), make_whole_numbers(*SHAPE), make_tiled_plan("2x2"))


@pytest.mark.parametrize("grid", ["1x1", "1x2", "3x2"])
def test_with_one_it_is_exact(grid: str):
    add_blur()
    assert_exact(with_whole_weights(Blurred()), make_whole_numbers(*SHAPE), make_tiled_plan(grid), same=close)


def test_the_table_knows_what_is_its_own():
    assert UserOps.snapshot() == UserOps()
    add_blur()
    found = UserOps.snapshot()
    assert [name for name, *_ in found.rules] == [name for name, _ in found.kernels] == ["cell.blur.default"]


def test_a_function_with_a_gradient_of_its_own_is_whose_its_class_is():
    """Its `apply` is torch's, and from 2.14 on no Python function at all."""

    class Mine(torch.autograd.Function): ...

    assert is_user_defined(Mine.apply)
    assert not is_user_defined(get_kernel("tile.moments"))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["loopback", "mpi"])
def test_ranks_get_them_by_value(backend: str):
    """Over MPI the ranks are other processes, which know neither the operator nor its entry: all is made in here."""

    @torch.library.custom_op(f"cell::blur_{backend}", mutates_args=())
    def compute_blur(x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 3, 1, 1)

    compute_blur.register_fake(torch.empty_like)
    compute_blur.register_autograd(lambda ctx, grad: nn.functional.avg_pool2d(grad, 3, 1, 1))
    name = f"cell.blur_{backend}.default"

    @register_kernel(name)
    def compute_tile_blur(window, padding=1):
        return torch.nn.functional.avg_pool2d(window, 3, 1, padding)

    @register_rule(name)
    def add_blur_op(b, node):
        rule = SlidingWindow(kernel=3, padding=1)
        window = b.read_window(node.arguments["x"], node.spec.shape[-2:], rule, rule)
        b.add_local_op(node.name, name, b.pad_window(window), 0, like=node.spec, axes=(-2, -1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

        def forward(self, x):
            return compute_blur(self.head(torch.relu(compute_blur(self.stem(x)))))

    with Cluster(2, backend=backend) as cluster:
        for plan in (Plan(split_size=1, slice_method="2x1"), Plan(split_size=2, num_spatial_parts=1)):
            assert Training(Net(), plan, cluster, SHAPE).verify()["ok"]


def test_the_examples_run():
    for module in (operator_table, kernels):
        assert doctest.testmod(module).failed == 0
