"""Sums over space, and the losses that end in one: local sums, then an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from engines.layer.graph import Node, Ref, TensorSpec
from engines.program.builder import Builder
from engines.spatial.entries.axes import reduce_other_axes
from engines.spatial.entries.partial import of_all_tiles, spatial_dims
from engines.spatial.kernels import local_kernel
from engines.spatial.ops import entry
from engines.spatial.places import lined_up, spec_of, whole_axes, whole_to_tile
from engines.spatial.plain import as_it_is
from engines.spatial.refusals import apart

__all__ = ["mean_over_space"]

_NONE, _MEAN = 0, 1


def mean_over_space(b: Builder, node: Node, ref: Ref, dims: Sequence[int], keepdim: bool) -> None:
    """The mean over `dims`, which hold both spatial axes."""
    sums = _sum(b, f"{node.name}.sum", ref, node.spec, dims, keepdim)
    count = sum(b.counts(ref, node.spec.numel))
    _in_own_type(b, node, b.local(f"{node.name}.mean", "aten.div.Scalar", sums, count, like=node.spec.sums))


def _sum(b: Builder, out: str, ref: Ref, spec: TensorSpec, dims: Sequence[int], keepdim: bool) -> Ref:
    dtype, own = getattr(torch, spec.sums.dtype), b.owned(ref)
    return b.all_reduce(b.local(out, "tile.sum_pixels", own, list(dims), keepdim, dtype, like=spec.sums))


def _in_own_type(b: Builder, node: Node, ref: Ref) -> None:
    """What was summed over ranks becomes the node's result."""
    b.local(node.name, "aten._to_copy.default", ref, dtype=getattr(torch, node.spec.dtype), like=node.spec)


def _sum_lines(b: Builder, node: Node, source: Ref, dims: list[int], keepdim: bool) -> None:
    """Over rows, or over columns: each tile has the sums of its own part, and every rank the whole result."""
    like = node.spec.sums
    dtype = getattr(torch, like.dtype)
    parts = of_all_tiles(b, node, source, "tile.sum_pixels", dims, True, dtype, dtype=like.dtype)
    total = b.local(f"{node.name}.sum", "tile.sum_pixels", parts, dims, keepdim, dtype, like=like)
    if node.operator.startswith("aten.mean."):
        count = b.value(source).spec.numel // node.spec.numel
        total = b.local(f"{node.name}.mean", "aten.div.Scalar", total, count, like=like)
    _in_own_type(b, node, total)


@entry("aten.mean.default", "aten.mean.dim", "aten.sum.default", "aten.sum.dim_IntList", shared=True)
def reduce_sum(b: Builder, node: Node) -> None:
    """Over space: local sums, then over the ranks. Over other axes: each pixel by itself."""
    source, keepdim = node.arguments["self"], bool(node.arguments.get("keepdim"))
    dims = spatial_dims(b, node, source)
    if dims is None:
        reduce_other_axes(b, node, source)
    elif b.is_tiled(source) and not set(whole_axes(b, source)[:2]) <= set(dims):
        _sum_lines(b, node, source, dims, keepdim)
    elif node.operator.startswith("aten.mean."):
        mean_over_space(b, node, source, dims, keepdim)
    else:
        _in_own_type(b, node, _sum(b, f"{node.name}.sum", source, node.spec, dims, keepdim))


@local_kernel("tile.cross_entropy_sums")
def cross_entropy_sums(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float
) -> Tensor:
    """(2,): the summed loss of the tile's pixels, and what a mean over them divides by."""
    loss = functional.cross_entropy(x, target, weight, None, ignore_index, None, "sum", label_smoothing)
    if target.is_floating_point():
        return torch.stack([loss, loss.new_tensor(target.numel() // target.shape[1])])
    return torch.stack([loss, _share(loss, target, weight, ignore_index)])


def _share(loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean over the labels divides by."""
    if weight is None:
        return (target != ignore_index).sum().to(loss.dtype)
    return weight[target[target != ignore_index]].sum()


@local_kernel("tile.nll_sums")
def nll_sums(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """(2,): the same for what is a logarithm of probabilities already."""
    loss = functional.nll_loss(x, target, weight, None, ignore_index, None, "sum")
    return torch.stack([loss, _share(loss, target, weight, ignore_index)])


@local_kernel("tile.ratio")
def ratio(sums: Tensor) -> Tensor:
    """The mean."""
    return sums[0] / sums[1]


@local_kernel("tile.first")
def first(sums: Tensor) -> Tensor:
    """The sum."""
    return sums[0]


def _on_tile(b: Builder, node: Node) -> dict[str, Ref]:
    """Prediction and labels, of which one may be held wholly by all ranks: then each takes its own tile."""
    pair = {name: node.arguments[name] for name in ("self", "target")}
    tiled = next((b.value(ref) for ref in pair.values() if b.is_tiled(ref)), None)
    if tiled is None:
        return pair
    if len(spec_of(b, pair["self"].name).shape) < 4:
        raise apart(node, "compares classes along a spatial axis")
    return {name: ref if b.is_tiled(ref) else whole_to_tile(b, node, ref, tiled) for name, ref in pair.items()}


@entry("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default", images=("self", "target"), shared=True)
def cross_entropy(b: Builder, node: Node) -> None:
    """Over tiled predictions (N, K, H, W): the summed loss, and what the mean divides by, are summed over ranks."""
    a = node.arguments
    pair = _on_tile(b, node)
    if a["reduction"] == _NONE:
        whole = {name: ref for name, ref in pair.items() if not b.is_tiled(ref)}
        as_it_is(b, node, (-2, -1) if any(map(b.is_tiled, node.arguments.values())) else None, **whole)
        return
    plain = node.operator == "aten.cross_entropy_loss.default"
    kernel, smoothing = ("tile.cross_entropy_sums", (a["label_smoothing"],)) if plain else ("tile.nll_sums", ())
    sums = b.local(
        f"{node.name}.sums", kernel, *map(b.owned, pair.values()), a["weight"], a["ignore_index"],
        *smoothing, like=replace(node.spec, shape=(2,)),
    )  # fmt: skip
    kernel = "tile.ratio" if a["reduction"] == _MEAN else "tile.first"
    b.local(node.name, kernel, b.all_reduce(sums), like=node.spec)


@entry(
    *(
        f"aten.{name}.default"
        for name in (
            "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss",
            "binary_cross_entropy", "binary_cross_entropy_with_logits",
        )
    ),
    shared=True,
)  # fmt: skip
def pixel_loss(b: Builder, node: Node) -> None:
    """A loss of each pixel by itself, summed over the tile and the ranks."""
    source = next(ref for ref in node.arguments.values() if b.is_spread(ref))
    parts = lined_up(b, node) if b.is_tiled(source) else node.arguments
    reduction = node.arguments["reduction"]
    spec = b.value(source).spec
    pixels = replace(node, name=f"{node.name}.pixels", spec=spec)
    each = as_it_is(b, pixels, b.value(source).axes, **{**parts, "reduction": _NONE})
    if reduction == _NONE:
        b.local(node.name, "aten.alias.default", each, like=spec, axes=b.value(source).axes)
        return
    total = _sum(b, f"{node.name}.sum", each, node.spec, range(len(spec.shape)), keepdim=False)
    count = sum(b.counts(source, 1)) if reduction == _MEAN else 1
    _in_own_type(b, node, b.local(f"{node.name}.mean", "aten.div.Scalar", total, count, like=node.spec.sums))
