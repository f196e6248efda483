"""Pools: windows without weights."""

from __future__ import annotations

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.convolution import folded, pair
from engines.spatial.entries.reduction import mean_over_space
from engines.spatial.ops import entry
from engines.spatial.plain import as_it_is
from engines.spatial.tiles import Span
from engines.spatial.windows import Reach, SlidingWindow

__all__ = ["Cells", "cells_of"]


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
    x, rows, cols = cells_of(b, node.arguments["self"], _out_px(node))
    b.local(node.name, "tile.adaptive_average", x, rows, cols, like=node.spec, axes=(-2, -1))


Cells = tuple[tuple[int, int], ...]


def cells_of(b: Builder, ref: Ref, out_px: tuple[int, int]) -> tuple[Ref, Cells, Cells]:
    """The window that this tile's cells of an adaptive pool read, and (start, stop) of each cell in it."""
    cells = [_cells(size, count) for size, count in zip(b.value(ref).size_px, out_px, strict=True)]
    rules = [Reach(lambda i, c=c: c[i][0], lambda i, c=c: c[i][1] - 1) for c in cells]
    window = b.window(ref, out_px, rules[0], rules[1])
    x, out = b.padded(window), b.outputs(out_px)[b.rank]
    rows, cols = (
        tuple((start - wanted.start, stop - wanted.start) for start, stop in axis[span.start : span.stop])
        for axis, span, wanted in zip(
            cells, (out.rows, out.cols), (window.wanted.rows, window.wanted.cols), strict=True
        )
    )
    return x, rows, cols


def _cells(size_px: int, count: int) -> list[tuple[int, int]]:
    return [(index * size_px // count, -(-(index + 1) * size_px // count)) for index in range(count)]
