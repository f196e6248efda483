"""Partial results of all tiles, gathered on every rank: reductions whose results are reduced again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.layer.graph import Node, Ref, TensorSpec
from engines.program.builder import Builder
from engines.spatial.align import get_spatial_axes

__all__ = ["all_gather_partials", "find_spatial_dims"]


def find_spatial_dims(b: Builder, node: Node, ref: Ref) -> list[int] | None:
    """Return a node's reduced dimensions, from the front, if one of them is distributed over the ranks; else None."""
    rows, cols, count = get_spatial_axes(b, ref)
    given = node.arguments.get("dim")
    dims = [dim % count for dim in ([given] if isinstance(given, int) else given or range(count))]
    apart = {0} if b.is_batch_sharded(ref) else {rows, cols}
    return dims if apart & set(dims) else None


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
    value, grid = b.get_value(ref), b.stage.grid
    rows, cols, _ = get_spatial_axes(b, ref)
    # A 4 x 6 image over 2 x 3 tiles, reduced over rows: each tile has 1 row of its 2 columns, and all of them form an
    # image of 2 x 6 pixels. Reduced over both, they form one of 2 x 3.
    parts = {rows: grid.rows, cols: grid.cols}
    shape = [parts.get(axis, 1) if axis in dims else size for axis, size in enumerate(value.spec.shape)]
    like = TensorSpec((*lead, *shape), dtype)
    x = b.crop_to_own(ref)
    return b.all_gather(
        b.add_local_op(f"{node.name}.own", kernel, x, list(dims), *settings, like=like, axes=value.axes)
    )
