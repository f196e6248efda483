"""Copies of a module without memory: the same names, shapes and classes, with fake tensors on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["make_fake_copy", "make_fake_tensor"]


def make_fake_copy(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """Return a copy whose weights and buffers have no memory; those of floating type have `dtype`.

    They are replaced before `deepcopy` would copy them. Other tensors of the module are copied with their numbers.
    """
    # `deepcopy` takes an object in its memo for copied already, and never looks into the real tensors. Tied weights
    # are one object and stay tied.
    memo: dict[int, Any] = {}
    with mode:
        for tensor in [*module.parameters(), *module.buffers()]:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            twin = torch.empty_like(tensor.detach(), dtype=kind, device="cpu")
            is_weight = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_weight else twin
    return copy.deepcopy(module, memo)


def make_fake_tensor(mode: FakeTensorMode, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Return a tensor without memory."""
    with mode:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
