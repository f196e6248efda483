"""Reductions over space that are no sums: each tile puts its own result in its slot, and all are reduced again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engines.layer.graph import Node, Ref, TensorSpec
from engines.program.builder import Builder
from engines.spatial.entries.axes import reduce_other_axes
from engines.spatial.entries.pooling import cells_of
from engines.spatial.kernels import local_kernel, operator_of
from engines.spatial.ops import entry
from engines.spatial.places import whole_axes
from engines.spatial.refusals import no_rule, refuse_if_read

__all__: list[str] = []


class _Maxima(torch.autograd.Function):
    """The largest value along `dims`, and how often it is there: (slots, 2, ...) in float64, in slot `slot`.

    Whoever gives this slot a gradient has shared it out already: all who are largest here get it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], slot: int, slots: int) -> Tensor:
        largest = x.amax(dims, keepdim=True)
        equal = x == largest
        ctx.save_for_backward(equal)
        ctx.slot, ctx.shape, ctx.dtype = slot, largest.shape, x.dtype
        made = x.new_zeros((slots, 2, *largest.shape), dtype=torch.float64)
        made[slot, 0], made[slot, 1] = largest, equal.sum(dims, keepdim=True)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (equal,) = ctx.saved_tensors
        return equal * grad[ctx.slot, 0].to(ctx.dtype), None, None, None


class _Largest(torch.autograd.Function):
    """The largest of all slots. Its gradient is shared evenly by all pixels that are largest, as ATen does."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor) -> Tensor:
        largest = slots[:, 0].amax(0)
        winners = slots[:, 0] == largest
        ctx.save_for_backward(winners, (slots[:, 1] * winners).sum(0))
        return largest

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        winners, count = ctx.saved_tensors
        share = winners * (grad / count)
        return torch.stack([share, torch.zeros_like(share)], 1)


@local_kernel("tile.largest")
def largest(slots: Tensor, sign: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """In the shape of the whole result."""
    return (sign * _Largest.apply(slots)).to(dtype).view(shape)


@local_kernel("tile.maxima")
def maxima(x: Tensor, sign: int, dims: list[int], slot: int, slots: int) -> Tensor:
    """Of the values, or (sign -1) of their negatives."""
    return _Maxima.apply(x if sign > 0 else -x, dims, slot, slots)  # type: ignore[no-any-return]


def _over_space(b: Builder, node: Node, ref: Ref) -> list[int] | None:
    """The reduced dimensions, where they hold rows and columns; None where they hold neither.

    Raises TraceError where they hold one of the two.
    """
    rows, cols, count = whole_axes(b, ref)
    given = node.arguments.get("dim")
    dims = [dim % count for dim in ([given] if isinstance(given, int) else given or range(count))]
    if (rows in dims) != (cols in dims):
        raise no_rule(node, f"reduces one spatial axis of two (dim={given}), for which there is no rule")
    return dims if rows in dims else None


def _kept(b: Builder, ref: Ref, dims: Sequence[int]) -> tuple[int, ...]:
    """The shape of a value with `dims` reduced to one."""
    return tuple(1 if axis in dims else size for axis, size in enumerate(b.value(ref).spec.shape))


@entry("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extreme(b: Builder, node: Node) -> None:
    """The largest or smallest value over space."""
    source = node.arguments["self"]
    dims = _over_space(b, node, source)
    if dims is None:
        reduce_other_axes(b, node, source)
        return
    sign, tiles = -1 if "min" in node.operator else 1, len(b.stage.ranks)
    like = TensorSpec((tiles, 2, *_kept(b, source, dims)), "float64")
    own = b.local(f"{node.name}.maxima", "tile.maxima", b.owned(source), sign, dims, b.tile, tiles, like=like)
    dtype = getattr(torch, node.spec.dtype)
    b.local(node.name, "tile.largest", b.all_reduce(own), sign, node.spec.shape, dtype, like=node.spec)


@local_kernel("tile.in_slot")
def in_slot(x: Tensor, operator: str, settings: Sequence[Any], dims: list[int], slot: int, slots: int) -> Tensor:
    """The tile's own result of a reduction; zeros in the slots of the other tiles."""
    own = operator_of(operator)(x, *settings, dims, True)
    return functional.pad(own.reshape(1, -1), (0, 0, slot, slots - slot - 1)).view(slots, *own.shape)


@local_kernel("tile.over_slots")
def over_slots(slots: Tensor, operator: str, settings: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """The same reduction of all tiles' results."""
    return operator_of(operator)(slots, *settings, [0]).view(shape)  # type: ignore[no-any-return]


@entry("aten.linalg_vector_norm.default", "aten.logsumexp.default")
def of_its_own_results(b: Builder, node: Node) -> None:
    """A norm is the norm of the tiles' norms, and likewise the logarithm of a sum of exponentials."""
    a, source = node.arguments, node.arguments["self"]
    dims, order = _over_space(b, node, source), float(a.get("ord", 2))
    if dims is None:
        reduce_other_axes(b, node, source)
        return
    if not 0 < order < math.inf:
        raise no_rule(node, f"is of order {order}, for which there is no rule over space")
    plain = "aten.logsumexp.default" if "logsumexp" in node.operator else "aten.linalg_vector_norm.default"
    settings, tiles = () if "logsumexp" in plain else (order,), len(b.stage.ranks)
    like = TensorSpec((tiles, *_kept(b, source, dims)), node.spec.dtype)
    own = b.local(
        f"{node.name}.slots", "tile.in_slot", b.owned(source), plain, settings, dims, b.tile, tiles, like=like
    )
    b.local(node.name, "tile.over_slots", b.all_reduce(own), plain, settings, node.spec.shape, like=node.spec)


@local_kernel("tile.first_maximum")
def first_maximum(x: Tensor, corner: tuple[int, int], width_px: int, slot: int, slots: int) -> Tensor:
    """(slots, 2, ..., 1, 1) in float64: the tile's largest value, and where its first one lies in the whole image."""
    value, index = functional.adaptive_max_pool2d(x, 1, return_indices=True)
    row, col = index // x.shape[-1] + corner[0], index % x.shape[-1] + corner[1]
    own = torch.stack([value.double(), (row * width_px + col).double()])
    return functional.pad(own.reshape(1, -1), (0, 0, slot, slots - slot - 1)).view(slots, *own.shape)


@local_kernel("tile.first_of_slots")
def first_of_slots(slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, None]:
    """The largest value; of several, that of the first pixel in the order of rows, as ATen has it."""
    values, places = slots[:, 0].detach(), slots[:, 1].detach()
    late = places.masked_fill(values != values.amax(0), math.inf)
    return slots[:, 0].gather(0, late.argmin(0, keepdim=True))[0].to(dtype), None


@local_kernel("tile.adaptive_maximum")
def adaptive_maximum(
    x: Tensor, rows: tuple[tuple[int, int], ...], cols: tuple[tuple[int, int], ...]
) -> tuple[Tensor, None]:
    """The largest value of each cell; cells are (start, stop) ranges of the window."""
    cells = [[functional.adaptive_max_pool2d(x[..., r0:r1, c0:c1], 1) for c0, c1 in cols] for r0, r1 in rows]
    return torch.cat([torch.cat(row, -1) for row in cells], -2), None


@entry("aten.adaptive_max_pool2d.default", images=("self",))
def adaptive_max_pool(b: Builder, node: Node) -> None:
    """As the average, but for the largest value; which pixel it was nobody may ask."""
    source = node.arguments["self"]
    value, out_px = b.value(source), tuple(node.arguments["output_size"])
    refuse_if_read(b, node, 1, "the places of its maxima")
    like = TensorSpec((*value.spec.shape[:-2], *out_px), value.spec.dtype)
    if out_px == (1, 1):
        tiles, tile = len(b.stage.ranks), b.tiles(value.size_px)[b.rank]
        slots = TensorSpec((tiles, 2, *like.shape), "float64")
        corner = (tile.rows.start, tile.cols.start)
        own = b.local(
            f"{node.name}.slots", "tile.first_maximum", b.owned(source), corner, value.size_px[1], b.tile, tiles,
            like=slots,
        )  # fmt: skip
        b.local(node.name, "tile.first_of_slots", b.all_reduce(own), getattr(torch, value.spec.dtype), like=like)
        return
    x, rows, cols = cells_of(b, source, out_px)
    b.local(node.name, "tile.adaptive_maximum", x, rows, cols, like=like, axes=(-2, -1))
