"""Reductions over space other than sums: every tile reduces its own pixels, and the results are reduced again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engines.graph.model_graph import Node, Ref, TensorSpec
from engines.program.builder import Builder
from engines.spatial.entries.channels import lower_other_axes
from engines.spatial.entries.convolution import Cells, fetch_cells, to_whole_index
from engines.spatial.entries.reduction import all_gather_partials, find_spatial_dims
from engines.spatial.kernels import get_operator, register_kernel
from engines.spatial.local_rules import make_gather_error
from engines.spatial.operator_table import register_rule


class _Maxima(torch.autograd.Function):
    """The largest value along `dims`, and how often it occurs: (2, ...) in float64.

    The incoming gradient is already divided by the number of maxima: every maximum of this tile receives it whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        largest = x.amax(dims, keepdim=True)
        equal = x == largest
        ctx.save_for_backward(equal)
        ctx.dtype = x.dtype
        return torch.stack([largest.double(), equal.sum(dims, keepdim=True).double()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (equal,) = ctx.saved_tensors
        return equal * grad[0].to(ctx.dtype), None


class _Largest(torch.autograd.Function):
    """The largest value of all tiles. All pixels with that value share its gradient evenly, as in ATen."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, dims: list[int]) -> Tensor:
        largest = found[0].amax(dims, keepdim=True)
        # As in ATen, a maximum that occurs k times passes 1/k of its gradient to each, over all tiles together: hence
        # the counts travel with the values. `_Maxima` then hands the share to each of its own.
        winners = found[0] == largest
        ctx.save_for_backward(winners, (found[1] * winners).sum(dims, keepdim=True))
        return largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        winners, count = ctx.saved_tensors
        share = winners * (grad / count)
        return torch.stack([share, torch.zeros_like(share)]), None


@register_kernel("tile.largest")
def merge_maxima(found: Tensor, dims: list[int], sign: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the largest value of all tiles, in the shape of the whole result."""
    return (sign * _Largest.apply(found, dims)).to(dtype).view(shape)


@register_kernel("tile.maxima")
def find_maxima(x: Tensor, dims: list[int], sign: int) -> Tensor:
    """Return the maxima of the values, or (sign -1) of their negatives."""
    return _Maxima.apply(x if sign > 0 else -x, dims)  # type: ignore[no-any-return]


@register_rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def lower_minmax(b: Builder, node: Node) -> None:
    """Reduce to the largest or smallest value over space, or over rows or columns."""
    source = node.arguments["self"]
    dims = find_spatial_dims(b, node, source)
    if dims is None:
        lower_other_axes(b, node, source)
    else:
        _reduce_minmax(b, node, source, dims, -1 if "min" in node.operator else 1)


def _reduce_minmax(b: Builder, node: Node, source: Ref, dims: list[int], sign: int) -> None:
    found = all_gather_partials(b, node, source, "tile.maxima", dims, sign, dtype="float64", lead=(2,))
    dtype = getattr(torch, node.spec.dtype)
    b.add_local_op(node.name, "tile.largest", found, dims, sign, node.spec.shape, dtype, like=node.spec)


@register_kernel("tile.reduced")
def reduce_dims(
    x: Tensor, dims: list[int], operator: str, settings: Sequence[Any], shape: Sequence[int] | None = None
) -> Tensor:
    """Reduce along `dims`, keeping each with size 1, or return the result in the whole result's `shape`."""
    made = get_operator(operator)(x, *settings, dims, True)
    return made if shape is None else made.view(shape)


@register_rule("aten.linalg_vector_norm.default", "aten.logsumexp.default")
def reduce_twice(b: Builder, node: Node) -> None:
    """Reduce again the tiles' results: a norm is the norm of norms, and likewise a log-sum-exp."""
    a, source = node.arguments, node.arguments["self"]
    dims, order = find_spatial_dims(b, node, source), float(a.get("ord", 2))
    if dims is None:
        lower_other_axes(b, node, source)
    elif math.isinf(order):
        value, x = b.get_value(source), b.crop_to_own(source)
        own = b.add_local_op(f"{node.name}.absolute", "aten.abs.default", x, like=value.spec, axes=value.axes)
        _reduce_minmax(b, node, own, dims, 1 if order > 0 else -1)
    elif order <= 0:
        raise make_gather_error(node, f"is of order {order}")
    else:
        settings = () if "logsumexp" in node.operator else (order,)
        how = dims, node.operator, settings
        found = all_gather_partials(b, node, source, "tile.reduced", *how, dtype=node.spec.dtype)
        b.add_local_op(node.name, "tile.reduced", found, *how, node.spec.shape, like=node.spec)


@register_kernel("tile.first_maximum")
def find_first_maximum(x: Tensor, dims: list[int], corner: tuple[int, int], width_px: int) -> Tensor:
    """Return (2, ..., 1, 1) in float64: the tile's largest value, and the whole-image index of its first one."""
    value, index = functional.adaptive_max_pool2d(x, 1, return_indices=True)
    return torch.stack([value.double(), to_whole_index(index, x.shape[-1], corner, width_px).double()])


@register_kernel("tile.first_of_all")
def merge_first_maxima(found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest value and its index; of several, those of the first pixel in row-major order, as in ATen."""
    values, places = found.flatten(-2)
    # Float64 holds whole numbers up to 2 ** 53 exactly, so that indices may travel in one tensor with the values.
    late = places.detach().masked_fill(values != values.amax(-1, keepdim=True), math.inf)
    first = late.argmin(-1, keepdim=True)
    return values.gather(-1, first)[..., None].to(dtype), places.gather(-1, first)[..., None].long()


@register_kernel("tile.adaptive_maximum")
def pool_adaptive_maximum(
    x: Tensor, rows: Cells, cols: Cells, corner: tuple[int, int], width_px: int
) -> tuple[Tensor, Tensor]:
    """Return the largest value of each cell and its index; cells are (start, stop) ranges of the window at `corner`."""
    lines = []
    for top, bottom in rows:
        values, places = [], []
        for left, right in cols:
            cell = x[..., top:bottom, left:right]
            value, index = functional.adaptive_max_pool2d(cell, 1, return_indices=True)
            values.append(value)
            places.append(to_whole_index(index, right - left, (corner[0] + top, corner[1] + left), width_px))
        lines.append((torch.cat(values, -1), torch.cat(places, -1)))
    values, places = zip(*lines, strict=True)
    return torch.cat(values, -2), torch.cat(places, -2)


@register_rule("aten.adaptive_max_pool2d.default", images=("self",))
def adaptive_max_pool2d(b: Builder, node: Node) -> None:
    """Reduce each cell to its largest value and the index of that, with the cells of the adaptive average."""
    source = node.arguments["self"]
    value, out_px = b.get_value(source), tuple(node.arguments["output_size"])
    like, width_px = TensorSpec((*value.spec.shape[:-2], *out_px), value.spec.dtype), value.size_px[1]
    if out_px == (1, 1):
        tile = b.get_tiles(value.size_px)[b.rank]
        settings = (tile.rows.start, tile.cols.start), width_px
        dims = [len(like.shape) - 2, len(like.shape) - 1]
        how = "tile.first_maximum", dims, *settings
        found = all_gather_partials(b, node, source, *how, dtype="float64", lead=(2,))
        b.add_local_op(node.name, "tile.first_of_all", found, getattr(torch, value.spec.dtype), like=like)
        return
    x, wanted, rows, cols = fetch_cells(b, source, out_px)
    corner = (wanted.rows.start, wanted.cols.start)
    b.add_local_op(node.name, "tile.adaptive_maximum", x, rows, cols, corner, width_px, like=like, axes=(-2, -1))
