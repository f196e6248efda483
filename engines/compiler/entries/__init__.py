"""The rules of the operator table, by kind. Importing this package fills the table."""

from mpi4dl_nb.engines.compiler.entries import (  # noqa: F401
    assignment,
    attention,
    channels,
    convolution,
    interpolation,
    norms,
    patches,
    pooling,
    positions,
    products,
    reduction,
    sampling,
    softmax,
)
