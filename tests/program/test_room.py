"""A value made where its window will be: the same numbers, and no copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpi4dl_nb.engines.bench.halo import run_forward
from mpi4dl_nb.engines.comm.loopback import LoopbackWorld, run_ranks
from mpi4dl_nb.engines.compiler.compile import Compiler
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.program import kernels
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.exchange_runner import ExchangeRunner, make_exchange_runners
from mpi4dl_nb.engines.program.instructions import Compute
from mpi4dl_nb.engines.program.message_buffers import SendQueue
from mpi4dl_nb.engines.program.segment import _INTO, find_output_allocators, has_out_kernel
from mpi4dl_nb.engines.train.recipe import prepare
from tests.exact import assert_exact, make_tiled_plan, make_whole_numbers, with_whole_weights

RANKS = 4


class Net(nn.Module):
    """A ReLU that one convolution reads, and one that a skip reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2)
        self.third = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.third(x) + x[:, :2]


def prepare_exchanges(world: LoopbackWorld, net: nn.Module, recipe) -> tuple[list[ExchangeRunner], list[str]]:
    program = Compiler(recipe.graph, recipe.plan).compile_rank(world.rank)
    exchanges = [item for item in program.forward if isinstance(item, Exchange)]
    found = make_exchange_runners(exchanges, world, torch.device("cpu"), SendQueue())
    rooms = find_output_allocators(program.get_direction_program(0), found)
    segments = [item for item in program.forward if isinstance(item, Compute)]
    used = [op.out for item in segments for op in item.ops if has_out_kernel(item, op, rooms)]
    return [found[item.name] for item in exchanges], used


def run_on_ranks(work):
    net = Net()
    recipe = prepare(net, make_tiled_plan("2x2"), (1, 3, 9, 10))
    return run_ranks(RANKS, lambda world: work(*prepare_exchanges(world, net, recipe)))


def test_only_a_value_that_the_exchange_alone_reads_gets_room():
    assert run_on_ranks(lambda _, used: used) == [["relu"]] * RANKS


def test_a_kernel_of_the_user_makes_a_value_of_its_own(monkeypatch):
    """It is called, and not the variant of ours that writes into the window."""
    monkeypatch.setattr(Tensor, "relu", functional.leaky_relu)
    assert run_on_ranks(lambda _, used: used) == [["leaky_relu"]] * RANKS
    monkeypatch.setitem(kernels._KERNELS, "aten.leaky_relu.default", lambda x, slope: torch.where(x > 0, x, 2 * x))
    assert run_on_ranks(lambda _, used: used) == [[]] * RANKS


def test_the_window_is_the_memory_around_the_value():
    def work(found: list[ExchangeRunner], _: list[str]) -> bool:
        carrier = found[1]
        value = carrier.allocate_source().fill_(3.0)
        before = value._version
        window = run_forward(carrier, value)
        plain = run_forward(carrier, value.clone())
        same_memory = window.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
        return same_memory and torch.equal(window, plain) and value._version == before

    assert run_on_ranks(work) == [True] * RANKS


def test_a_room_serves_its_own_value_once():
    """Another value, and the same one a second time, get windows of their own."""

    def work(found: list[ExchangeRunner], _: list[str]) -> bool:
        carrier = found[1]
        value = carrier.allocate_source().fill_(3.0)
        other = torch.full_like(value, 5.0)
        windows = [run_forward(carrier, tensor) for tensor in (other, value, value)]
        addresses = {window.untyped_storage().data_ptr() for window in windows}
        return len(addresses) == 3 and value.untyped_storage().data_ptr() not in addresses and bool((value == 3).all())

    assert run_on_ranks(work) == [True] * RANKS


def test_the_net_is_exact():
    for grid in ("2x2", "1x3", "3x1"):
        assert_exact(with_whole_weights(Net()), make_whole_numbers(2, 3, 9, 10), make_tiled_plan(grid))


class Skips(nn.Module):
    """Other activations before convolutions, and a U-Net's skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        x = self.second(functional.leaky_relu(skip, 2.0))
        return self.third(torch.cat([skip, x], 1))


def test_activations_and_skips_get_room_and_stay_exact():
    net = Skips()
    recipe = prepare(net, make_tiled_plan("2x2"), (1, 3, 9, 10))
    assert run_ranks(RANKS, lambda world: prepare_exchanges(world, net, recipe)[1]) == [["leaky_relu", "cat"]] * RANKS
    assert_exact(with_whole_weights(net), make_whole_numbers(2, 3, 9, 10), make_tiled_plan("2x2"))


def test_relu_into_room_is_relu():
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0, float("inf"), float("nan")]).view(1, 1, 2, 3)
    frame = torch.zeros(1, 1, 4, 5)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made, plain = _INTO["aten.relu.default"](lambda: frame.data[..., 1:3, 1:4], ours), theirs.relu()
    grad = torch.arange(6.0).view(1, 1, 2, 3) + 1
    made.backward(grad)
    plain.backward(grad)
    assert torch.equal(made.nan_to_num(-7.0), plain.nan_to_num(-7.0))
    assert torch.equal(torch.signbit(made), torch.signbit(plain))
    assert torch.equal(ours.grad, theirs.grad)
    assert not frame[..., 0, :].any()


ACTIVATIONS = {"leaky_relu": (0.2,), "hardswish": (), "relu": ()}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_activation_into_room_is_the_same_to_the_bit(name: str, dtype: torch.dtype):
    x, grad = (3 * torch.randn(2, 5, 6, 7, dtype=dtype) for _ in range(2))
    frame = torch.zeros(2, 5, 8, 9, dtype=dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    made = _INTO[f"aten.{name}.default"](lambda: frame.data[..., 1:7, 1:8], ours, *ACTIVATIONS[name])
    plain = getattr(torch.ops.aten, name)(theirs, *ACTIVATIONS[name])
    made.backward(grad)
    plain.backward(grad)
    assert made.untyped_storage().data_ptr() == frame.untyped_storage().data_ptr()
    assert torch.equal(made, plain)
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_one_after_another_into_room(dim: int):
    parts = [torch.randn(2, 3, 4, 5) for _ in range(3)]
    ours, theirs = ([part.clone().requires_grad_() for part in parts] for _ in range(2))
    plain = torch.cat(theirs, dim)
    frame = torch.zeros(*plain.shape[:2], plain.shape[2] + 2, plain.shape[3] + 2)
    made = _INTO["aten.cat.default"](lambda: frame.data[..., 1:-1, 1:-1], tuple(ours), dim)
    for value in (made, plain):
        value.backward(plain.detach())
    assert torch.equal(frame[..., 1:-1, 1:-1], plain)
    assert all(torch.equal(our.grad, their.grad) for our, their in zip(ours, theirs, strict=True))


def test_a_value_of_another_type_finds_memory_of_its_own():
    room = torch.zeros(1, 1, 2, 2)
    made = _INTO["aten.hardswish.default"](lambda: room, torch.ones(1, 1, 2, 2, dtype=torch.bfloat16))
    assert made.dtype is torch.bfloat16
    assert not room.any()


def test_a_plan_of_one_rank_needs_no_room():
    recipe = prepare(Net(), Plan(split_size=1, slice_method="1x1"), (1, 3, 9, 10))
    assert run_ranks(1, lambda world: prepare_exchanges(world, Net(), recipe)[1]) == [[]]
