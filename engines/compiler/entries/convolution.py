"""Convolutions and pools: each output reads a window. And operators that read or write pixels at any position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.reduction import all_gather_partials, reduce_mean
from mpi4dl_nb.engines.compiler.local_rules import (
    apply_locally,
    get_spec,
    make_gather_error,
    split_arguments,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.geometry.windows import SlidingWindow, TableWindow, TransposedWindow, Window, compute_window
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.kernels import get_operator, get_sum_type, register_kernel

Pair = tuple[int, int]
Cells = tuple[Pair, ...]


def to_axes(value: Any, count: int) -> tuple[int, ...]:
    """Return a setting for each of `count` axes: of two, `(3,)` and `3` mean `(3, 3)`."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values if len(values) == count else values * count


def fold_padding(
    b: Builder, window: Window, rules: Sequence[SlidingWindow], out_px: tuple[int, ...]
) -> tuple[Ref, tuple[int, ...]]:
    """Return the kernel's input and padding: the kernel pads by itself if that yields exactly the tile's outputs.

    A kernel pads both sides alike, so its padding can replace a fill before the tile only if the number of outputs is
    still right; otherwise the fill is written into the tensor.
    """
    padding, out = tuple(before for before, _ in window.margins), b.get_output_tiles(out_px)[b.rank].shape
    for size_px, pad_px, rule, wanted in zip(window.held.shape, padding, rules, out, strict=True):
        outputs = (size_px + 2 * pad_px - rule.dilation * (rule.kernel - 1) - 1) // rule.stride + 1
        # Pools refuse a padding of more than half the kernel.
        if not 0 <= pad_px <= rule.kernel // 2 * rule.dilation or outputs != wanted:
            return b.pad_window(window), (0,) * len(padding)
    return Ref(window.name), padding


@register_rule("aten.conv2d.default", "aten.conv2d.padding", images=("input",))
def conv2d(b: Builder, node: Node) -> None:
    """Convolve with any kernel, stride, dilation and groups; `same` pads the odd pixel below and right."""
    a = node.arguments
    kernel = get_spec(b, a["weight"].name).shape[2:]
    stride, dilation = (to_axes(a[name], len(kernel)) for name in ("stride", "dilation"))
    if a["padding"] == "same":
        padding = tuple(step * (taps - 1) // 2 for step, taps in zip(dilation, kernel, strict=True))
    else:
        padding = to_axes(0 if a["padding"] == "valid" else a["padding"], len(kernel))
    rules = [SlidingWindow(*axis) for axis in zip(kernel, stride, padding, dilation, strict=True)]
    out_px = b.get_image_px(node.result)
    window = b.read_window(a["input"], out_px, *rules)
    x, native = fold_padding(b, window, rules, out_px)
    settings = a["weight"], a["bias"], stride, native, dilation, a["groups"]
    b.add_local_op(node.name, "aten.conv2d.default", x, *settings, like=node.result, axes=b.image_axes)


@register_rule("aten.conv_transpose2d.input", images=("input",))
def conv_transpose2d(b: Builder, node: Node) -> None:
    """Convolve transposed: each output tile reads the inputs that write to it, and the surplus outputs are cropped."""
    a = node.arguments
    kernel = get_spec(b, a["weight"].name).shape[2:]
    stride, padding, dilation = (to_axes(a[name], len(kernel)) for name in ("stride", "padding", "dilation"))
    axes, out_px = list(zip(kernel, stride, padding, dilation, strict=True)), b.get_image_px(node.result)
    window = b.read_window(a["input"], out_px, *(TransposedWindow(*axis) for axis in axes))
    # The inputs write those outputs that they would read in a convolution. The difference from the tile's outputs is
    # cropped on each side (negative) or, where no input writes, padded (positive).
    written = compute_window(window.held, [SlidingWindow(*axis) for axis in axes])
    margins = Window(window.name, written, b.get_output_tiles(out_px)[b.rank], 0.0).margins
    settings = a["weight"], a["bias"], stride, dilation, a["groups"], margins
    b.add_local_op(node.name, "tile.conv_transpose", Ref(window.name), *settings, like=node.result, axes=b.image_axes)


def to_whole_index(index: Tensor, width: int, corner: Pair, width_px: int) -> Tensor:
    """Convert row-major pixel numbers within a part of that width at `corner` to numbers in the whole image."""
    return (index // width + corner[0]) * width_px + index % width + corner[1]


def _make_pool_windows(node: Node, count: int) -> list[SlidingWindow]:
    """Return the windows of a max pool along each of `count` axes."""
    a = node.arguments
    settings = a["kernel_size"], a["stride"] or a["kernel_size"], a["padding"], a["dilation"]
    return [SlidingWindow(*axis) for axis in zip(*(to_axes(setting, count) for setting in settings), strict=True)]


def _read_pool_window(b: Builder, node: Node, rules: Sequence[SlidingWindow], out_px: tuple[int, ...]) -> Window:
    """Read the windows of a max pool. Outside the image is the least number of the type, so that it never wins."""
    source = node.arguments["self"]
    spec = b.get_value(source).spec
    fill = -torch.inf if spec.is_floating else torch.iinfo(getattr(torch, spec.dtype)).min
    return b.read_window(source, out_px, *rules, fill=fill)


@register_rule("aten.max_pool2d.default", images=("self",))
def max_pool2d(b: Builder, node: Node) -> None:
    """Pool by maximum."""
    rules = _make_pool_windows(node, len(b.image_axes))
    window = _read_pool_window(b, node, rules, b.get_image_px(node.result))
    x, padding = fold_padding(b, window, rules, b.get_image_px(node.result))
    apply_locally(b, node, b.image_axes, self=x, padding=padding, ceil_mode=False)


@register_rule("aten.max_pool2d_with_indices.default", images=("self",))
def max_pool2d_with_indices(b: Builder, node: Node) -> None:
    """Pool by maximum; the indices number the pixels of the whole image in row-major order."""
    source, rules = node.arguments["self"], _make_pool_windows(node, len(b.image_axes))
    value = b.get_value(source)
    # The node has two outputs and therefore no spec: ATen itself tells the shape.
    image = torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype), device="meta")
    positional, keywords = split_arguments(node, {"self": image})
    like = TensorSpec(tuple(get_operator(node.operator)(*positional, **keywords)[0].shape), value.spec.dtype)
    out_px = b.get_image_px(like)
    window = _read_pool_window(b, node, rules, out_px)
    x, padding = fold_padding(b, window, rules, out_px)
    # The kernel numbers the pixels of what it is given: with its fill, or, if it pads by itself, without.
    seen = window.wanted if padding == (0, 0) else window.held
    windows = (tuple(getattr(rule, name) for rule in rules) for name in ("kernel", "stride", "dilation"))
    settings = padding, (seen.rows.start, seen.cols.start), value.size_px[1]
    b.add_local_op(node.name, "tile.max_pool_with_places", x, *windows, *settings, like=like, axes=b.image_axes)


@register_kernel("tile.max_pool_with_places")
def pool_tile(
    x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, padding: Pair, corner: Pair, width_px: int
) -> tuple[Tensor, Tensor]:
    """Pool a tile by maximum; `corner` is the first pixel of `x` in the whole image."""
    values, index = functional.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
    return values, to_whole_index(index, x.shape[-1], corner, width_px)


@register_rule("aten.avg_pool2d.default", images=("self",))
def avg_pool2d(b: Builder, node: Node) -> None:
    """Divide the sum over each window by the pixels that count: those of the image, or of the padded image."""
    a = node.arguments
    value, count = b.get_value(a["self"]), len(b.image_axes)
    kernel = to_axes(a["kernel_size"], count)
    stride, padding = to_axes(a["stride"] or kernel, count), to_axes(a["padding"], count)
    rules = [SlidingWindow(*axis) for axis in zip(kernel, stride, padding, strict=True)]
    border = padding if a["count_include_pad"] else (0,) * count
    out_px = b.get_image_px(node.result)
    if not b.can_tile(out_px):
        reads = [[rule(Span(i, i + 1)) for i in range(count)] for rule, count in zip(rules, out_px, strict=True)]
        _average_few(b, node, reads, border)
        return
    window = b.read_window(a["self"], out_px, *rules)
    x, native = fold_padding(b, window, rules, out_px)
    out = b.get_output_tiles(out_px)[b.rank]
    rows, cols = (  # how many of the pixels that each output reads are in the image with its border
        tuple(len(rule(Span(i, i + 1)) & Span(-edge, image_px + edge)) for i in range(span.start, span.stop))
        for rule, span, image_px, edge in zip(rules, out, value.size_px, border, strict=True)
    )
    # The plain kernel divides by one number, whatever lies outside the image.
    if a["divisor_override"] or (set(rows), set(cols)) == ({kernel[0]}, {kernel[1]}):
        apply_locally(b, node, b.image_axes, self=x, padding=native, ceil_mode=False)
        return
    part, wide = replace(node, name=f"{node.name}.sums", spec=node.result.sums), value.spec.sums
    if wide != value.spec:  # half precision is rounded once, after the division
        cast = f"{node.name}.wide", "aten.to.dtype", x, getattr(torch, wide.dtype)
        x = b.add_local_op(*cast, like=wide, axes=b.image_axes)
    sums = apply_locally(b, part, b.image_axes, self=x, padding=native, ceil_mode=False, divisor_override=1)
    divisors = rows, cols, None, getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.averages", sums, *divisors, like=node.result, axes=b.image_axes)


def _average_few(b: Builder, node: Node, reads: Sequence[Sequence[Span]], border_px: Sequence[int] = (0, 0)) -> None:
    """Average to fewer rows or columns than tiles: every rank sums its own part of each, and holds the whole result.

    `reads` are the pixels of each row and each column of outputs; those in the image with its border count.
    """
    source = node.arguments["self"]
    size_px, tile = b.get_value(source).size_px, b.get_tiles(b.get_value(source).size_px)[b.rank]
    cells = []
    for axis, span in zip(reads, tile, strict=True):  # the part of each in this tile, may be empty
        parts = [read & span for read in axis]
        cells.append(tuple((part.start - span.start, part.stop - span.start) if part else (0, 0) for part in parts))
    sums = b.add_local_op(f"{node.name}.sums", "tile.cell_sums", b.crop_to_own(source), *cells, like=node.result.sums)
    counts = [
        tuple(len(read & Span(-border, px + border)) for read in axis)
        for axis, px, border in zip(reads, size_px, border_px, strict=True)
    ]
    divisor, dtype = node.arguments.get("divisor_override"), getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.averages", b.all_reduce(sums), *counts, divisor, dtype, like=node.result)


@register_kernel("tile.cell_sums")
def sum_cells(x: Tensor, rows: Cells, cols: Cells) -> Tensor:
    """Return the sum of each cell: (start, stop) of its rows and of its columns, which may be empty."""
    x = x.to(get_sum_type(x))
    lines = torch.cat([x[..., start:stop, :].sum(-2, keepdim=True) for start, stop in rows], -2)
    return torch.cat([lines[..., start:stop].sum(-1, keepdim=True) for start, stop in cols], -1)


@register_kernel("tile.averages")
def divide_sums(
    sums: Tensor, rows: Sequence[int], cols: Sequence[int], divisor: int | None, dtype: torch.dtype
) -> Tensor:
    """Divide sums by the number of pixels that count there, rows[i] * cols[j], or by a given number."""
    return (sums / (divisor or sums.new_tensor(rows)[:, None] * sums.new_tensor(cols))).to(dtype)


@register_rule("aten.adaptive_avg_pool2d.default", images=("self",))
def adaptive_avg_pool2d(b: Builder, node: Node) -> None:
    """Average each cell: output i reads pixels i*n//k to -(-(i+1)*n//k). A single cell is a mean over space."""
    if b.get_image_px(node.result) == (1, 1):
        reduce_mean(b, node, node.arguments["self"], [-2, -1], keepdim=True)
        return
    if not b.can_tile(b.get_image_px(node.result)):
        sizes = zip(b.get_value(node.arguments["self"]).size_px, b.get_image_px(node.result), strict=True)
        _average_few(b, node, [[Span(*cell) for cell in _split_cells(size, count)] for size, count in sizes])
        return
    x, _, rows, cols = fetch_cells(b, node.arguments["self"], b.get_image_px(node.result))
    b.add_local_op(node.name, "tile.adaptive_average", x, rows, cols, like=node.result, axes=b.image_axes)


def fetch_cells(b: Builder, ref: Ref, out_px: tuple[int, ...]) -> tuple[Ref, Tile, Cells, Cells]:
    """Return the window that this tile's cells read, its tile, and (start, stop) of each cell in it."""
    # 7 pixels in 3 cells: 0 to 3, 2 to 5, 4 to 7. Neighbours overlap, so that a tile may read its neighbour's pixels.
    cells = [_split_cells(size, count) for size, count in zip(b.get_value(ref).size_px, out_px, strict=True)]
    rules = [TableWindow(tuple((start, stop - 1) for start, stop in axis)) for axis in cells]
    window = b.read_window(ref, out_px, *rules)
    x, out, wanted = b.pad_window(window), b.get_output_tiles(out_px)[b.rank], window.wanted
    rows, cols = (
        tuple((start - first.start, stop - first.start) for start, stop in axis[span.start : span.stop])
        for axis, span, first in zip(cells, out, wanted, strict=True)
    )
    return x, wanted, rows, cols


def _split_cells(size_px: int, count: int) -> list[Pair]:
    return [(index * size_px // count, -(-(index + 1) * size_px // count)) for index in range(count)]


# Maxima of cells, and operators that read or write pixels at data-dependent positions.


@register_kernel("tile.first_maximum")
def find_first_maximum(x: Tensor, dims: list[int], corner: tuple[int, int], width_px: int) -> Tensor:
    """Return (2, ..., 1, 1) in float64: the tile's largest value, and the whole-image index of its first one."""
    value, index = functional.adaptive_max_pool2d(x, 1, return_indices=True)
    return torch.stack([value.double(), to_whole_index(index, x.shape[-1], corner, width_px).double()])


@register_kernel("tile.first_of_all")
def merge_first_maxima(found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest value and its index; of several, the first in row-major order or the last NaN, as in ATen."""
    values, places = found.flatten(-2)
    # Float64 holds whole numbers up to 2 ** 53 exactly, so that indices may travel in one tensor with the values.
    top, unknown = values.amax(-1, keepdim=True), values.isnan()
    order = torch.where(unknown, -places, places).detach().masked_fill((values != top) & ~unknown, math.inf)
    first = order.argmin(-1, keepdim=True)
    return values.gather(-1, first)[..., None].to(dtype), places.gather(-1, first)[..., None].long()


@register_kernel("tile.adaptive_maximum")
def pool_adaptive_maximum(
    x: Tensor, rows: Cells, cols: Cells, corner: tuple[int, int], width_px: int
) -> tuple[Tensor, Tensor]:
    """Return the largest value of each cell and its index; cells are (start, stop) ranges of the window at `corner`."""
    lines = []
    for top, bottom in rows:
        values, places = [], []
        for left, right in cols:
            cell = x[..., top:bottom, left:right]
            value, index = functional.adaptive_max_pool2d(cell, 1, return_indices=True)
            values.append(value)
            places.append(to_whole_index(index, right - left, (corner[0] + top, corner[1] + left), width_px))
        lines.append((torch.cat(values, -1), torch.cat(places, -1)))
    return torch.cat([line for line, _ in lines], -2), torch.cat([index for _, index in lines], -2)


@register_rule("aten.adaptive_max_pool2d.default", images=("self",))
def adaptive_max_pool2d(b: Builder, node: Node) -> None:
    """Reduce each cell to its largest value and the index of that, with the cells of the adaptive average."""
    source = node.arguments["self"]
    value, out_px = b.get_value(source), tuple(node.arguments["output_size"])
    like, width_px = TensorSpec((*value.spec.shape[:-2], *out_px), value.spec.dtype), value.size_px[1]
    if out_px == (1, 1):
        tile = b.get_tiles(value.size_px)[b.rank]
        settings = (tile.rows.start, tile.cols.start), width_px
        dims = [len(like.shape) - 2, len(like.shape) - 1]
        how = "tile.first_maximum", dims, *settings
        partials = all_gather_partials(b, node, source, *how, dtype="float64", lead=(2,))
        b.add_local_op(node.name, "tile.first_of_all", partials, getattr(torch, value.spec.dtype), like=like)
        return
    x, wanted, rows, cols = fetch_cells(b, source, out_px)
    corner = (wanted.rows.start, wanted.cols.start)
    b.add_local_op(node.name, "tile.adaptive_maximum", x, rows, cols, corner, width_px, like=like, axes=b.image_axes)


_ANYWHERE = (
    *("rot90", "median", "prod", "argsort", "kthvalue", "msort", "im2col", "unfold", "tril", "triu"),
    *("any", "all", "count_nonzero", "cummax", "cummin"),
)


@register_rule(*(f"aten.{name}.default" for name in _ANYWHERE), "aten.argsort.stable", "aten.sort.stable")
def require_gather(b: Builder, node: Node) -> None:
    """Refuse tiles: any output may read any pixel."""
    raise make_gather_error(node, "reads pixels that lie anywhere")


@register_kernel("tile.unpool")
def unpool_tile(x: Tensor, places: Tensor, tile: tuple[int, int, int, int], width_px: int) -> Tensor:
    """Write each value to its place in the whole image, if inside the tile (start, stop of rows, then columns)."""
    top, bottom, left, right = tile
    height, width = bottom - top, right - left
    row, col = places // width_px - top, places % width_px - left
    inside = (places >= 0) & (row >= 0) & (row < height) & (col >= 0) & (col < width)
    nowhere = height * width
    # Values of other tiles go to one extra element, which is cropped: the scatter needs no dynamic shape.
    flat = torch.where(inside, row * width + col, nowhere).flatten(-2)
    pixels = x.new_zeros((*x.shape[:-2], nowhere + 1)).scatter(-1, flat, x.flatten(-2))
    return pixels[..., :nowhere].unflatten(-1, (height, width))


@register_rule("aten.max_unpool2d.default", images=("self", "indices"))
def max_unpool2d(b: Builder, node: Node) -> None:
    """Unpool: the output that read a pixel writes it, if the places are those of a pool with disjoint windows."""
    a, out_px = node.arguments, b.get_image_px(node.result)
    pool = _find_pool(b, a["indices"])
    rules = _make_pool_windows(pool, len(b.image_axes)) if pool else ()
    overlap = any(rule.stride < rule.dilation * (rule.kernel - 1) + 1 for rule in rules)
    if pool is None or overlap or b.get_value(pool.arguments["self"]).size_px != out_px:
        raise make_gather_error(node, "writes to places that are not known before", b.image_axes)
    # A pooled pixel is written back into the window that it was pooled from. A tile is written by the pooled pixels
    # whose windows meet it: those that a transposed convolution would read.
    back = [TransposedWindow(rule.kernel, rule.stride, rule.padding, rule.dilation) for rule in rules]
    values = b.pad_window(b.read_window(a["self"], out_px, *back))
    places = b.pad_window(b.read_window(a["indices"], out_px, *back, fill=-1))
    out = b.get_output_tiles(out_px)[b.rank]
    tile = (out.rows.start, out.rows.stop, out.cols.start, out.cols.stop)
    b.add_local_op(node.name, "tile.unpool", values, places, tile, out_px[1], like=node.result, axes=b.image_axes)


def _find_pool(b: Builder, places: Ref) -> Node | None:
    """Return the tiled pool of which `places` are the second output; None if there is none."""
    nodes = {node.name: node for node in b.graph.nodes}
    pick = nodes.get(places.name)
    if pick is None or pick.operator != "getitem" or pick.arguments["1"] != 1:
        return None
    pool = nodes.get(pick.arguments["0"].name)
    if pool is None or pool.operator != "aten.max_pool2d_with_indices.default":
        return None
    return pool if b.is_tiled(pool.arguments["self"]) else None
