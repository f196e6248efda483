"""Values made where their window will be: what a halo surrounds need not be copied, nor be held twice.

A kernel that can write into given memory gets the middle of the window that the next exchange completes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.layer.graph import references
from engines.program.carry import Carrier
from engines.program.instructions import Compute, Exchange, LocalOp
from engines.program.program import Way

__all__ = ["Room", "find_rooms", "roomy"]

Room = Callable[[], Tensor]
"""A fresh tensor for a value, with free memory around it."""


class _ReluInto(torch.autograd.Function):
    """(N, C, h, w) -> the same, ReLU, in the memory that `room` gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, room: Room) -> Tensor:
        into = room()
        if into.shape != x.shape or into.dtype != x.dtype:
            into = torch.empty_like(x)
        torch.clamp_min(x, 0, out=into)
        ctx.save_for_backward(into)
        return into

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(grad, result, 0), None


_INTO: Mapping[str, Callable[[Tensor, Room], Tensor]] = {"aten.relu.default": _ReluInto.apply}


def find_rooms(way: Way, carriers: Mapping[str, Carrier]) -> dict[str, Room]:
    """The values that one exchange and nothing else reads, and that lie whole in its window."""
    return {
        item.source: carriers[item.name].room
        for item in way.forward
        if isinstance(item, Exchange) and len(way.reads[item.source]) == 1 and carriers[item.name].has_room
    }


def roomy(segment: Compute, op: LocalOp, rooms: Mapping[str, Room]) -> Callable[..., Tensor] | None:
    """The kernel of `op` that writes where its window will be; None where there is no such place or kernel.

    Who else reads the value would get memory with gaps, which costs a convolution the copy that is saved.
    """
    read = any(op.out in references((other.arguments, other.keywords)) for other in segment.ops)
    if op.out not in rooms or op.kernel not in _INTO or read:
        return None
    return partial(_called, _INTO[op.kernel], rooms[op.out])


def _called(kernel: Callable[[Tensor, Room], Tensor], room: Room, x: Tensor) -> Tensor:
    return kernel(x, room)
