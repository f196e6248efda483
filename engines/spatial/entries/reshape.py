"""Other shapes for the same values: rows and columns stay whole axes, the others are split, merged or repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engines.graph.model_graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.sampling import lower_resample, make_copy_taps, pad_with_copies
from engines.spatial.local_rules import (
    align_arguments,
    all_gather_lines,
    apply_locally,
    get_local_shape,
    get_spatial_axes,
    get_spec,
    make_gather_error,
)
from engines.spatial.operator_table import register_rule
from engines.spatial.tiles import Span, Tile
from engines.spatial.windows import Shift, SlidingWindow

__all__: list[str] = []


@register_rule(
    *(f"aten.{name}.default" for name in ("view", "reshape", "view_as", "reshape_as", "squeeze", "unsqueeze")),
    *("aten.squeeze.dim", "aten.squeeze.dims", "aten.flatten.using_ints", "aten.unflatten.int"),
)
def reshape(b: Builder, node: Node) -> None:
    """Reshape values in the same order; rows and columns must each remain an axis of its own."""
    source = next(iter(node.arguments.values()))
    if not b.is_tiled(source):
        raise make_gather_error(node, "takes its shape from an image")
    shape = b.get_value(source).spec.shape
    found = [_find_unchanged_axes(shape, node.spec.shape, axis) for axis in get_spatial_axes(b, source)[:2]]
    pairs = [(rows, cols) for rows in found[0] for cols in found[1] if rows != cols]
    if not pairs:
        raise make_gather_error(node, f"takes rows and columns apart or together ({shape} to {node.spec.shape})")
    count = len(node.spec.shape)
    # Axes of size 1 leave a choice: prefer the last two axes, where rules for images expect rows and columns.
    axes = tuple(axis - count for axis in max(pairs, key=lambda pair: (pair == (count - 2, count - 1), pair)))
    x, own = b.align_to_output(source), get_local_shape(b, node.spec, axes)
    b.add_local_op(node.name, "aten.reshape.default", x, own, like=node.spec, axes=axes)


def _find_unchanged_axes(shape: Sequence[int], out: Sequence[int], axis: int) -> list[int]:
    """Return the axes of `out` along which the same values run as along `axis` of `shape`.

    >>> _find_unchanged_axes((2, 6, 5, 7), (2, 2, 3, 5, 7), 2)
    [3]
    """
    # In row-major order an axis keeps its values if it has the same size, and as many positions before it.
    before = math.prod(shape[:axis])
    return [at for at, size in enumerate(out) if size == shape[axis] and math.prod(out[:at]) == before]


@register_rule("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def expand(b: Builder, node: Node) -> None:
    """Expand axes of size 1 and add leading axes."""
    source = align_arguments(b, node)["self"]
    axes = next(b.values[name].axes for name in node.reads if b.is_tiled(Ref(name)))
    whole = get_spec(b, source.name).shape
    if b.is_tiled(source) and any(whole[axis] != node.spec.shape[axis] for axis in axes):
        raise make_gather_error(node, "repeats rows or columns")
    own = get_local_shape(b, node.spec, axes)
    b.add_local_op(node.name, "aten.expand.default", source, own, like=node.spec, axes=axes)


@register_rule("aten.repeat.default", "aten.tile.default", images=("self",))
def repeat(b: Builder, node: Node) -> None:
    """Repeat channels and batch; or rows and columns."""
    times, source = node.arguments.get("repeats", node.arguments.get("dims")), node.arguments["self"]
    if not set(times[-2:]) - {1}:
        apply_locally(b, node, (-2, -1))
    elif set(times[:-2]) - {1}:
        raise make_gather_error(node, f"repeats pixels and other axes at once ({tuple(times)})")
    else:
        sizes = zip(b.get_value(source).size_px, (1, *times)[-2:], strict=True)
        lower_resample(b, node, source, *(make_copy_taps([*range(size)] * again) for size, again in sizes))


@register_rule("aten.new_empty.default")
def new_empty(b: Builder, node: Node) -> None:
    """Create a tensor that only takes its type from an image: every rank makes all of it."""
    apply_locally(b, node, None)


# Slicing, padding, picking and permuting: operators that move pixels or leave them in place.


__all__: list[str] = []


@register_rule("aten.constant_pad_nd.default", "aten.pad.default", images=("self",))
def pad(b: Builder, node: Node) -> None:
    """Pad by a constant: output i reads input i - (pixels before it), and the fill outside the image."""
    a = node.arguments
    before = list(a["pad"]) + [0] * (4 - len(a["pad"]))
    if a.get("mode", "constant") != "constant":
        pad_with_copies(b, node)
        return
    out_px = (node.spec.shape[-2], node.spec.shape[-1])
    fill = float(a.get("value") or 0.0)
    x = b.pad_window(b.read_window(a["self"], out_px, Shift(-before[2]), Shift(-before[0]), fill))
    channels = [0, 0, 0, 0, *before[4:]]
    b.add_local_op(node.name, "aten.constant_pad_nd.default", x, channels, fill, like=node.spec, axes=(-2, -1))


@register_rule("aten.slice.Tensor")
def crop(b: Builder, node: Node) -> None:
    """Slice: along a spatial axis output i reads input start + i * step; along others each pixel stays in place."""
    a = node.arguments
    rows, cols, count = get_spatial_axes(b, a["self"])
    axis = a["dim"] % count
    if axis not in (rows, cols):
        apply_locally(b, node, b.get_value(a["self"]).axes)
        return
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(b.get_value(a["self"]).spec.shape[axis])
    # x[..., start:stop:step] reads like a 1x1 kernel with that stride.
    stay, move = Shift(0), SlidingWindow(kernel=1, stride=step, padding=-start)
    out_px = (node.spec.shape[rows], node.spec.shape[cols])
    if not b.can_tile(out_px) and start < stop:
        height, width = b.get_value(a["self"]).size_px
        lines = Span(start, stop)
        wanted = Tile(lines, Span(0, width)) if axis == rows else Tile(Span(0, height), lines)
        few = all_gather_lines(b, node, a["self"], wanted)
        b.add_local_op(node.name, "aten.slice.Tensor", few, axis, 0, None, step, like=node.spec)
        return
    window = b.read_window(a["self"], out_px, move if axis == rows else stay, move if axis == cols else stay)
    apply_locally(b, node, b.get_value(a["self"]).axes, self=b.pad_window(window), start=0, end=None)


@register_rule("getitem")
def pick(b: Builder, node: Node) -> None:
    """Pick one of several outputs, tiled as they are."""
    several = node.arguments["0"]
    b.read_window(several, b.get_value(several).size_px, Shift(0), Shift(0))  # no exchange: the rank owns these pixels
    b.hold_like(apply_locally(b, node, b.get_value(several).axes, **{"0": several}), several)


@register_rule("aten.permute.default")
def permute(b: Builder, node: Node) -> None:
    """Permute axes; the spatial axes move with the others."""
    rows, cols, count = get_spatial_axes(b, node.arguments["self"])
    order = [dim % count for dim in node.arguments["dims"]]
    apply_locally(b, node, (order.index(rows) - count, order.index(cols) - count))
