"""Equivalent calls of convolutions where PyTorch's own choice ends the process, or takes too much time or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SMALL, _FEW_PX = 20480, 128  # elements of an input (also a limit of PyTorch), and pixels of each image
_FEW_READS = 1 << 17  # values that the windows of all voxels have together


def _convolve_images(
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
        # PyTorch leaves an unstrided 1x1 kernel to BLAS, two to three times as slow as oneDNN, if one thread works on
        # fewer than 16 images, unless the kernel is dilated, which does not change a kernel of a single pixel. Small
        # inputs are no slower with BLAS.
        large = x.numel() > _SMALL and x.shape[-2] * x.shape[-1] >= _FEW_PX
        if not few and max(stride) == 1 and large and _runs_onednn(x) and torch.get_num_threads() == 1:
            dilation = (2, 2)
    return torch.ops.aten.conv2d.default(x, weight, bias, stride, padding, dilation, groups)


def _convolve_volumes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    """Run conv3d; where PyTorch would not leave it to oneDNN, as a matrix product or a sum of convolutions of images.

    PyTorch (2.13) then copies the window of every voxel: 27 times the input for a 3x3x3 kernel, and up to eight times
    as long.
    """
    if groups == 1 and _runs_onednn(x):
        if max(*weight.shape[2:], *stride) == 1 and not any(padding):
            return functional.linear(x.movedim(1, -1), weight[:, :, 0, 0, 0], bias).movedim(-1, 1)
        reads = weight[0].numel() * x[0, 0].numel() // math.prod(stride)
        # PyTorch decides by the sizes of the first four of five axes, as if it were an image.
        refused = len(x) == 1 and math.prod(x.shape[:4]) <= _SMALL and min(weight.shape[3:]) <= 3
        if refused and reads > _FEW_READS:
            return _sum_over_depth(x, weight, bias, stride, padding, dilation)
    return torch.ops.aten.conv3d.default(x, weight, bias, stride, padding, dilation, groups)


def _sum_over_depth(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Convolve one volume as a batch of images, once for each plane of the kernel.

    out[d] = sum over k of  conv2d(x[d * stride + k * dilation], weight[:, :, k])
    """
    if padding[0]:
        x = functional.pad(x, (0, 0, 0, 0, padding[0], padding[0]))
    planes, (step, *stride), (gap, *dilation) = x[0].transpose(0, 1), stride, dilation
    last = (len(planes) - 1 - gap * (weight.shape[2] - 1)) // step * step

    def convolve(index: int, bias: Tensor | None = None) -> Tensor:
        start = index * gap
        part = planes[start : start + last + 1 : step]
        return _convolve_images(part, weight[:, :, index], bias, stride, padding[1:], dilation)

    total = convolve(0, bias)
    for index in range(1, weight.shape[2]):
        total.add_(convolve(index))
    return total.transpose(0, 1)[None]


def _runs_onednn(x: Tensor) -> bool:
    """Return whether convolutions of `x` can run in oneDNN."""
    return (
        (x.device.type, x.dtype) == ("cpu", torch.float32)
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)  # a property that PyTorch declares by its descriptor
    )


MENDED: dict[str, Callable[..., Any]] = {
    "aten.conv2d.default": _convolve_images,
    "aten.conv3d.default": _convolve_volumes,
}
"""The function to call in place of an operator, by the operator's name."""
