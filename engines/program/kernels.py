"""Local kernels that ATen does not have: the computation of a rank on its own tile between two communications."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.geometry.tiles import Axes
from mpi4dl_nb.engines.geometry.windows import Margins
from mpi4dl_nb.engines.program.mended import MENDED

Kernel = Callable[..., Any]

_KERNELS: dict[str, Kernel] = {}


def register_kernel(name: str) -> Callable[[Kernel], Kernel]:
    """Register a function as the kernel `name`, for use by entries of the operator table.

    Its tensor arguments are local to the rank; its gradient is autograd's. Under the name of a custom operator
    (`mine.blur.default`), ranks call the kernel in place of that operator, which they need not have registered.

    >>> @register_kernel("tile.twice")
    ... def twice(x):
    ...     return 2 * x
    >>> get_kernel("tile.twice")(torch.ones(2))
    tensor([2., 2.])
    """

    def add(function: Kernel) -> Kernel:
        _KERNELS[name] = function
        return function

    return add


def get_kernel(name: str) -> Callable[..., Any]:
    """Return the function of a kernel by name: `aten.relu.default`, `tile.sum_pixels`, ...

    >>> get_kernel("aten.relu.default")(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    return _KERNELS.get(name) or MENDED.get(name) or get_operator(name)


def has_kernel(name: str) -> bool:
    """Return whether a name is that of a registered kernel rather than of an operator."""
    return name in _KERNELS


def get_kernels() -> dict[str, Kernel]:
    """Return all registered kernels by name."""
    return dict(_KERNELS)


def get_operator(name: str) -> Any:
    """Return the operator of a name such as `aten.relu.default`."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def get_sum_type(x: Tensor) -> torch.dtype:
    """Return the type for sums and statistics of `x`: float32 for half precision, otherwise its own floating type."""
    return torch.promote_types(x.dtype, torch.float32)


class _TileMoments(torch.autograd.Function):
    """(N, C, ...) -> (slots, 2, C): mean and summed squared deviation of each channel, in slot `slot`.

    The other slots are zero, so that an all-reduce gathers the moments of all tiles without rounding. The moments are
    float64, converted from the fused kernel's mean and variance. Deviations are from the tile's own mean, so that
    nothing is lost to cancellation.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: int, slots: int) -> Tensor:
        untouched = x.new_zeros(x.shape[1], dtype=get_sum_type(x))  # sets the type of the statistics
        mean, variance = torch.batch_norm_update_stats(x, untouched, untouched, 0.0)
        ctx.save_for_backward(x, mean)
        ctx.slot, ctx.count = slot, x.numel() // x.shape[1]
        # rank 0: [m0 . . .]    rank 1: [. m1 . .]    ...    and their sum, on every rank: [m0 m1 m2 m3]
        moments = x.new_zeros((slots, 2, x.shape[1]), dtype=torch.float64)
        means, squares = moments[slot].unbind()
        means.copy_(mean)
        squares.copy_(variance).mul_(ctx.count)
        return moments

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean = ctx.saved_tensors
        # The factors of a mean over `count` values, and of a sum of squares.
        scales = _make_column((1 / ctx.count, 2.0), grad.device)
        offset, slope = (grad[ctx.slot] * scales).to(mean.dtype).unbind()
        # grad[0] / count + 2 * grad[1] * (x - mean), as one fused call: (x - mean) * slope + offset.
        scaled = torch.batch_norm(x, slope, offset, mean, torch.ones_like(mean), False, 0.0, 0.0, False)
        return scaled, None, None


@lru_cache(maxsize=1 << 11)
def _make_column(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return (numbers, 1) in float64. Cached, since each copy of numbers from the host to a GPU blocks."""
    with torch.inference_mode(False):  # a tensor of inference mode could not be used outside it later
        return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]


def _compute_fractions(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return (slots, 1): the fraction of all values that each tile holds."""
    whole = sum(counts)
    return _make_column(tuple(count / whole for count in counts), device)


def compute_batch_statistics(moments: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance of each channel from the (slots, 2, C) moments of all tiles.

    `counts` are the numbers of values on the tiles. Chan, Golub and LeVeque, 1983 (The American Statistician 37),
    equation 2.1.
    """
    return _compute_statistics(moments, _compute_fractions(counts, moments.device), sum(counts))[:2]


def _compute_statistics(moments: Tensor, parts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, variance and (slots, C) deviations of the tiles' means from the overall mean."""
    means, squares = moments.unbind(1)
    # The deviation from the overall mean is that from the tile's mean and that of the tile's mean itself:
    #
    #     sum (x - mean)^2  =  sum over tiles of  squares + n * (means - mean)^2
    mean = (means * parts).sum(0)
    deviations = means - mean
    return mean, torch.addcmul(squares / count, deviations, deviations * parts).sum(0), deviations


class _Normalise(torch.autograd.Function):
    """Normalises (N, C, ...) by the (slots, 2, C) moments of all tiles.

    Ioffe and Szegedy, 2015 (arXiv:1502.03167), section 3. Backward returns the gradient of mean and variance as that of
    the moments, so that its sum over the ranks is the only communication.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, counts: list[int], eps: float
    ) -> Tensor:
        ctx.parts, ctx.count = _compute_fractions(counts, moments.device), sum(counts)
        mean, variance, deviations = _compute_statistics(moments, ctx.parts, ctx.count)
        kind = get_sum_type(x)
        low = mean.to(kind), variance.to(kind)
        gain, shift = (None if vector is None else vector.to(kind) for vector in (weight, bias))
        ctx.save_for_backward(x, *low, variance, deviations, gain)
        ctx.eps, ctx.types = eps, [None if v is None else v.dtype for v in (weight, bias)]
        # The operator itself: `functional.batch_norm` of torch 2.11 refuses eps = 0.
        return torch.batch_norm(x, gain, shift, *low, False, 0.0, eps, torch.backends.cudnn.enabled)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low_mean, low_variance, variance, deviations, weight = ctx.saved_tensors
        gain = torch.ones_like(low_mean) if weight is None else weight
        unsaved = low_mean.new_empty(0)  # CUDA's channels_last kernels require tensors here, empty ones as ATen's own
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, gain, low_mean, low_variance, unsaved, unsaved, False, ctx.eps, [True, True, True]
        )
        # With s = spread, grad_weight = sum(grad * (x - mean) * s) and grad_bias = sum(grad) over this tile:
        #     dL/dmean = -gain * s * grad_bias              dL/dvariance = -gain * s^2 * grad_weight / 2
        # variance = sum(squares) / count + sum(parts * deviations^2), which is stationary in the overall mean. Hence
        #     dL/dmeans = parts * (dL/dmean + 2 * deviations * dL/dvariance)      dL/dsquares = dL/dvariance / count
        spread = (variance + ctx.eps).rsqrt_()
        slope = (spread * gain).neg_()  # dy/dmean
        to_squares = (slope * spread).mul_(grad_weight)  # 2 * dL/dvariance
        to_means = torch.addcmul(slope * grad_bias, to_squares, deviations).mul_(ctx.parts)
        to_moments = torch.stack([to_means, (to_squares * (0.5 / ctx.count)).expand_as(to_means)], dim=1)
        pairs = zip(ctx.types, (grad_weight, grad_bias), strict=True)
        affine = (None if kind is None else grad_of.to(kind) for kind, grad_of in pairs)
        return grad_x, to_moments, *affine, None, None


@register_kernel("tile.whole_batch_norm")
def normalise_whole_batch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return the plain kernel's result on the whole batch, and the (1, 2, C) moments that it computes."""
    mean, variance = torch.zeros(2, x.shape[1], dtype=get_sum_type(x), device=x.device)
    result = functional.batch_norm(x, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps)
    squares = variance.double() * (x.numel() // x.shape[1] - 1)  # the kernel stores the unbiased variance
    return result, torch.stack([mean.double(), squares])[None]


@register_kernel("tile.sum_pixels")
def sum_pixels(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """Return the sum over `dims`, computed in `dtype`."""
    return x.sum(dims, keepdim=keepdim, dtype=dtype)


@register_kernel("tile.pad")
def pad_pixels(x: Tensor, margins: Margins, fill: float, axes: Axes = (-2, -1)) -> Tensor:
    """Pad (or crop) along each of `axes` by a constant, as `F.pad` does; nothing of `x` need remain.

    A crop is a copy without gaps, and so is its gradient: batch norms took 2 to 4 times as long on views.
    """
    around = [0] * (2 * x.dim())  # `F.pad` takes the last axis first
    for axis, (before, behind) in zip(axes, margins, strict=True):
        if x.shape[axis] + min(before, 0) + min(behind, 0) <= 0:  # no pixel of x remains: all are fill
            before, behind = x.shape[axis] + before + behind, 0
            x = x.narrow(axis, 0, 0)
        index = 2 * (x.dim() - 1 - axis % x.dim())
        around[index : index + 2] = before, behind
    return functional.pad(x, around, value=fill) if any(around) else x


@register_kernel("tile.conv_transpose")
def convolve_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    margins: Margins,
) -> Tensor:
    """Apply a transposed convolution to a window, and crop (or pad) the result by `margins` to the tile of outputs.

    There is a margin for each of the last axes; `padding` and `output_padding` are for those before them.
    """
    count = len(stride)
    convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[count - 1]
    full = convolve(x, weight, None, stride, padding, output_padding, groups, dilation)
    cut = pad_pixels(full, margins, 0.0, tuple(range(-len(margins), 0)))
    # The bias comes last: outputs that no input writes to have it, too. `cut` is new, and nothing has saved it.
    return cut if bias is None else cut.add_(bias.view(-1, *(1,) * count))


@register_kernel("tile.cut")
def cut_spans(x: Tensor, axes: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the pixels (start, stop) along each axis of a whole value."""
    for axis, (start, stop) in zip(axes, spans, strict=True):
        x = x.narrow(axis, start, stop - start)
    return x


@register_kernel("tile.lead")
def take_lead(x: Tensor, dim: int, count: int, has_lead: bool) -> Tensor:
    """Return the first `count` positions along `dim`, or zeros in place of them on a rank that does not have them."""
    if has_lead:
        return x.narrow(dim, 0, count)
    shape = list(x.shape)
    shape[dim] = count
    return x.new_zeros(shape)


SLOT_ARGUMENTS = {"tile.moments": 1}
"""The place of the argument that says which part of a kernel's result is this tile's; no size depends on it."""

_KERNELS |= {"tile.moments": _TileMoments.apply, "tile.batch_norm": _Normalise.apply, "getitem": operator.getitem}
