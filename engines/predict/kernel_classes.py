"""Classes of kernels with similar behaviour: the speed of one kernel of a class predicts the speed of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BY_ARITHMETIC", "CLASSES", "classify_kernel", "get_convolution_shape"]

_BEGINNINGS = {
    "convolution": "conv",
    "transposed": "conv_transpose",
    "product": "linear matmul mm addmm bmm",
    "moments": "moments",
    "norm": "batch_norm",
    "whole_norm": "whole_batch_norm instance_norm group_norm layer_norm",
    "pool": "max_pool avg_pool average_pool adaptive upsample",
    "transcendental": "softmax log_softmax exp log sigmoid tanh gelu silu mish elu softplus",
    "loss": "cross_entropy binary_cross_entropy nll",
    "pointwise": "logical",
    "pad": "pad constant_pad",
    "copy": "cat pixel_ clone _to_copy stack expand",
}
"""The beginnings of the names of the kernels of each class."""

CLASSES = tuple(_BEGINNINGS)
"""Convolutions (plain and transposed) and matrix products are bound by arithmetic, the others by memory, or by a
processor's exponentials. A `norm` receives its `moments`, a `whole_norm` computes them. A `pad` may also crop, and a
`loss` of labels is several kernels."""

BY_ARITHMETIC = ("convolution", "transposed", "product")

# The longest first, so that `conv_transpose` is not taken for a `conv`, or `expand` for an `exp`.
_CLASS_OF = sorted(
    ((start, kind) for kind, starts in _BEGINNINGS.items() for start in starts.split()),
    key=lambda pair: -len(pair[0]),
)


def classify_kernel(kernel: str, flops: int = 0) -> str:
    """Return the class of a kernel by its name; an unknown one is a product if it has `flops`, else pointwise.

    >>> (
    ...     classify_kernel("aten.conv2d.default"),
    ...     classify_kernel("aten.gelu_.default"),
    ...     classify_kernel("aten.hardtanh.default"),
    ... )
    ('convolution', 'transcendental', 'pointwise')
    >>> classify_kernel("aten.scaled_dot_product_attention.default", flops=1 << 20)
    'product'
    """
    name = kernel.split(".")[1] if "." in kernel else kernel
    unknown = "product" if flops else "pointwise"
    return next((kind for start, kind in _CLASS_OF if name.startswith(start)), unknown)


def get_convolution_shape(kernel: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the length of a convolution's dot products, its filters and its images, on which its speed depends.

    For a transposed convolution, these are those of the convolution that it transposes. Other kernels give ().

    >>> get_convolution_shape("aten.conv2d.default", [(1, 16, 32, 32), (64, 16, 3, 3)])
    (144, 64, 1)
    """
    if classify_kernel(kernel) not in ("convolution", "transposed") or len(shapes) < 2:
        return ()
    return math.prod(shapes[1][1:]), shapes[1][0], shapes[0][0]
