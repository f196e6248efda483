"""Classes of kernels with similar behaviour: the speed of one kernel of a class predicts the speed of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BY_ARITHMETIC", "CLASSES", "classify_kernel", "get_convolution_shape"]

CLASSES = (
    "convolution", "transposed", "product",
    "moments", "norm", "whole_norm", "pool", "transcendental", "loss", "pointwise", "pad", "copy",
)  # fmt: skip
"""Convolutions (plain and transposed) and matrix products are bound by arithmetic, the others by memory, or by a
processor's exponentials. A `norm` receives its `moments`, a `whole_norm` computes them. A `pad` may also crop, and a
`loss` of labels is several kernels."""

BY_ARITHMETIC = ("convolution", "transposed", "product")

_BEGINNINGS = {
    "conv_transpose": "transposed", "conv": "convolution", "linear": "product", "matmul": "product", "mm": "product",
    "addmm": "product", "bmm": "product", "moments": "moments", "batch_norm": "norm",
    "whole_batch_norm": "whole_norm", "instance_norm": "whole_norm", "group_norm": "whole_norm",
    "layer_norm": "whole_norm", "max_pool": "pool", "avg_pool": "pool", "average_pool": "pool", "adaptive": "pool",
    "upsample": "pool", "pad": "pad", "cat": "copy", "pixel_": "copy", "clone": "copy", "_to_copy": "copy",
    "stack": "copy", "constant_pad": "pad", "softmax": "transcendental", "log_softmax": "transcendental",
    "cross_entropy": "loss", "binary_cross_entropy": "loss", "nll": "loss", "expand": "copy",
    "exp": "transcendental", "logical": "pointwise", "log": "transcendental", "sigmoid": "transcendental",
    "tanh": "transcendental", "gelu": "transcendental", "silu": "transcendental", "mish": "transcendental",
    "elu": "transcendental", "softplus": "transcendental",
}  # fmt: skip


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
    return next((kind for start, kind in _BEGINNINGS.items() if name.startswith(start)), unknown)


def get_convolution_shape(kernel: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the length of a convolution's dot products, its filters and its images, on which its speed depends.

    For a transposed convolution, these are those of the convolution that it transposes. Other kernels give ().

    >>> get_convolution_shape("aten.conv2d.default", [(1, 16, 32, 32), (64, 16, 3, 3)])
    (144, 64, 1)
    """
    if classify_kernel(kernel) not in ("convolution", "transposed") or len(shapes) < 2:
        return ()
    return math.prod(shapes[1][1:]), shapes[1][0], shapes[0][0]
