"""Floating-point operations of one traced operator, multiply and add counted as two."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, fx

__all__ = ["flops"]


def flops(node: fx.Node) -> int:
    """Forward FLOPs, from the shapes alone: one per output element unless the table knows better."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    shapes = [arg.meta["val"].shape for arg in node.args if isinstance(arg, fx.Node) and _is_tensor(arg)]
    name = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
    rule = _RULES.get(name)
    return int(rule(shapes, value.shape) if rule else value.numel())


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _convolution(shapes: list, out: tuple[int, ...]) -> int:
    """Each output element is a dot product with one filter (C / groups, kh, kw)."""
    return 2 * math.prod(out) * math.prod(shapes[1][1:])


def _transposed(shapes: list, out: tuple[int, ...]) -> int:
    """Each input element is spread by one filter (C' / groups, kh, kw)."""
    return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])


def _product(shapes: list, out: tuple[int, ...]) -> int:
    return 2 * math.prod(out) * shapes[0][-1]


_RULES: dict[str, Callable[[list, tuple[int, ...]], int]] = {
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv_transpose2d": _transposed,
    "linear": _product,
    "matmul": _product,
    "mm": _product,
    "_to_copy": lambda shapes, out: 0,
    "addmm": lambda shapes, out: 2 * math.prod(out) * shapes[1][-1],
}
