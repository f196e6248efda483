"""The entries of the operator table, by kind. Importing this package fills the table."""

from engines.spatial.entries import (
    axes,
    convolution,
    counted,
    extremes,
    normalisation,
    norms,
    partial,
    pooling,
    products,
    random,
    reduction,
    reshaping,
    sampling,
    scattered,
    shapes,
)

__all__ = [
    "axes",
    "convolution",
    "counted",
    "extremes",
    "normalisation",
    "norms",
    "partial",
    "pooling",
    "products",
    "random",
    "reduction",
    "reshaping",
    "sampling",
    "scattered",
    "shapes",
]
