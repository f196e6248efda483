"""The rules of the operator table, by kind. Importing this package fills the table."""

from engines.spatial.entries import assignment, channels, convolution, interpolation, norms, reduction, sampling  # noqa: F401
