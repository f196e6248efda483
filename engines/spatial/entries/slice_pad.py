"""Slicing, padding, picking and permuting: operators that move pixels or leave them in place."""

from __future__ import annotations

from engines.layer.graph import Node
from engines.program.builder import Builder
from engines.spatial.align import get_spatial_axes
from engines.spatial.entries.sampling import pad_with_copies
from engines.spatial.gather_fallback import all_gather_lines
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.tiles import Span, Tile
from engines.spatial.windows import Shift, SlidingWindow

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
