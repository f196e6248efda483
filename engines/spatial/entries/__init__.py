"""The rules of the operator table, by kind. Importing this package fills the table."""

from engines.spatial.entries import (
    assignment,
    channels,
    convolution,
    minmax,
    norms,
    pooling,
    reduction,
    reshape,
    sampling,
)

__all__ = [
    "assignment",
    "batch_norm",
    "channels",
    "convolution",
    "indexing",
    "irregular",
    "label_count",
    "matmul",
    "minmax",
    "norms",
    "partial_reductions",
    "pooling",
    "random_ops",
    "reduction",
    "reshape",
    "sampling",
    "slice_pad",
]
