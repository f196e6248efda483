"""Classes of kernels that run alike: how fast one of a class is says how fast the others are."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["BY_ARITHMETIC", "CLASSES", "class_of", "shape_of"]

CLASSES = ("convolution", "product", "moments", "norm", "whole_norm", "pool", "pointwise", "copy")
"""Convolutions and matrix products are bound by arithmetic, the others by memory. A `norm` is given its `moments`, a
`whole_norm` finds them itself."""

BY_ARITHMETIC = ("convolution", "product")

_BEGINNINGS = {
    "conv": "convolution", "linear": "product", "matmul": "product", "mm": "product", "addmm": "product",
    "bmm": "product", "einsum": "product", "moments": "moments", "batch_norm": "norm", "whole_batch_norm": "whole_norm",
    "instance_norm": "whole_norm", "group_norm": "whole_norm", "layer_norm": "whole_norm", "max_pool": "pool",
    "avg_pool": "pool", "average_pool": "pool", "adaptive": "pool", "upsample": "pool", "pad": "copy", "cat": "copy",
    "clone": "copy", "_to_copy": "copy", "stack": "copy", "constant_pad": "copy",
}  # fmt: skip


def class_of(kernel: str) -> str:
    """The class of a kernel by its name; what is not known is taken for pointwise.

    >>> class_of("aten.conv2d.default"), class_of("tile.moments"), class_of("aten.gelu.default")
    ('convolution', 'moments', 'pointwise')
    """
    name = kernel.split(".")[1] if "." in kernel else kernel
    return next((kind for start, kind in _BEGINNINGS.items() if name.startswith(start)), "pointwise")


def shape_of(kernel: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """What the speed of a convolution depends on: the length of its dot products, and how many filters share them.

    >>> shape_of("aten.conv2d.default", [(1, 16, 32, 32), (64, 16, 3, 3)])
    (144, 64)
    """
    if class_of(kernel) != "convolution" or len(shapes) < 2:
        return ()
    return math.prod(shapes[1][1:]), shapes[1][0]
