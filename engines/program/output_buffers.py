"""Outputs written in place into the window of the next exchange, which saves a copy and a second buffer.

A kernel that can write to given memory gets the middle of that window; the exchange then only adds the halo around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
"""Returns a new tensor for a value, the middle of a larger allocation."""


def _allocate_out(room: OutputAllocator, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the tensor of `room` if it has that shape and type, else a new one."""
    there = room()
    return (
        there if (there.shape, there.dtype) == (shape, dtype) else torch.empty(shape, dtype=dtype, device=there.device)
    )


@dataclass(frozen=True, slots=True)
class _PointwiseRule:
    """How to write an activation to given memory, and how to compute its gradient.

    The gradient is computed from the input or (`by_result`) from the result. Both functions take the operator's other
    arguments in ATen's order.
    """

    write: Callable[..., object]
    gradient: Callable[..., Tensor]
    by_result: bool = False

    def __call__(self, room: OutputAllocator, x: Tensor, *arguments: Any) -> Tensor:
        return _PointwiseOut.apply(x, room, self, *arguments)


class _PointwiseOut(torch.autograd.Function):
    """Applies a pointwise operator, (N, C, h, w) -> the same shape, in the memory that `room` allocates."""

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
    """Concatenates tensors along `dim` in the memory that `room` allocates."""

    @staticmethod
    def forward(ctx: Any, room: OutputAllocator, dim: int, *tensors: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [tensor.shape[dim] for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return torch.cat(tensors, dim, out=_allocate_out(room, torch.Size(shape), dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *grad.split(ctx.sizes, ctx.dim)


# Only kernels whose result is bitwise the same in strided memory; that is not so for exponentials.
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
    """Return allocators for the values that only one exchange reads, and whose own part is inside its window."""
    # relu ----> y ----copy----> window of y      becomes      relu ----> middle of the window, halo added around it
    #
    # A second reader would keep the whole window alive for as long as it needs y.
    return {
        item.source: carriers[item.name].allocate_source
        for item in way.forward
        if isinstance(item, Exchange) and len(way.reads[item.source]) == 1 and carriers[item.name].can_allocate_source
    }


def find_out_kernel(
    segment: Compute, op: LocalOp, rooms: Mapping[str, OutputAllocator]
) -> Callable[..., Tensor] | None:
    """Return the variant of `op`'s kernel that writes into the window, or None if there is no such memory or kernel.

    An op of the same segment that also read the value would get strided memory: a convolution would then make the very
    copy that is saved.
    """
    read = any(op.out in other.reads for other in segment.ops)
    if op.out not in rooms or op.kernel not in _INTO or read:
        return None
    return partial(_INTO[op.kernel], rooms[op.out])
