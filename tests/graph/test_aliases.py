"""Writes through one of several names of the same memory: a trace gives what PyTorch gives, or refuses."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Ref, TensorSpec
from mpi4dl_nb.engines.graph.trace import trace_inference
from mpi4dl_nb.engines.program.kernels import get_operator
from tests.exact import make_whole_numbers

Forward = Callable[[Tensor], Tensor]
SHAPE = (1, 2, 4, 4)


class Calls(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def compute_answer(graph: ModelGraph, images: Tensor) -> Tensor:
    """The graph's nodes one after the other, by PyTorch's own operators: apart from our worker."""
    (name,) = graph.inputs
    values: dict[str, Any] = {name: images}

    def look_up(item: Any) -> Any:
        if isinstance(item, tuple):
            return [look_up(each) for each in item]
        return values[item.name] if isinstance(item, Ref) else item

    for node in graph.nodes:
        arguments = {key: look_up(item) for key, item in node.arguments.items()}
        picked = node.operator == "getitem"
        values[node.name] = (
            operator.getitem(*arguments.values()) if picked else get_operator(node.operator)(**arguments)
        )
    (answer,) = graph.answers
    return values[answer]


def is_refused(function: Forward, images: Tensor) -> bool:
    """Whether the trace refuses the function; if not, its graph gives what PyTorch gives."""
    wanted = function(images.clone())
    try:
        graph = trace_inference(Calls(function), TensorSpec(tuple(images.shape), "float64"))
    except TraceError as error:
        if "reads memory" not in str(error):
            raise
        return True
    assert torch.equal(compute_answer(graph, images), wanted)
    return False


COPIES: dict[str, Forward] = {
    "clone": lambda y: y.clone(),
    "another memory format": lambda y: y.contiguous(memory_format=torch.channels_last),
    "there and back": lambda y: y.float().double(),
    "interpolate to the same size": lambda y: F.interpolate(y, scale_factor=1),
    "pad by nothing": lambda y: F.pad(y, (0, 0, 0, 0)),
    "reshape of what was permuted": lambda y: y.permute(0, 2, 3, 1).reshape(1, 2, 4, 4),
    "max_pool2d of one pixel": lambda y: F.max_pool2d(y, 1),
    "pixel_shuffle by one": lambda y: F.pixel_shuffle(y, 1),
    "roll by nothing": lambda y: y.roll(0, 2),
    "cat of one": lambda y: torch.cat([y]),
    "a sum over one image": lambda y: torch.einsum("nchw->chw", y),
}

ALIASES: dict[str, Forward] = {
    "as_strided": lambda y: y.as_strided((2, 2), (1, 2)),
    "atleast_2d": torch.atleast_2d,
    "broadcast_tensors": lambda y: torch.broadcast_tensors(y, y)[0],
    "broadcast_tensors, the second one": lambda y: torch.broadcast_tensors(y[:, :1] + 1, y)[1],
    "chunk": lambda y: y.chunk(2, 1)[1],
    "contiguous": lambda y: y.contiguous(),
    "data": lambda y: y.data,
    "detach": lambda y: y.detach(),
    "diagonal": lambda y: y.diagonal(dim1=2, dim2=3),
    "double of a double": lambda y: y.double(),
    "dropout switched off": lambda y: F.dropout(y, 0.5, training=False),
    "dropout of nothing": lambda y: F.dropout(y, 0.0, training=True),
    "dropout of channels switched off": lambda y: F.dropout2d(y, 0.5, training=False),
    "alpha dropout switched off": lambda y: F.alpha_dropout(y, 0.5, training=False),
    "einsum that permutes": lambda y: torch.einsum("nchw->nhwc", y),
    "expand": lambda y: y.expand(1, 2, 4, 4),
    "getitem": lambda y: y[..., 1:],
    "hsplit": lambda y: torch.hsplit(y, 2)[0],
    "identity": nn.Identity(),
    "matrix transpose": lambda y: y.mT,
    "movedim": lambda y: y.movedim(1, 3),
    "narrow": lambda y: y.narrow(1, 0, 1),
    "plus": lambda y: +y,
    "ravel": lambda y: y.ravel(),
    "real": torch.real,
    "reshape": lambda y: y.reshape(2, -1),
    "squeeze": lambda y: y.squeeze(0),
    "sum_to_size": lambda y: y.sum_to_size(y.shape),
    "swapaxes": lambda y: y.swapaxes(1, 2),
    "tensor_split": lambda y: torch.tensor_split(y, 2, 1)[0],
    "type_as": lambda y: y.type_as(y),
    "unbind": lambda y: y.unbind(1)[0],
    "unflatten": lambda y: y.unflatten(1, (1, 2)),
    "unfold": lambda y: y.unfold(2, 2, 2),
    "view_as": lambda y: y.view_as(y),
}


def write_the_view(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        view(y).mul_(3)
        return y + 1

    return forward


def write_the_base(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        seen = view(y)
        y.mul_(3)
        return seen + 1

    return forward


def write_one_of_two_views(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        one, other = view(y), view(y)
        one.mul_(3)
        return other + 1

    return forward


def write_both(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        seen = view(y)
        y.mul_(3)
        seen.add_(1)
        return seen + 1

    return forward


def write_both_the_other_way(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        seen = view(y)
        seen.mul_(3)
        y.add_(1)
        return y + 1

    return forward


def look_after_a_write_and_write_the_view(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(3)
        view(y).add_(1)
        return y + 1

    return forward


def look_after_a_write_and_write_the_base(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        y.mul_(3)
        seen = view(y)
        y.add_(1)
        return seen + 1

    return forward


def look_before_and_after_a_write(view: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        y = x * 2
        before = view(y)
        y.mul_(3)
        after = view(y)
        before.add_(1)
        after.mul_(5)
        return torch.cat([y.flatten(), before.flatten(), after.flatten()])

    return forward


WRITES = [
    write_the_view,
    write_the_base,
    write_one_of_two_views,
    write_both,
    write_both_the_other_way,
    look_after_a_write_and_write_the_view,
    look_after_a_write_and_write_the_base,
    look_before_and_after_a_write,
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", ALIASES)
def test_a_write_is_seen_by_every_name_or_refused(name: str, write: Callable[[Forward], Forward]):
    is_refused(write(ALIASES[name]), make_whole_numbers(*SHAPE))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_nobodys_other_name(name: str, write: Callable[[Forward], Forward]):
    assert not is_refused(write(COPIES[name]), make_whole_numbers(*SHAPE))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_grid_that_looks_at_the_axes_is_a_view_of_them(axis: int):
    def forward(x: Tensor) -> Tensor:
        axes = [x[0, 0, 0] * 2, x[0, 0, 1] * 2]
        axes[axis].add_(1)
        grids = torch.meshgrid(*axes, indexing="ij")
        axes[axis].mul_(3)
        return grids[0] + 7 * grids[1]

    is_refused(forward, make_whole_numbers(*SHAPE))


# ---- any program of a few of these

STEPS: dict[str, Forward] = {
    **{f"copy: {name}": COPIES[name] for name in ("clone", "cat of one")},
    **{
        name: ALIASES[name]
        for name in (
            "contiguous",
            "detach",
            "dropout switched off",
            "einsum that permutes",
            "getitem",
            "reshape",
            "squeeze",
        )
    },
    "write": lambda y: y.mul_(3),
    "write 1": lambda y: y.add_(1),
}


@pytest.mark.nightly
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9)), min_size=3, max_size=8))
@settings(max_examples=80, derandomize=True)
def test_any_order_of_looks_and_writes_is_right_or_refused(program: list[tuple[str, int]]):
    def forward(x: Tensor) -> Tensor:
        values = [x * 2]
        for name, which in program:
            values.append(STEPS[name](values[which % len(values)]))
        return torch.stack([value.sum() * (7 + index) for index, value in enumerate(values)]).sum()

    try:
        forward(make_whole_numbers(*SHAPE))
    except (RuntimeError, IndexError):
        assume(False)  # a permutation of something that has no four axes by now
    is_refused(forward, make_whole_numbers(*SHAPE))
