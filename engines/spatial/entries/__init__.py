"""The entries of the operator table, by kind. Importing this package fills the table."""

from engines.spatial.entries import convolution, normalisation, pooling, reduction, reshaping

__all__ = ["convolution", "normalisation", "pooling", "reduction", "reshaping"]
