"""Operators of ATen that end the process on some arguments, called so that they compute the same and do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MENDED"]

_VECTOR = 8


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Pixels that a 1x1 kernel of few channels leaves out are left out before.

    Of several images with channels last, the gradient of such weights is written beyond its memory on processors
    without AVX-512 (PyTorch 2.13, oneDNN): the heap is damaged, and the process aborts sooner or later.
    """
    if weight.shape[1] < _VECTOR and weight.shape[2:] == (1, 1) and max(stride) > 1 and not any(padding):
        x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
    return torch.ops.aten.conv2d.default(x, weight, bias, stride, padding, dilation, groups)


MENDED: dict[str, Callable[..., Any]] = {"aten.conv2d.default": _conv2d}
"""What is called in place of an operator, by its name."""
