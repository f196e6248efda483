"""The kernels that a calibration times: those of the layers of common networks, in tiles and whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.comm.device import choose_memory_format
from engines.spatial.kernels import get_kernel

__all__ = ["KernelCall", "LayerSize", "make_calls"]

KernelCall = tuple[str, tuple[Any, ...]]
"""A kernel's name and its arguments."""


@dataclass(frozen=True, slots=True)
class LayerSize:
    """The channels of a layer's values, and their pixels along a side."""

    channels: int
    side_px: int


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A convolution over `images` images of `side_px` pixels along a side; `groups` and `bias` as in PyTorch."""

    read: int
    made: int
    kernel_px: int
    side_px: int
    groups: int = 1
    images: int = 1
    bias: bool = False

    @property
    def operations(self) -> int:
        """The multiplications and additions of a forward pass."""
        return 2 * self.images * self.side_px**2 * self.made * self.read // self.groups * self.kernel_px**2


_THREE_BY_THREE = {
    16: ((16, 4), (96, 1), (128, 2), (128, 4), (256, 1)),
    32: ((8, 4), (64, 1), (64, 2), (64, 4), (192, 1)),
    64: ((4, 4), (16, 1), (32, 1), (32, 2), (32, 4), (64, 4), (128, 1)),
    128: ((4, 4), (8, 1), (16, 2), (16, 4), (28, 1), (32, 4), (64, 1)),
    256: ((2, 4), (4, 4), (8, 1), (8, 2), (8, 4), (14, 1), (16, 4), (32, 1)),
    512: ((2, 4), (4, 1), (4, 4), (8, 1), (8, 2), (8, 4), (14, 1), (16, 4)),
}  # (pixels along a side, images) by width

_CONVOLUTIONS = (
    ConvolutionSpec(3, 16, 3, 128),
    ConvolutionSpec(3, 16, 3, 128, images=4),
    ConvolutionSpec(3, 64, 7, 64),
    ConvolutionSpec(3, 64, 7, 64, images=4),
    ConvolutionSpec(3, 64, 7, 160),
    ConvolutionSpec(3, 64, 7, 128, images=4),
    *(ConvolutionSpec(width, width, 3, px, images=n) for width, sizes in _THREE_BY_THREE.items() for px, n in sizes),
    ConvolutionSpec(16, 64, 1, 64),
    ConvolutionSpec(64, 16, 1, 64),
    ConvolutionSpec(64, 256, 1, 7, images=4),
    ConvolutionSpec(64, 256, 1, 56),
    ConvolutionSpec(256, 64, 1, 14),
    ConvolutionSpec(256, 64, 1, 56),
    ConvolutionSpec(512, 128, 1, 14),
    ConvolutionSpec(128, 512, 1, 14),
    ConvolutionSpec(32, 32, 3, 64, 32),
    ConvolutionSpec(256, 256, 3, 16, 256),
    ConvolutionSpec(16, 3, 1, 64, bias=True),
    ConvolutionSpec(16, 3, 1, 256, bias=True),
    ConvolutionSpec(64, 4, 1, 64, bias=True),
)
"""Convolutions from the first to the last layers of networks, in tiles and whole, of one and of several images.

PyTorch uses another algorithm for a small single image, which can be three times as fast, and splits several images
over cores more evenly. The last entries have a bias, which makes forward up to twice as slow."""


def make_calls(sizes: Sequence[LayerSize], most_operations: float = math.inf) -> list[KernelCall]:
    """Return the calls of all kernel classes at these layer sizes, and all convolutions.

    Convolutions of several images are included only up to `most_operations`.
    """
    calls = [call for size in sizes for call in _make_size_calls(size)]
    for each in _CONVOLUTIONS:
        if each.images == 1 or each.operations <= most_operations:
            x = _make_values(each.images, each.read, each.side_px, each.side_px)
            weight = _make_values(each.made, each.read // each.groups, each.kernel_px, each.kernel_px)
            bias = torch.zeros(each.made, requires_grad=True) if each.bias else None
            pad = each.kernel_px // 2
            calls.append(("aten.conv2d.default", (x, weight, bias, [1, 1], [pad, pad], [1, 1], each.groups)))
    return calls


def _make_size_calls(size: LayerSize) -> Iterator[KernelCall]:
    """Yield the kernel calls of a network's layer of that size, except plain convolutions."""
    channels, side = size.channels, size.side_px
    x = _make_values(1, channels, side, side)
    gain, offset = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    # A tile's moments come from an all-reduce: for the norm they are a leaf, and receive a gradient of their own.
    moments = get_kernel("tile.moments")(x, 0, 1).detach().requires_grad_()
    yield "tile.moments", (x, 0, 4)
    yield "tile.batch_norm", (x, moments, gain, offset, [side * side], 1e-5)
    yield "tile.whole_batch_norm", (x, gain, offset, 1e-5)
    yield "aten.relu.default", (x,)
    yield "aten.max_pool2d.default", (x, [2, 2], [2, 2])
    yield "aten.cat.default", ([x, _make_values(1, channels, side, side)], 1)
    # A pad at the border of the image, and a crop on one side with a pad on the other.
    yield "tile.pad", (x, [1, 1, 1, 1], 0.0)
    yield "tile.pad", (x, [-1, 1, -1, 1], 0.0)
    # A transposed convolution that doubles the pixels along each side, of two images: see `_CONVOLUTIONS`.
    weight = _make_values(channels, max(1, channels // 2), 2, 2)
    bias = torch.zeros(weight.shape[1], requires_grad=True)
    images = _make_values(2, channels, side, side)
    yield "tile.conv_transpose", (images, weight, bias, [2, 2], [1, 1], 1, (0, 0, 0, 0))
    # A loss for each pixel, as of a segmentation into four classes.
    few = _make_values(1, 4, side, side)
    labels = torch.zeros(1, side, side, dtype=torch.int64)
    yield "tile.cross_entropy_sums", (few, labels, None, -100, 0.0)
    yield "aten.gelu.default", (x,)
    yield "aten.linear.default", (_make_values(16, channels * 4), _make_values(channels, channels * 4))


def _make_values(*shape: int) -> Tensor:
    return torch.empty(shape, memory_format=choose_memory_format(len(shape))).fill_(0.5).requires_grad_()
