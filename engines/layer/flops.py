"""Floating-point operations of one operator; a multiply-add counts as two.

PyTorch itself is the table: the operator runs once without memory, and the ATen operators that it calls are counted by
the formulas of `torch.utils.flop_counter`, which cover convolutions, matrix products and attention. A formula that a
user registers there for a custom operator is used here, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopCount", "count_flops", "resolve_flops"]

_KNOWN: dict[str, int] = {}


class FlopCount(TorchDispatchMode):
    """Adds up in `total` the FLOPs of all operators that run within it, on any device; 0 for those without a formula.

    >>> with FlopCount() as count:
    ...     product = torch.empty(8, 64, 64, device="meta") @ torch.empty(8, 64, 64, device="meta")
    >>> count.total
    4194304
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and count one ATen operator. Called by torch."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=made))
        elif packet in _OURS:
            self.total += _OURS[packet](*args)
        return made


def count_flops(node: fx.Node) -> int:
    """Return the forward FLOPs of a traced operator from its shapes: one per output element if there is no formula."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0

    def describe(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return tree_map(lambda part: _TensorMeta(part) if isinstance(part, Tensor) else part, item.meta.get("val"))
        return torch.device("meta") if isinstance(item, torch.device) else item

    # A deep model has few different operators: the key has shapes and settings, but no names.
    arguments = tree_map(describe, (list(node.args), dict(node.kwargs)))
    key = f"{node.target}{arguments}"
    if key in _KNOWN:
        return _KNOWN[key]
    counted = 0
    if any(isinstance(item, _TensorMeta) for item in tree_leaves(arguments)):
        args, kwargs = tree_map(lambda item: item.to_meta() if isinstance(item, _TensorMeta) else item, arguments)
        # An operator that cannot run on the meta device is not refused for want of a count.
        with contextlib.suppress(Exception), torch.no_grad(), FlopCount() as count:
            node.target(*args, **kwargs)  # type: ignore[operator]
            counted = count.total
    _KNOWN[key] = resolve_flops(str(node.target), counted, value.shape)
    return _KNOWN[key]


def resolve_flops(operator: str, counted: int, out: Sequence[int]) -> int:
    """Return `counted`; if it is 0, return one FLOP per output element, and 0 for a cast."""
    return counted or (0 if "_to_copy" in operator else math.prod(out))


class _TensorMeta:
    """The shape and type of a tensor; its text serves in cache keys."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(map(int, tensor.shape)), tensor.dtype

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}"

    def to_meta(self) -> Tensor:
        """Return such a tensor without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _count_matvec(matrix: Tensor, vector: Tensor) -> int:
    return 2 * matrix.numel()


def _count_trilinear(one: Tensor, two: Tensor, three: Tensor, *expanded_and_summed: Sequence[int]) -> int:
    """Count two products and a sum for each element of the three tensors, broadcast against each other."""
    shapes = []
    for tensor, new_axes in zip((one, two, three), expanded_and_summed, strict=False):
        for axis in new_axes:
            tensor = tensor.unsqueeze(axis)
        shapes.append(tensor.shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


_OURS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mv: _count_matvec,
    torch.ops.aten.dot: _count_matvec,
    torch.ops.aten.vdot: _count_matvec,
    torch.ops.aten.addmv: lambda added, matrix, vector: _count_matvec(matrix, vector),
    torch.ops.aten.addbmm: lambda added, one, other: 2 * one.numel() * other.shape[-1],
    # (queries x keys) scores of `key size` products each, and as many weighted sums of values
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_: (
        2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    ),
    torch.ops.aten._trilinear: _count_trilinear,
}
"""Formulas for products that PyTorch's registry lacks."""
