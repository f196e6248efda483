"""Reductions over space: sums, and the losses that end in one, by an all-reduce; others by reducing partial results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.channels import lower_other_axes
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    apply_locally,
    cut_to_tile,
    find_sharded_dims,
    get_spec,
    make_gather_error,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.places import Places, keep_places, reduce_on_tiles
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.kernels import get_operator, register_kernel

# Partial results of all tiles, gathered on every rank: reductions whose results are reduced again.


def find_spatial_dims(b: Builder, node: Node, ref: Ref) -> list[int] | None:
    """Return a node's reduced dimensions, from the front, if one of them is distributed over the ranks; else None."""
    count, argument = len(b.get_value(ref).spec.shape), node.arguments.get("dim")
    dims = [dim % count for dim in ([argument] if isinstance(argument, int) else argument or range(count))]
    return None if find_sharded_dims(b, ref).isdisjoint(dims) else dims


def all_gather_partials(
    b: Builder,
    node: Node,
    ref: Ref,
    kernel: str,
    dims: Sequence[int],
    *settings: Any,
    dtype: str,
    lead: tuple[int, ...] = (),
) -> Ref:
    """Return `kernel(own pixels, dims, *settings)` of all tiles, on every rank.

    The kernel reduces `dims` to 1 and may add leading axes `lead`. Reduced rows are then as many as those of the grid,
    and likewise columns, so that the tiles' results are an image, cut by the same grid.
    """
    value = b.get_value(ref)
    # A 4 x 6 image over 2 x 3 tiles, reduced over rows: each tile has 1 row of its 2 columns, and all of them form an
    # image of 2 x 6 pixels. Reduced over both, they form one of 2 x 3.
    shape, places = reduce_on_tiles(value.spec.shape, value.places, b.stage.parts, dims)
    like = TensorSpec((*lead, *shape), dtype)
    x = b.crop_to_own(ref)
    partial = b.add_local_op(f"{node.name}.own", kernel, x, list(dims), *settings, like=like, axes=places)
    return _sum_placed(b, node, partial) if b.tile_by_tile else b.all_gather(partial)


def _sum_placed(b: Builder, node: Node, own: Ref) -> Ref:
    """Gather without an exchange, for tiles that are computed one after another: by a sum over all tiles.

    Each tile adds its part to an image that is zero everywhere else, so that the sum loses nothing.
    """
    #     tile 0   tile 1   tile 2        sum
    #     a . .  + . b .  + . . c    =    a b c         as for a mean, a pass over the image makes the sum
    value = b.get_value(own)
    tile, split = b.get_tiles(value.size_px)[b.rank], b.get_value(b.split_axes(own))
    settings = list(split.spec.shape), split.axes, tuple((span.start, span.stop) for span in tile)
    placed = b.add_local_op(f"{node.name}.placed", "tile.place", Ref(split.name), *settings, like=split.spec)
    total = b.all_reduce(placed)
    if split is value:
        return total
    return b.add_local_op(f"{node.name}.partials", "aten.reshape.default", total, value.spec.shape, like=value.spec)


@register_kernel("tile.place")
def place_tile(x: Tensor, shape: Sequence[int], axes: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return a tensor of `shape` that holds `x` in `spans` of its `axes`, and zeros elsewhere."""
    whole = x.new_zeros(shape)
    part = whole
    for axis, (start, stop) in zip(axes, spans, strict=True):
        part = part.narrow(axis, start, stop - start)
    part.copy_(x)
    return whole


_NONE, _MEAN = 0, 1


def reduce_mean(b: Builder, node: Node, ref: Ref, dims: Sequence[int], keepdim: bool) -> None:
    """Compute the mean over `dims`, which include both spatial axes."""
    _finish_sum(b, node, _sum(b, node, ref, dims, keepdim), b.get_value(ref).spec.numel)


def _sum(b: Builder, node: Node, ref: Ref, dims: Sequence[int], keepdim: bool) -> Ref:
    like, pixels = node.result.sums, b.crop_to_own(ref)
    settings = list(dims), keepdim, getattr(torch, like.dtype)
    return b.all_reduce(b.add_local_op(f"{node.name}.sum", "tile.sum_pixels", pixels, *settings, like=like))


def _finish_sum(b: Builder, node: Node, total: Ref, numel: int | None) -> None:
    """Divide a sum for a mean, over `numel` elements, and cast it to the result's type."""
    if numel is not None:
        # The count is known from the shapes: only sums travel.
        count = numel // node.result.numel
        total = b.add_local_op(f"{node.name}.mean", "aten.div.Scalar", total, count, like=node.result.sums)
    b.add_local_op(node.name, "aten._to_copy.default", total, dtype=getattr(torch, node.result.dtype), like=node.result)


@register_rule("aten.mean.default", "aten.mean.dim", "aten.sum.default", "aten.sum.dim_IntList")
def reduce_sum(b: Builder, node: Node) -> None:
    """Sum or average over space, by local sums and an all-reduce, or over other axes, each pixel by itself."""
    source, keepdim = node.arguments["self"], bool(node.arguments.get("keepdim"))
    dims = find_spatial_dims(b, node, source)
    if dims is None:
        lower_other_axes(b, node, source)
        return
    if not find_sharded_dims(b, source) <= set(dims):
        # Over rows, or over columns: each tile sums its own part, and every rank holds the whole result.
        like, dtype = node.result.sums, getattr(torch, node.result.sums.dtype)
        parts = all_gather_partials(b, node, source, "tile.sum_pixels", dims, True, dtype, dtype=like.dtype)
        total = b.add_local_op(f"{node.name}.sum", "tile.sum_pixels", parts, dims, keepdim, dtype, like=like)
    else:
        total = _sum(b, node, source, dims, keepdim)
    _finish_sum(b, node, total, b.get_value(source).spec.numel if "mean" in node.operator else None)


@register_kernel("tile.cross_entropy_sums")
def sum_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return (2,): the summed loss of the tile's pixels, and the divisor for their mean."""
    loss = functional.cross_entropy(x, target, weight, None, ignore_index, None, "sum", label_smoothing)
    if target.is_floating_point():
        return torch.stack([loss, loss.new_tensor(target.numel() // target.shape[1])])
    return torch.stack([loss, _compute_divisor(loss, target, weight, ignore_index)])


def _compute_divisor(loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the divisor of a mean over the labels."""
    if weight is None:
        return (target != ignore_index).sum().to(loss.dtype)
    # As int64, since bytes would be taken for a mask.
    return weight[target[target != ignore_index].long()].sum()


@register_kernel("tile.nll_sums")
def sum_nll(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return (2,) as for cross entropy, but from log-probabilities."""
    loss = functional.nll_loss(x, target, weight, None, ignore_index, None, "sum")
    return torch.stack([loss, _compute_divisor(loss, target, weight, ignore_index)])


@register_kernel("tile.total_loss")
def compute_total(sums: Tensor, mean: bool) -> Tensor:
    """Return the sum or the mean of the (2,) sums of all tiles."""
    return sums[0] / sums[1] if mean else sums[0]


def _align_labels(b: Builder, node: Node) -> tuple[dict[str, Ref], Places]:
    """Return the scores and the target of a loss on tiles, and the places of the sharded axes of the losses.

    Of one that every rank holds whole, each takes its own tile.
    """
    pair = {name: node.arguments[name] for name in ("self", "target")}
    layouts = {name: b.get_value(ref) for name, ref in pair.items()}
    # Losses have the axes of the scores but that of the classes; so have class numbers, but not probabilities:
    #
    #     scores (N, K, H, W)      losses and class numbers (N, H, W)      probabilities (N, K, H, W)
    count = len(layouts["self"].spec.shape)
    scored = {name for name, layout in layouts.items() if len(layout.spec.shape) == count}
    tiled = {name for name, ref in pair.items() if b.is_tiled(ref)}
    if count < 2 or any(place.dim == 1 - count for name in scored & tiled for place in layouts[name].places):
        raise make_gather_error(node, "compares classes along a spatial axis")
    without_classes = [1 - count, None, *range(2 - count, 0)]
    of_losses = {
        keep_places(layouts[name].places, without_classes) if name in scored else layouts[name].places for name in tiled
    }
    if len(of_losses) > 1:
        raise make_gather_error(node, "compares scores with labels whose rows and columns are other axes")
    (places,) = of_losses
    for name in pair.keys() - tiled:
        with_classes = tuple(place._replace(dim=-count) if place.dim == 1 - count else place for place in places)
        layout = replace(layouts[name], places=with_classes if name in scored else places)
        pair[name] = cut_to_tile(b, node, pair[name], layout)
    return pair, places


@register_rule("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", tiled=("self", "target"))
def cross_entropy_loss(b: Builder, node: Node) -> None:
    """Sum the loss of tiled scores (N, K, ...), and the divisor of its mean, over the ranks."""
    a = node.arguments
    pair, places = _align_labels(b, node)
    if a["reduction"] == _NONE:
        apply_locally(b, node, places, **{name: ref for name, ref in pair.items() if not b.is_tiled(ref)})
        return
    kernel, settings = "tile.nll_sums", [a["weight"], a["ignore_index"]]
    if node.operator == "aten.cross_entropy_loss.default":
        kernel, settings = "tile.cross_entropy_sums", [*settings, a["label_smoothing"]]
    cropped, like = map(b.crop_to_own, pair.values()), replace(node.result, shape=(2,))
    sums = b.add_local_op(f"{node.name}.sums", kernel, *cropped, *settings, like=like)
    b.add_local_op(node.name, "tile.total_loss", b.all_reduce(sums), a["reduction"] == _MEAN, like=node.result)


_PIXEL_LOSSES = "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss"
_BINARY_LOSSES = "binary_cross_entropy", "binary_cross_entropy_with_logits"


@register_rule(*(f"aten.{name}.default" for name in (*_PIXEL_LOSSES, *_BINARY_LOSSES)))
def lower_pixel_loss(b: Builder, node: Node) -> None:
    """Compute the loss of each pixel by itself, and sum it over the tile and the ranks."""
    source, parts = next(ref for ref in node.arguments.values() if b.is_tiled(ref)), align_arguments(b, node)
    first, second, *_ = node.arguments.values()
    # One of the two may be broadcast over the other: losses are as many as pixels of both.
    shape = torch.broadcast_shapes(*(get_spec(b, ref.name).shape for ref in (first, second)))
    spec, reduction = replace(node.result, shape=tuple(shape)), node.arguments["reduction"]
    pixels = replace(node, name=f"{node.name}.pixels", spec=spec)
    places = b.get_value(source).places
    losses = apply_locally(b, pixels, places, **{**parts, "reduction": _NONE})
    if reduction == _NONE:
        b.add_local_op(node.name, "aten.alias.default", losses, like=spec, axes=places)
        return
    total = _sum(b, node, losses, range(len(shape)), keepdim=False)
    _finish_sum(b, node, total, spec.numel if reduction == _MEAN else None)


# The divisor of a mean over class numbers, for labels in tiles or shares.


@register_kernel("loss.counted.default")
def count_labels(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return a float64 scalar: the number of labels that are not ignored, each weighted by its class."""
    valid = target != ignore_index
    if weight is None:
        return valid.sum().double()
    # `weight[target[valid]]` would have a shape that depends on the labels; this one suits a compiled segment.
    return weight.double()[torch.where(valid, target, 0).long()].mul(valid).sum()


@register_rule("loss.counted.default", tiled=("target",))
def lower_count_labels(b: Builder, node: Node) -> None:
    """Count the rank's own labels, and sum the counts over the ranks of the stage."""
    target, weight, ignore_index = node.arguments.values()
    count = b.add_local_op(
        f"{node.name}.own", node.operator, b.crop_to_own(target), weight, ignore_index, like=node.result
    )
    b.add_local_op(node.name, "aten.alias.default", b.all_reduce(count), like=node.result)


# Other reductions over space: every tile reduces its own pixels, and the results are reduced again.


class _Maxima(torch.autograd.Function):
    """The largest value along `dims`, and how often it occurs: (2, ...) in float64, or in int64 for whole numbers.

    The incoming gradient is already divided by the number of maxima: every maximum of this tile receives it whole.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        largest = x.amax(dims, keepdim=True)
        equal = x == largest
        ctx.save_for_backward(equal)
        ctx.dtype = x.dtype
        wide = torch.float64 if x.is_floating_point() else torch.int64
        return torch.stack([largest.to(wide), equal.sum(dims, keepdim=True).to(wide)])

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
    return _order(_Largest.apply(found, dims), sign).to(dtype).view(shape)


@register_kernel("tile.maxima")
def find_maxima(x: Tensor, dims: list[int], sign: int) -> Tensor:
    """Return the maxima of the values, or (sign -1) of the values in reverse order."""
    return _Maxima.apply(_order(x if x.is_floating_point() else x.long(), sign), dims)


def _order(x: Tensor, sign: int) -> Tensor:
    """Return the values themselves or (sign -1) in reverse order; the function is its own inverse."""
    if sign > 0:
        return x
    return -x if x.is_floating_point() else ~x  # -x - 1, which cannot overflow


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
    wide = "float64" if b.get_value(source).spec.is_floating else "int64"
    partials = all_gather_partials(b, node, source, "tile.maxima", dims, sign, dtype=wide, lead=(2,))
    dtype = getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.largest", partials, dims, sign, node.result.shape, dtype, like=node.result)


@register_kernel("tile.reduced")
def reduce_dims(
    x: Tensor, dims: list[int], operator: str, settings: Sequence[Any], shape: Sequence[int] | None = None
) -> Tensor:
    """Reduce along `dims`, keeping each with size 1, or return the result in the whole result's `shape`."""
    reduced = get_operator(operator)(x, *settings, dims, True)
    return reduced if shape is None else reduced.view(shape)


class _LogSumExp(torch.autograd.Function):
    """The log-sum-exp of a tile's pixels along `dims`, each kept with size 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        result = x.logsumexp(dims, keepdim=True)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, result = ctx.saved_tensors
        # A tile may have nothing but minus infinity, and -inf - -inf is NaN, where the image as a whole is finite.
        return grad * (x - result).exp().masked_fill(x == -math.inf, 0).conj(), None


register_kernel("tile.logsumexp")(_LogSumExp.apply)


@register_rule("aten.linalg_vector_norm.default", "aten.logsumexp.default")
def reduce_twice(b: Builder, node: Node) -> None:
    """Reduce again the tiles' results: a norm is the norm of norms, and likewise a log-sum-exp."""
    a, source = node.arguments, node.arguments["self"]
    dims, order = find_spatial_dims(b, node, source), float(a.get("ord", 2))
    if dims is None:
        lower_other_axes(b, node, source)
        return
    value, x = b.get_value(source), b.crop_to_own(source)
    spec = value.spec
    if (kind := a.get("dtype")) is not None:  # ATen casts before it reduces
        spec = replace(spec, dtype=str(kind).removeprefix("torch."))
        x = b.add_local_op(f"{node.name}.cast", "aten.to.dtype", x, kind, like=spec, axes=value.places)
    if math.isinf(order):
        magnitudes = b.add_local_op(f"{node.name}.absolute", "aten.abs.default", x, like=spec, axes=value.places)
        _reduce_minmax(b, node, magnitudes, dims, 1 if order > 0 else -1)
    elif order <= 0:
        raise make_gather_error(node, f"is of order {order}")
    else:
        exponential = "logsumexp" in node.operator
        how = dims, node.operator, () if exponential else (order,)
        first = ("tile.logsumexp", dims) if exponential else ("tile.reduced", *how)
        partials = all_gather_partials(b, node, x, *first, dtype=node.result.dtype)
        b.add_local_op(node.name, "tile.reduced", partials, *how, node.result.shape, like=node.result)
