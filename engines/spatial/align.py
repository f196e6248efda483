"""Alignment of a node's arguments and results: which pixels of them a rank holds, and along which axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from engines.errors import TraceError
from engines.layer.graph import Node, Ref, TensorSpec
from engines.program.builder import Builder
from engines.program.value_layout import ValueLayout

__all__ = [
    "align_arguments",
    "cut_to_tile",
    "get_axes_without",
    "get_local_ranges",
    "get_local_shape",
    "get_spatial_axes",
    "get_spec",
    "map_refs",
]


def get_spec(b: Builder, name: str) -> TensorSpec:
    """Return the whole-image shape and type of any value, weight or buffer."""
    return b.values[name].spec if name in b.values else b.graph.specs[name]


def map_refs(pick: Callable[[Ref], Ref], argument: Any) -> Any:
    """Apply `pick` to every `Ref` in nested arguments."""
    if isinstance(argument, list | tuple):
        return type(argument)(map_refs(pick, item) for item in argument)
    return pick(argument) if isinstance(argument, Ref) else argument


def align_arguments(b: Builder, node: Node) -> dict[str, Any]:
    """Return the node's arguments, aligned pixel by pixel: each rank takes its own tile of values that all ranks hold.

    A single row or column that is broadcast over an image is gathered on every rank.

    Raises TraceError if the arguments cannot be aligned.
    """
    # The largest image sets the tiles. Others have the same pixels, or one row or column that is broadcast over it:
    #
    #     x  (N, C, H, W)   cut into tiles         y  (N, C, 1, W)   tiled, too, along W: gathered, then cut as x is
    #     z  (C, 1, 1)      whole on each rank     m  (H, W)         whole on each rank, and cut as x is
    images = (b.get_value(Ref(name)) for name in node.reads if b.is_tiled(Ref(name)))
    tiled = max(images, key=lambda image: math.prod(image.size_px))
    for name in node.reads:
        if b.is_tiled(Ref(name)):
            same = zip(b.values[name].size_px, tiled.size_px, strict=True)
            is_aligned = b.values[name].axes == tiled.axes and all(size in (1, whole) for size, whole in same)
        else:
            shape, pairs = get_spec(b, name).shape, zip(tiled.axes or (), tiled.size_px, strict=True)
            is_aligned = all(len(shape) < -axis or shape[axis] in (1, size) for axis, size in pairs)
        if not is_aligned:
            raise TraceError(
                f"{node.operator} in {node.where} joins a tiled value of {tiled.size_px} pixels with {name} of shape "
                f"{get_spec(b, name).shape}, which has other pixels. "
                "Make it a function of the image, or end the spatial stages before this layer (spatial_size, balance)."
            )
    parts = {}
    for ref in map(Ref, dict.fromkeys(node.reads)):
        beneath = b.is_tiled(ref) and b.get_value(ref).size_px == tiled.size_px
        parts[ref.name] = b.align_to_output(ref) if beneath else cut_to_tile(b, node, b.all_gather(ref), tiled)
    return {name: map_refs(lambda ref: parts[ref.name], argument) for name, argument in node.arguments.items()}


def cut_to_tile(b: Builder, node: Node, ref: Ref, tiled: ValueLayout) -> Ref:
    """Return the part, under this rank's tile of the node's result, of a value that every rank holds whole.

    The last axes of the value are those of `tiled`, or of size 1.
    """
    spec, tile = get_spec(b, ref.name), b.get_output_tiles(tiled.size_px)[b.rank]
    cuts = {
        axis: (span.start, span.stop)
        for axis, span in zip(tiled.axes or (), (tile.rows, tile.cols), strict=True)
        if len(spec.shape) >= -axis and spec.shape[axis] > len(span)
    }
    if not cuts:
        return ref
    return b.add_local_op(f"{node.name}.{ref.name}.tile", "tile.cut", ref, tuple(cuts), tuple(cuts.values()), like=spec)


def get_local_ranges(b: Builder, spec: TensorSpec, axes: tuple[int, int] | None) -> list[tuple[int, int, int]]:
    """Return, for each axis of the current node's result, its whole size and this rank's start and stop."""
    places = [(size, 0, size) for size in spec.shape]
    if axes is not None:
        tile = b.get_output_tiles((spec.shape[axes[0]], spec.shape[axes[1]]))[b.rank]
        for axis, span in zip(axes, (tile.rows, tile.cols), strict=True):
            places[axis] = (spec.shape[axis], span.start, span.stop)
    return places


def get_local_shape(b: Builder, spec: TensorSpec, axes: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the shape of this rank's part of the current node's result."""
    return tuple(stop - start for _, start, stop in get_local_ranges(b, spec, axes))


def get_spatial_axes(b: Builder, ref: Ref) -> tuple[int, int, int]:
    """Return the two spatial axes of a tiled value, counted from the front, and its number of dimensions."""
    value = b.get_value(ref)
    rows, cols = value.axes or (-2, -1)
    count = len(value.spec.shape)
    return rows + count, cols + count, count


def get_axes_without(b: Builder, ref: Ref, dims: Sequence[int]) -> tuple[int, int]:
    """Return the spatial axes of a tiled value, counted from the end, after the dimensions `dims` are removed."""
    rows, cols, count = get_spatial_axes(b, ref)
    left = [axis for axis in range(count) if axis not in dims]
    return left.index(rows) - len(left), left.index(cols) - len(left)
