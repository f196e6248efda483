"""Equivalent calls of ATen operators that end the process or take too long on some arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MENDED"]

_SMALL, _FEW_PX = 20480, 128  # elements of an input (also a limit of PyTorch), and pixels of each image


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Run conv2d; a strided 1x1 kernel of few channels first drops skipped pixels, one of many channels avoids BLAS.

    For several images with channels last, oneDNN (PyTorch 2.13) writes the weight gradient of few channels out of
    bounds on processors without AVX-512: the heap is damaged, and the process aborts sooner or later.
    """
    if weight.shape[2:] == (1, 1):
        # Without the pixels that a strided 1x1 kernel skips, it is the same kernel with stride 1.
        few = weight.shape[1] < 8  # channels of a vector register
        if few and max(stride) > 1 and not any(padding):
            x, stride = x[..., :: stride[0], :: stride[1]], (1, 1)
        if not few and max(stride) == 1 and _is_slow(x):
            dilation = (2, 2)
    return torch.ops.aten.conv2d.default(x, weight, bias, stride, padding, dilation, groups)


def _is_slow(x: Tensor) -> bool:
    """Return whether PyTorch leaves an unstrided 1x1 kernel to BLAS, two to three times as slow as oneDNN.

    It does so if one thread works on fewer than 16 images, unless the kernel is dilated, which does not change a kernel
    of a single pixel. Small inputs are no slower with BLAS.
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
"""The function to call in place of an operator, by the operator's name."""
