"""Slicing, padding, joining and reordering: what moves pixels or leaves them where they are."""

from __future__ import annotations

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.sampling import mirrored_pad
from engines.spatial.ops import entry
from engines.spatial.places import axes_without, spec_of, whole_axes
from engines.spatial.plain import as_it_is, pointwise
from engines.spatial.refusals import apart
from engines.spatial.tiles import Span, Tile
from engines.spatial.whole import lines_of_all
from engines.spatial.windows import Shift, SlidingWindow

__all__: list[str] = []


@entry("aten.constant_pad_nd.default", "aten.pad.default", images=("self",))
def pad(b: Builder, node: Node) -> None:
    """Padding by a constant: output i reads input i - (pixels before it), and the fill outside the image."""
    a = node.arguments
    before = list(a["pad"]) + [0] * (4 - len(a["pad"]))
    if a.get("mode", "constant") != "constant":
        mirrored_pad(b, node)
        return
    out_px = (node.spec.shape[-2], node.spec.shape[-1])
    fill = float(a.get("value") or 0.0)
    x = b.padded(b.window(a["self"], out_px, Shift(-before[2]), Shift(-before[0]), fill))
    channels = [0, 0, 0, 0, *before[4:]]
    b.local(node.name, "aten.constant_pad_nd.default", x, channels, fill, like=node.spec, axes=(-2, -1))


@entry("aten.slice.Tensor")
def crop(b: Builder, node: Node) -> None:
    """Along a spatial axis output i reads input start + i * step; along others each pixel stays."""
    a = node.arguments
    rows, cols, count = whole_axes(b, a["self"])
    axis = a["dim"] % count
    if axis not in (rows, cols):
        as_it_is(b, node, b.value(a["self"]).axes)
        return
    start, stop, step = slice(a["start"], a["end"], a["step"]).indices(b.value(a["self"]).spec.shape[axis])
    stay, move = Shift(0), SlidingWindow(kernel=1, stride=step, padding=-start)
    out_px = (node.spec.shape[rows], node.spec.shape[cols])
    if not b.fits(out_px) and start < stop:
        height, width = b.value(a["self"]).size_px
        lines = Span(start, stop)
        wanted = Tile(lines, Span(0, width)) if axis == rows else Tile(Span(0, height), lines)
        few = lines_of_all(b, node, a["self"], wanted)
        b.local(node.name, "aten.slice.Tensor", few, axis, 0, None, step, like=node.spec)
        return
    window = b.window(a["self"], out_px, move if axis == rows else stay, move if axis == cols else stay)
    as_it_is(b, node, b.value(a["self"]).axes, self=b.padded(window), start=0, end=None)


@entry("aten.cat.default")
def join(b: Builder, node: Node) -> None:
    """Joining channels leaves pixels where they are."""
    first = next(ref for ref in node.arguments["tensors"] if b.is_tiled(ref))
    _check_not_spatial(b, node, first, node.arguments["dim"])
    pointwise(b, node)


@entry("aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default")
def part(b: Builder, node: Node) -> None:
    """Parting channels leaves pixels where they are. (The parts are picked by `getitem`.)"""
    source = node.arguments["self"]
    _check_not_spatial(b, node, source, node.arguments["dim"])
    as_it_is(b, node, b.value(source).axes)


@entry("aten.unbind.int")
def unstack(b: Builder, node: Node) -> None:
    """As above, and the axis is gone."""
    source, dim = node.arguments["self"], node.arguments["dim"]
    _check_not_spatial(b, node, source, dim)
    as_it_is(b, node, axes_without(b, source, [dim % whole_axes(b, source)[2]]))


@entry("getitem")
def pick(b: Builder, node: Node) -> None:
    """One of several outputs, tiled as they are."""
    several = node.arguments["0"]
    b.window(several, b.value(several).size_px, Shift(0), Shift(0))  # nothing is borrowed: they are one's own
    b.hold_like(as_it_is(b, node, b.value(several).axes, **{"0": several}), several)


@entry("aten.softmax.int", "aten.log_softmax.int")
def over_channels(b: Builder, node: Node) -> None:
    """Softmax of each pixel over its channels."""
    source = node.arguments["self"]
    _check_not_spatial(b, node, source, node.arguments["dim"])
    as_it_is(b, node, b.value(source).axes)


@entry("aten.prelu.default")
def leaky_by_channel(b: Builder, node: Node) -> None:
    """One slope for each channel, which lie along axis 1, or one for all."""
    source = node.arguments["self"]
    if spec_of(b, node.arguments["weight"].name).numel > 1:
        _check_not_spatial(b, node, source, 1)
    as_it_is(b, node, b.value(source).axes)


@entry("aten.permute.default")
def reorder(b: Builder, node: Node) -> None:
    """The spatial axes move with the others."""
    rows, cols, count = whole_axes(b, node.arguments["self"])
    order = [dim % count for dim in node.arguments["dims"]]
    as_it_is(b, node, (order.index(rows) - count, order.index(cols) - count))


def _check_not_spatial(b: Builder, node: Node, ref: Ref, dim: int) -> None:
    rows, cols, count = whole_axes(b, ref)
    if dim % count in (rows, cols):
        raise apart(node, f"works along a spatial axis (dim={dim})")
