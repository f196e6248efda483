"""Floating-point operations of one traced operator, multiply and add counted as two."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, fx

__all__ = ["flops", "operator_flops"]


def flops(node: fx.Node) -> int:
    """Forward FLOPs, from the shapes alone: one per output element unless the table knows better."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    shapes = [arg.meta["val"].shape for arg in node.args if isinstance(arg, fx.Node) and _is_tensor(arg)]
    return operator_flops(str(node.target), shapes, value.shape)


def operator_flops(operator: str, shapes: list, out: tuple[int, ...]) -> int:
    """The same of an operator or kernel by name (`aten.conv2d.default`), from the shapes of its tensors.

    >>> operator_flops("aten.conv2d.default", [(1, 3, 8, 8), (16, 3, 3, 3)], (1, 16, 8, 8))
    55296
    """
    rule = _RULES.get(operator.split(".")[1] if "." in operator else operator)
    return int(rule(shapes, out) if rule else math.prod(out))


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
    "conv_transpose": _transposed,
    "linear": _product,
    "matmul": _product,
    "mm": _product,
    "_to_copy": lambda shapes, out: 0,
    "addmm": lambda shapes, out: 2 * math.prod(out) * shapes[1][-1],
}
