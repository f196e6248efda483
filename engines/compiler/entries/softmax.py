"""Softmax over rows and columns: the maximum and the sum of the exponentials are those of all tiles."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.channels import check_only_first_tiled, lower_other_axes
from mpi4dl_nb.engines.compiler.entries.reduction import all_gather_partials, find_spatial_dims
from mpi4dl_nb.engines.compiler.local_rules import find_sharded_dims, make_gather_error
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.kernels import register_kernel


@register_kernel("tile.peaks")
def find_peaks(x: Tensor, dims: list[int], dtype: torch.dtype) -> Tensor:
    """Return the largest values along `dims`, without a gradient: a softmax is the same for every shift."""
    return x.detach().amax(dims, keepdim=True).to(dtype)


@register_kernel("tile.below_peak")
def subtract_peaks(x: Tensor, peaks: Tensor, dims: list[int]) -> Tensor:
    """Return the differences from the largest of the tiles' `peaks`, in their type."""
    return x.to(peaks.dtype) - peaks.amax(dims, keepdim=True)


@register_kernel("tile.exponential_sums")
def sum_exponentials(x: Tensor, dims: list[int]) -> Tensor:
    """Return the sums of the exponentials along `dims`."""
    return x.exp().sum(dims, keepdim=True)


@register_kernel("tile.softmax")
def normalise_exponentials(x: Tensor, total: Tensor, dtype: torch.dtype, logarithm: bool) -> Tensor:
    """Return the softmax of the tile's pixels, or its logarithm, from the sum of the exponentials over all pixels."""
    return (x - total.log() if logarithm else x.exp() / total).to(dtype)


@register_rule("aten.softmax.int", "aten.log_softmax.int")
def softmax(b: Builder, node: Node) -> None:
    """Normalise over an axis that the ranks share, by partial maxima and sums; over others, each pixel by itself."""
    # Stable as in one process, in two steps over all tiles (Milakov and Gimelshein, 2018, arXiv:1805.02867):
    #
    #     own pixels -> maxima, gathered -> x - maximum -> sum of the exponentials, all-reduced -> divide
    source = check_only_first_tiled(b, node)
    dims = find_spatial_dims(b, node, source)
    if dims is None:
        lower_other_axes(b, node, source)
        return
    if not find_sharded_dims(b, source) <= set(dims):
        raise make_gather_error(node, "normalises over one spatial axis of two")
    value = b.get_value(source)
    spec = replace(value.spec, dtype=(value.spec if node.arguments.get("dtype") is None else node.result).sums.dtype)
    dtype = getattr(torch, spec.dtype)
    peaks = all_gather_partials(b, node, source, "tile.peaks", dims, dtype, dtype=spec.dtype)

    def subtract(x: Ref) -> Ref:
        name = f"{node.name}.{x.name}.below"
        if name not in b.values:
            b.add_local_op(name, "tile.below_peak", x, peaks, dims, like=spec, axes=value.places)
        return Ref(name)

    shape = tuple(1 if dim in dims else size for dim, size in enumerate(spec.shape))
    like = replace(spec, shape=shape)
    sums = b.add_local_op(f"{node.name}.sum", "tile.exponential_sums", subtract(b.crop_to_own(source)), dims, like=like)
    settings = b.all_reduce(sums), getattr(torch, node.result.dtype), "log" in node.operator
    x = subtract(b.align_to_output(source))
    b.add_local_op(node.name, "tile.softmax", x, *settings, like=node.result, axes=value.places)
