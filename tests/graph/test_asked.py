"""What a model asks of tensors while it is traced, and what it does to gradients: right, or refused with the line."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, TensorSpec
from mpi4dl_nb.engines.graph.trace import trace
from tests.exact import assert_exact, make_tiled_plan, make_whole_numbers
from tests.graph.test_trace import Calls, trace_with_sum

Forward = Callable[[Tensor], Tensor]

KNOWN: dict[str, Forward] = {
    "axes": lambda x: x.sum(torch.arange(2, x.dim()).tolist(), keepdim=True) * x,
    "a number": lambda x: x * torch.tensor([2.0, 3.0]).prod().item(),
    "a decision": lambda x: x * 2 if torch.zeros_like(x).sum() == 0 else x,
    "a size": lambda x: x[:, :, : int(torch.linspace(0, x.shape[2], 3)[1])] * 2,
    "an index": lambda x: x * range(5)[torch.tensor(3)],
    "of another tensor's shape": lambda x: x * float(x.new_full((2, 3), 0.5).sum()),
    "written before": lambda x: x * make_counts(x).tolist()[1],
    "numpy": lambda x: x * float(torch.arange(4).numpy().sum()),
    "contains": lambda x: x * 3 if 2 in torch.arange(4) else x,
}


def make_counts(x: Tensor) -> Tensor:
    counts = torch.zeros(3)
    counts[1:] += torch.arange(2) + x.shape[1]
    return counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KNOWN)
def test_numbers_that_follow_from_shapes_are_known(name: str):
    assert_exact(Calls(KNOWN[name]), make_whole_numbers(1, 2, 6, 6), make_tiled_plan("2x1"))


def choose_by_written(x: Tensor) -> Tensor:
    counts = torch.zeros(3)
    counts[1:] = x[0, 0, 0, :2]
    return x if counts.tolist()[1] > 0 else -x


def choose_by_random(x: Tensor) -> Tensor:
    return x * torch.rand(1).item() if torch.rand(1).item() > 0.5 else x


def choose_by_sum(x: Tensor) -> Tensor:
    return x if bool(x.sum() > 0) else -x


def choose_by_new_tensor(x: Tensor) -> Tensor:
    return x if x.new_tensor(x[0, 0, 0, 0]).item() > 0 else -x


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("forward", [choose_by_written, choose_by_random, choose_by_sum, choose_by_new_tensor])
def test_what_is_not_known_names_file_line_and_tensor(forward: Forward, capfd: pytest.CaptureFixture[str]):
    lines = forward.__code__
    with pytest.raises(TraceError, match=r"asks for the numbers \((tolist|item|bool)\) of a \w+ tensor \(") as caught:
        trace_with_sum(forward)
    (line,) = re.findall(rf'"{re.escape(__file__)}", line (\d+)', str(caught.value))
    assert lines.co_firstlineno < int(line) < lines.co_firstlineno + 5
    assert capfd.readouterr() == ("", "")  # nothing of PyTorch's graphs


def test_a_number_that_is_only_looked_at_is_none_of_ours():
    class Logs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            str(y.mean().item())
            return y

    assert_exact(Logs(), make_whole_numbers(1, 2, 4, 6), make_tiled_plan("1x2"))


class Scaled(nn.Module):
    """A decision by the numbers of a buffer."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3))
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:
        if self.scale > 2:
            x = x * 5
        if self.moves:
            self.scale += 1
        return x


def test_a_buffer_that_stays_may_decide():
    assert_exact(Scaled(moves=False), make_whole_numbers(1, 2, 4, 6), make_tiled_plan("1x2"))


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_nor_may_a_tensor_that_is_made_of_it():
    class Made(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 5 if x.new_tensor(self.scale) > 2 else x
            self.scale += 1
            return y

    with pytest.raises(TraceError, match=r"numbers of the buffer scale, which are others in each step"):
        trace_with_sum(Made(moves=True))


def test_a_buffer_that_counts_may_not():
    with pytest.raises(TraceError, match=r"numbers of the buffer scale, which are others in each step"):
        trace_with_sum(Scaled(moves=True))


# ---- gradients


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class Efficient(torch.autograd.Function):
    """Swish, as MONAI has it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        return grad * (share * (1 + x * (1 - share)))


def test_a_backward_that_is_not_that_of_forward_is_refused():
    with pytest.raises(TraceError, match=r"Straight.apply\(x\).* calls Straight, .* it is another one"):
        trace_with_sum(lambda x: Straight.apply(x) * 2)


def test_a_backward_that_is_that_of_forward_is_run():
    graph = trace_with_sum(lambda x: Efficient.apply(x) * 2)
    assert [node.operator for node in graph.nodes[:3]] == ["aten.sigmoid.default", "aten.mul.Tensor", "aten.mul.Tensor"]


def test_a_function_is_looked_into_where_apply_is_no_function_of_python(monkeypatch: pytest.MonkeyPatch):
    """As in torch 2.14, where it is C++ throughout."""
    monkeypatch.delattr(torch.autograd.Function, "apply", raising=False)
    own = {"apply"} & torch.autograd.Function.__dict__.keys()
    trace_with_sum(lambda x: Efficient.apply(x) * 2)
    with pytest.raises(TraceError, match="it is another one"):
        trace_with_sum(lambda x: Straight.apply(x) * 2)
    assert {"apply"} & torch.autograd.Function.__dict__.keys() == own == set()


def test_functions_are_as_they_were_behind_a_trace():
    before = torch.autograd.Function.__dict__.get("apply")
    trace_with_sum(lambda x: x * 2)
    assert torch.autograd.Function.__dict__.get("apply") is before
    x = torch.ones(2, requires_grad=True)
    Straight.apply(x).sum().backward()
    assert x.grad.tolist() == [1, 1]


def register_gradient_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 2)
    return y


def test_a_hook_of_a_gradient_is_refused():
    with pytest.raises(TraceError, match=r"calls Tensor\.register_hook"):
        trace_with_sum(Graded(register_gradient_hook))


class Graded(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.ones(())), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * self.weight)


def add_under_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x * 2
    return x + y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        with torch.no_grad():
            two = torch.full((), 2.0)
        return x * two.to(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_region_without_gradients_in_a_function_ends_there():
    graph = trace_with_sum(Frozen(lambda judge, x: judge(Doubled.apply(x))))
    assert len(graph.trainable) == 4


class Frozen(nn.Module):
    """A judge that gradients only pass through, as in a GAN."""

    def __init__(self, freeze: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.judge, self.freeze = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), freeze

    def forward(self, x: Tensor) -> Tensor:
        return self.freeze(self.judge, self.first(x))


def call_frozen_by_method(judge: nn.Module, x: Tensor) -> Tensor:
    return judge.requires_grad_(False)(x)


def call_frozen_by_attribute(judge: nn.Module, x: Tensor) -> Tensor:
    judge.weight.requires_grad = False
    return judge(x)


def call_with_detached_weights(judge: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(judge, {name: p.detach() for name, p in judge.named_parameters()}, (x,))


@pytest.mark.parametrize("freeze", [call_frozen_by_method, call_frozen_by_attribute])
def test_a_parameter_that_forward_freezes_is_refused(freeze: Callable[[nn.Module, Tensor], Tensor]):
    with pytest.raises(TraceError, match=r"test_asked.py.*sets requires_grad of a parameter to False"):
        trace_with_sum(Frozen(freeze))


def test_the_remedies_freeze_it():
    assert trace_with_sum(Frozen(call_with_detached_weights)).trainable == {"model.first.weight", "model.first.bias"}
    model = Frozen(call_frozen_by_method)
    model.judge.requires_grad_(False)
    assert trace_with_sum(model).trainable == {"model.first.weight", "model.first.bias"}


def call_in_checkpoint(judge: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(judge, x, use_reentrant=True)


def test_a_reentrant_checkpoint_trains_what_one_process_trains():
    assert_exact(
        Frozen(call_in_checkpoint).double(), make_whole_numbers(1, 2, 4, 6), make_tiled_plan("1x2"), same=torch.allclose
    )
    names = {"weight", "bias"}
    expected = {f"model.{layer}.{name}" for layer in ("first", "judge") for name in names}
    assert trace_with_sum(Frozen(call_in_checkpoint)).trainable == expected


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_images_trains_nothing_as_in_one_process():
    class First(Frozen):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.freeze(self.judge, x))

    assert trace_with_sum(First(call_in_checkpoint)).trainable == {"model.first.weight", "model.first.bias"}


def test_inference_mode_is_refused():
    with pytest.raises(TraceError, match=r"stands under torch.inference_mode\(\).* Use torch.no_grad"):
        trace_with_sum(add_under_inference_mode)


def write_without_gradient(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y[:, :1] = 0
    return y


def test_a_write_without_gradient_to_what_has_one_is_refused():
    """Autograd would pass the gradient on as if nothing had been written."""
    with pytest.raises(TraceError, match=r"changes, under torch.no_grad\(\), a tensor that has a gradient"):
        trace_with_sum(Graded(write_without_gradient))


KEPT = torch.tensor([1.0, 2.0])


def write_to_global(x: Tensor) -> Tensor:
    KEPT[0] = 5
    return x * KEPT.view(2, 1, 1)


def test_a_tensor_that_outlives_the_step_may_not_be_written():
    with pytest.raises(TraceError, match="changes a tensor that it has not made"):
        trace_with_sum(write_to_global)
    assert KEPT.tolist() == [1, 2]


# ---- constants


def test_the_same_numbers_are_one_constant_whose_type_stays():
    def forward(x: Tensor) -> Tensor:
        halves = torch.tensor([0.5, 0.25]).view(2, 1, 1)
        return x * halves + torch.tensor([0.5, 0.25]).view(2, 1, 1) + x[:, [1, 0]]

    graph = trace_with_sum(forward)
    types = {graph.buffers[name].dtype: tensor.tolist() for name, tensor in graph.constants.items()}
    assert types == {"float32": [0.5, 0.25], "int64": [1, 0]}
    assert_exact(Calls(forward), make_whole_numbers(1, 2, 4, 6), make_tiled_plan("1x2"))


def test_regions_without_gradients_train_nothing():
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.first(x)
            return self.second(x)

    graph = trace_with_sum(Half())
    assert graph.trainable == {"model.second.weight", "model.second.bias"}
    assert [node.graded for node in graph.nodes[:3]] == [False, False, True]


def test_local_autocast_is_as_in_one_process():
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                x = self.a(x.float())
            return self.b(x)

    images, labels = TensorSpec((1, 2, 6, 6), "float32"), TensorSpec((1,), "float32")
    graph = trace(Regions(), lambda o, y: o.float().sum() + 0 * y.sum(), images, labels, "bfloat16")
    made = [node.spec.dtype for node in graph.nodes if node.operator == "aten.conv2d.default"]
    assert made == ["float32", "bfloat16"]


class Nested(nn.Module):
    """An autocast region in that of another device, and one of the device that the tensors say."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.conv, self.asks = nn.Conv2d(2, 2, 1), asks

    def forward(self, x: Tensor) -> Tensor:
        with (
            torch.autocast(x.device.type if self.asks else "cpu", torch.bfloat16),
            torch.autocast("cuda", enabled=False),
        ):
            return self.conv(x)


def trace_nested(asks: bool, precision: str = "", device: str = "cpu") -> ModelGraph:
    images, labels = TensorSpec((1, 2, 6, 6), "float32"), TensorSpec((1,), "float32")
    return trace(Nested(asks), lambda o, y: o.float().sum() + 0 * y.sum(), images, labels, precision, device)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_an_autocast_of_another_device_takes_nothing_from_that_of_the_ranks():
    graph = trace_nested(asks=False)
    assert [n.spec.dtype for n in graph.nodes if n.operator == "aten.conv2d.default"] == ["bfloat16"]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("precision", ["", "bfloat16"])
def test_an_autocast_of_the_device_of_a_tensor_is_refused_on_gpus(precision: str):
    with pytest.raises(TraceError, match=r"test_asked.py.*stands under torch.autocast for the CPU, and ranks .* a GPU"):
        trace_nested(asks=True, precision=precision, device="cuda")
