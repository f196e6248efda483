"""Equivalent calls of convolutions where PyTorch's own choice ends the process, or takes too much time or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
        refused = len(x) == 1 and math.prod(x.shape[:4]) <= _SMALL and 1 < min(weight.shape[3:]) <= 3
        planes = _KernelPlanes(x.shape[2], weight.shape[2], stride[0], padding[0], dilation[0])
        full = planes.find_full_plane()
        if refused and reads > _FEW_READS and full is not None:
            return _PlaneSum.apply(x, weight, bias, planes, full, (stride[1:], padding[1:], dilation[1:]))
    return torch.ops.aten.conv3d.default(x, weight, bias, stride, padding, dilation, groups)


@dataclass(frozen=True, slots=True)
class _KernelPlanes:
    """How the planes of a 3-D kernel move along the depth of one volume: plane k reads slice d * step + k * gap - pad.

    slices    [0 1 2 3]        kernel of three planes, step and gap 1, pad 1
    plane 0    0 1 2 .         adds to 1 2 3
    plane 1    0 1 2 3         adds to 0 1 2 3
    plane 2    . 1 2 3         adds to 0 1 2
    """

    slices: int
    count: int
    step: int
    pad: int
    gap: int

    @property
    def outputs(self) -> int:
        """The number of slices that the convolution makes."""
        return (self.slices + 2 * self.pad - self.gap * (self.count - 1) - 1) // self.step + 1

    def cut(self, plane: int) -> tuple[slice, slice]:
        """Return the slices that a plane reads, and those to which it adds."""
        offset = plane * self.gap - self.pad
        start = max(0, -(offset // self.step))
        stop = max(start, min(self.outputs, (self.slices - 1 - offset) // self.step + 1))
        first, last = start * self.step + offset, max(0, stop - 1) * self.step + offset
        return slice(first, last + 1, self.step), slice(start, stop)

    def find_full_plane(self) -> int | None:
        """Return the plane that adds to all slices, if there is one."""
        return next((plane for plane in range(self.count) if self.cut(plane)[1] == slice(0, self.outputs)), None)


class _PlaneSum(torch.autograd.Function):
    """Convolves one volume (1, C, D, H, W) as a batch of images, once for each plane of the kernel, and adds them up.

    Backward keeps what the convolution of the volume would: its input and its weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        planes: _KernelPlanes,
        full: int,
        settings: tuple[Sequence[int], ...],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.planes, ctx.full, ctx.settings = planes, full, settings
        slices = x[0].transpose(0, 1)
        # The first plane makes all slices, so that the others can add to them in place: at most two results in memory.
        total = torch.ops.aten.conv2d.default(slices[planes.cut(full)[0]], weight[:, :, full], bias, *settings)
        for plane in range(planes.count):
            read, added = planes.cut(plane)
            if plane != full:
                total[added].add_(torch.ops.aten.conv2d.default(slices[read], weight[:, :, plane], None, *settings))
        return total.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        slices, grads = x[0].transpose(0, 1), grad[0].transpose(0, 1)
        grad_x = torch.zeros_like(slices) if needs[0] else None
        grad_bias, plane_grads = None, []
        for plane in range(ctx.planes.count):
            read, added = ctx.planes.cut(plane)
            has_bias = plane == ctx.full and needs[2]
            part, plane_grad, bias_grad = torch.ops.aten.convolution_backward(
                *(grads[added], slices[read], weight[:, :, plane], [len(weight)] if has_bias else None, *ctx.settings),
                *(False, [0, 0], 1, [needs[0], needs[1], has_bias]),
            )
            plane_grads.append(plane_grad)
            if has_bias:
                grad_bias = bias_grad
            if grad_x is not None:
                grad_x[read].add_(part)
        grad_weight = torch.stack(plane_grads, 2) if needs[1] else None
        return None if grad_x is None else grad_x.transpose(0, 1)[None], grad_weight, grad_bias, None, None, None


def _runs_onednn(x: Tensor) -> bool:
    """Return whether convolutions of `x` can run in oneDNN. A forecast has tensors on the meta device."""
    return (
        x.device.type in ("cpu", "meta")
        and x.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)  # a property that PyTorch declares by its descriptor
    )


MENDED: dict[str, Callable[..., Any]] = {
    "aten.conv2d.default": _convolve_images,
    "aten.conv3d.default": _convolve_volumes,
}
"""The function to call in place of an operator, by the operator's name."""
