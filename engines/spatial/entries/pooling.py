"""Pools and nearest-neighbour upsampling: windows without weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.convolution import folded, pair
from engines.spatial.entries.reduction import mean_over_space
from engines.spatial.ops import as_it_is, entry
from engines.spatial.tiles import Span
from engines.spatial.windows import Reach, SlidingWindow


def _out_px(node: Node) -> tuple[int, int]:
    return node.spec.shape[-2], node.spec.shape[-1]


@entry("aten.max_pool2d.default", images=("self",))
def max_pool(b: Builder, node: Node) -> None:
    """Outside the image lies minus infinity, so that padding never wins."""
    a = node.arguments
    kernel = pair(a["kernel_size"])
    settings = kernel, pair(a["stride"] or kernel), pair(a["padding"]), pair(a["dilation"])
    rules = [SlidingWindow(*axis) for axis in zip(*settings, strict=True)]
    window = b.window(a["self"], _out_px(node), rules[0], rules[1], fill=-torch.inf)
    x, padding = folded(b, window, rules, _out_px(node))
    as_it_is(b, node, (-2, -1), self=x, padding=padding, ceil_mode=False)


@entry("aten.avg_pool2d.default", images=("self",))
def average_pool(b: Builder, node: Node) -> None:
    """Sums over the window, divided by the pixels that count: those inside, or those of the padded image."""
    a = node.arguments
    value, kernel = b.value(a["self"]), pair(a["kernel_size"])
    stride, padding = pair(a["stride"] or kernel), pair(a["padding"])
    rules = [SlidingWindow(*axis) for axis in zip(kernel, stride, padding, strict=True)]
    window = b.window(a["self"], _out_px(node), rules[0], rules[1])
    x, native = folded(b, window, rules, _out_px(node))
    out = b.outputs(_out_px(node))[b.rank]
    border = padding if a["count_include_pad"] else (0, 0)
    spans = zip((out.rows, out.cols), rules, value.size_px, border, strict=True)
    rows, cols = (tuple(_counted(*what)) for what in spans)
    if a["divisor_override"] or (set(rows), set(cols)) == ({kernel[0]}, {kernel[1]}):
        as_it_is(b, node, (-2, -1), self=x, padding=native, ceil_mode=False)
        return
    b.local(
        node.name, "tile.average_pool", x, kernel, stride, native, rows, cols, like=node.spec, axes=(-2, -1)
    )  # fmt: skip


def _counted(out: Span, rule: SlidingWindow, image_px: int, border_px: int) -> list[int]:
    """How many of the pixels that each output reads lie in the image with its border."""
    counted = Span(-border_px, image_px + border_px)
    return [len(rule(Span(index, index + 1)) & counted) for index in range(out.start, out.stop)]


@entry("aten.adaptive_avg_pool2d.default", images=("self",))
def adaptive_average_pool(b: Builder, node: Node) -> None:
    """One cell for the whole image is a mean over space; else output i reads pixels i*n//k to -(-(i+1)*n//k)."""
    if _out_px(node) == (1, 1):
        mean_over_space(b, node, node.arguments["self"], [-2, -1], keepdim=True)
        return
    value = b.value(node.arguments["self"])
    cells = [_cells(size, count) for size, count in zip(value.size_px, _out_px(node), strict=True)]
    rules = [Reach(lambda i, c=c: c[i][0], lambda i, c=c: c[i][1] - 1) for c in cells]
    window = b.window(node.arguments["self"], _out_px(node), rules[0], rules[1])
    x, out = b.padded(window), b.outputs(_out_px(node))[b.rank]
    rows, cols = (
        tuple((start - wanted.start, stop - wanted.start) for start, stop in axis[span.start : span.stop])
        for axis, span, wanted in zip(
            cells, (out.rows, out.cols), (window.wanted.rows, window.wanted.cols), strict=True
        )
    )
    b.local(node.name, "tile.adaptive_average", x, rows, cols, like=node.spec, axes=(-2, -1))


def _cells(size_px: int, count: int) -> list[tuple[int, int]]:
    return [(index * size_px // count, -(-(index + 1) * size_px // count)) for index in range(count)]


@entry("aten.upsample_nearest2d.vec", images=("input",))
def upsample_nearest(b: Builder, node: Node) -> None:
    """Output i copies one input pixel; which one, ATen itself is asked."""
    a = node.arguments
    value = b.value(a["input"])
    picks = _picks(value.size_px, _out_px(node), a["scale_factors"])
    rules = [Reach(lambda i, p=p: p[i], lambda i, p=p: p[i]) for p in picks]
    window = b.window(a["input"], _out_px(node), rules[0], rules[1])
    out = b.outputs(_out_px(node))[b.rank]
    rows, cols = (
        tuple(pick - held.start for pick in axis[span.start : span.stop])
        for axis, span, held in zip(picks, (out.rows, out.cols), (window.held.rows, window.held.cols), strict=True)
    )
    b.local(node.name, "tile.gather", Ref(window.name), rows, cols, like=node.spec, axes=(-2, -1))


def _picks(size_px: tuple[int, int], out_px: tuple[int, int], scales: Sequence[float] | None) -> list[list[int]]:
    """The input row of each output row and the input column of each output column."""
    height, width = (_picked(size_px, out_px, scales, axis) for axis in (0, 1))
    return [height, width]


def _picked(size_px: Sequence[int], out_px: Sequence[int], scales: Sequence[float] | None, axis: int) -> list[int]:
    """One axis, the other as short as can be: ATen only copies where neither changes its size."""
    other = 1 if size_px[1 - axis] == out_px[1 - axis] else 2
    ramp = torch.arange(size_px[axis], dtype=torch.float64)[None, None, :, None]
    scale = scales[axis] if scales else None
    picked = torch.ops.aten.upsample_nearest2d.default(ramp, [out_px[axis], other], scale, None)
    return picked[0, 0, :, 0].int().tolist()  # type: ignore[no-any-return]
