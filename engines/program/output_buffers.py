"""Values made where their window will be: what a halo surrounds need not be copied, nor be held twice.

A kernel that can write into given memory gets the middle of the window that the next exchange completes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from engines.program.exchange_runner import ExchangeRunner
from engines.program.instructions import Compute, Exchange, LocalOp
from engines.program.program import DirectionProgram

__all__ = ["OutputAllocator", "find_out_kernel", "find_output_allocators"]

OutputAllocator = Callable[[], Tensor]
"""A fresh tensor for a value, with free memory around it."""


def _allocate_out(room: OutputAllocator, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The room, where a value of that shape and type fits it."""
    there = room()
    return (
        there if (there.shape, there.dtype) == (shape, dtype) else torch.empty(shape, dtype=dtype, device=there.device)
    )


@dataclass(frozen=True, slots=True)
class _PointwiseRule:
    """How to write an activation into given memory, and its gradient from what it read, or (`by_result`) what it made.

    Both take the operator's other arguments, as ATen has them.
    """

    write: Callable[..., object]
    gradient: Callable[..., Tensor]
    by_result: bool = False

    def __call__(self, room: OutputAllocator, x: Tensor, *arguments: Any) -> Tensor:
        return _PointwiseOut.apply(x, room, self, *arguments)


class _PointwiseOut(torch.autograd.Function):
    """(N, C, h, w) -> the same, in the memory that `room` gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: OutputAllocator, rule: _PointwiseRule, *arguments: Any) -> Tensor:
        made = _allocate_out(room, x.shape, x.dtype)
        rule.write(x, *arguments, out=made)
        ctx.rule, ctx.arguments = rule, arguments
        ctx.save_for_backward(made if rule.by_result else x)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return ctx.rule.gradient(grad, kept, *ctx.arguments), None, None, *(None for _ in ctx.arguments)


class _CatOut(torch.autograd.Function):
    """Tensors that follow each other along `dim`, in the memory that `room` gives."""

    @staticmethod
    def forward(ctx: Any, room: OutputAllocator, dim: int, *tensors: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        return torch.cat(tensors, dim, out=_allocate_out(room, torch.Size(shape), _promote_types(tensors)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grad.split(ctx.sizes, ctx.dim)


def _promote_types(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


# Only what has the same bits whatever memory it is written to: exponentials have not, where memory has gaps.
_aten = torch.ops.aten
_INTO: Mapping[str, Callable[..., Tensor]] = {
    "aten.relu.default": _PointwiseRule(
        lambda x, out: torch.clamp_min(x, 0, out=out),
        lambda grad, made: _aten.threshold_backward(grad, made, 0),
        by_result=True,
    ),
    "aten.leaky_relu.default": _PointwiseRule(
        _aten.leaky_relu.out, lambda grad, x, slope=0.01: _aten.leaky_relu_backward(grad, x, slope, False)
    ),
    "aten.hardswish.default": _PointwiseRule(_aten.hardswish.out, _aten.hardswish_backward),
    "aten.cat.default": lambda room, tensors, dim=0: _CatOut.apply(room, dim, *tensors),
}


def find_output_allocators(way: DirectionProgram, carriers: Mapping[str, ExchangeRunner]) -> dict[str, OutputAllocator]:
    """The values that one exchange and nothing else reads, and that lie whole in its window."""
    return {
        item.source: carriers[item.name].allocate_source
        for item in way.forward
        if isinstance(item, Exchange) and len(way.reads[item.source]) == 1 and carriers[item.name].can_allocate_source
    }


def find_out_kernel(
    segment: Compute, op: LocalOp, rooms: Mapping[str, OutputAllocator]
) -> Callable[..., Tensor] | None:
    """The kernel of `op` that writes where its window will be; None where there is no such place or kernel.

    Who else reads the value would get memory with gaps, which costs a convolution the copy that is saved.
    """
    read = any(op.out in other.reads for other in segment.ops)
    if op.out not in rooms or op.kernel not in _INTO or read:
        return None
    return partial(_INTO[op.kernel], rooms[op.out])
