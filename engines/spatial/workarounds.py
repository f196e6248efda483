"""Operators of ATen that end the process or take too long on some arguments, called so that they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MENDED"]

_VECTOR = 8
_SMALL, _FEW_PX = 20480, 128  # numbers of an input, of which PyTorch has the first, and pixels of each image


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Pixels that a 1x1 kernel of few channels leaves out are left out before; one of many channels is never slow.

    Of several images with channels last, the gradient of weights of few channels is written beyond its memory on
    processors without AVX-512 (PyTorch 2.13, oneDNN): the heap is damaged, and the process aborts sooner or later.
    """
    if weight.shape[2:] == (1, 1):
        few = weight.shape[1] < _VECTOR
        if few and max(stride) > 1 and not any(padding):
            x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
        if not few and max(stride) == 1 and _is_slow(x):
            dilation = (2, 2)
    return torch.ops.aten.conv2d.default(x, weight, bias, stride, padding, dilation, groups)


def _is_slow(x: Tensor) -> bool:
    """Whether PyTorch leaves a 1x1 kernel without strides to BLAS, which took two to three times as long as oneDNN.

    It does where one thread is at work on fewer than 16 images, unless the kernel is dilated: that changes nothing for
    one of a single pixel. Small values are no slower that way.
    """
    return (
        (x.device.type, x.dtype) == ("cpu", torch.float32)
        and torch.get_num_threads() == 1
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and x.numel() > _SMALL
        and x.shape[-2] * x.shape[-1] >= _FEW_PX
    )


MENDED: dict[str, Callable[..., Any]] = {"aten.conv2d.default": _conv2d}
"""What is called in place of an operator, by its name."""
