"""Pools along one to three axes: by maximum, by average, and of cells of any size."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.convolution import count_whole_axes, fold_padding, list_for_axes, to_axes
from mpi4dl_nb.engines.compiler.entries.reduction import reduce_mean, reduce_sum
from mpi4dl_nb.engines.compiler.entries.sampling import reshape
from mpi4dl_nb.engines.compiler.local_rules import apply_locally, make_gather_error
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.geometry.windows import SlidingWindow, TableWindow, Window
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.kernels import cut_spans, get_sum_type, register_kernel

Cells = tuple[tuple[int, int], ...]
"""The (start, stop) of each cell along one axis."""
Settings = tuple[int, ...]
"""A setting of a kernel for each of its axes."""


def count_kernel_axes(node: Node) -> int:
    """Return along how many axes an operator pools: `aten.max_pool2d.default` along two."""
    return int(re.findall(r"\dd", node.short_operator)[0][0])


def make_pool_windows(node: Node) -> list[SlidingWindow]:
    """Return the windows of a max pool along each of its axes."""
    a, count = node.arguments, count_kernel_axes(node)
    settings = a["kernel_size"], a["stride"] or a["kernel_size"], a["padding"], a["dilation"]
    return [SlidingWindow(*axis) for axis in zip(*(to_axes(setting, count) for setting in settings), strict=True)]


def read_pool_window(b: Builder, node: Node, rules: Sequence[SlidingWindow], out_px: tuple[int, ...]) -> Window:
    """Read the windows of a max pool. Outside the image is the least number of the type, so that it never wins."""
    source = node.arguments["self"]
    spec = b.get_value(source).spec
    fill = -torch.inf if spec.is_floating else torch.iinfo(getattr(torch, spec.dtype)).min
    return b.read_window(source, out_px, *rules, fill=fill)


@register_rule(*list_for_axes("max_pool{}d.default"), images=("self",))
def pool_maximum(b: Builder, node: Node) -> None:
    """Pool by maximum."""
    rules, out_px = make_pool_windows(node), b.get_image_px(node.result)
    whole = count_whole_axes(b, node, rules)
    if whole and node.arguments["ceil_mode"]:
        raise make_gather_error(node, "rounds up the size of an axis that is not cut")
    window = read_pool_window(b, node, rules[whole:], out_px)
    x, native = fold_padding(b, window, rules[whole:], out_px)
    padding = (*(rule.padding for rule in rules[:whole]), *native)
    apply_locally(b, node, b.image_axes, self=x, padding=padding, ceil_mode=False)


@register_rule("aten.avg_pool1d.default", "aten.adaptive_avg_pool1d.default", tiled=("self",))
def pool_average_of_lines(b: Builder, node: Node) -> None:
    """Average windows of a signal; or of tokens, runs of so many: a view, and a mean over its last axis."""
    a, value, is_adaptive = node.arguments, b.get_value(node.arguments["self"]), "adaptive" in node.operator
    if value.is_split and value.axes == b.image_axes:
        (pool_adaptive_average if is_adaptive else pool_average)(b, node)
        return
    *others, count = value.spec.shape
    if is_adaptive:
        length, padding = count // node.result.shape[-1], 0
        are_runs = count % node.result.shape[-1] == 0
    else:
        (length,), (padding,) = to_axes(a["kernel_size"], 1), to_axes(a["padding"], 1)
        are_runs = count % length == 0 and to_axes(a["stride"] or length, 1) == (length,)
    if padding or not are_runs:
        raise make_gather_error(node, f"averages windows of {count} tokens that are not one behind another")
    runs = replace(node.result, shape=(*others, count // length, length))
    view = replace(node, operator="aten.view.default", name=f"{node.name}.runs", spec=runs)
    reshape(b, replace(view, arguments={"self": a["self"], "size": runs.shape}))
    mean = {"self": Ref(view.name), "dim": [-1], "keepdim": False, "dtype": None}
    reduce_sum(b, replace(node, operator="aten.mean.dim", arguments=mean))


@register_rule("aten.avg_pool2d.default", "aten.avg_pool3d.default", images=("self",))
def pool_average(b: Builder, node: Node) -> None:
    """Divide the sum over each window by the pixels that count: those of the image, or of the padded image."""
    a, count = node.arguments, count_kernel_axes(node)
    value, kernel = b.get_value(a["self"]), to_axes(a["kernel_size"], count)
    stride, padding = to_axes(a["stride"] or kernel, count), to_axes(a["padding"], count)
    if whole := count_whole_axes(b, node, kernel):  # along other axes than those of the images, as local response norm
        if {*kernel[whole:], *stride[whole:]} != {1} or any(padding[whole:]):
            raise make_gather_error(node, f"pools {count} axes, of which {count - whole} are cut")
        apply_locally(b, node, b.image_axes)
        return
    rules = [SlidingWindow(*axis) for axis in zip(kernel, stride, padding, strict=True)]
    border = padding if a["count_include_pad"] else (0,) * count
    out_px = b.get_image_px(node.result)
    if not b.can_tile(out_px):
        reads = [[rule(Span(i, i + 1)) for i in range(size_px)] for rule, size_px in zip(rules, out_px, strict=True)]
        _average_few(b, node, reads, border)
        return
    window = b.read_window(a["self"], out_px, *rules)
    x, native = fold_padding(b, window, rules, out_px)
    if any(held_px < taps for held_px, taps in zip(window.held.shape, kernel, strict=True)):
        x, native = b.pad_window(window), (0,) * count  # the pool along three axes refuses an input below its kernel
    out = b.get_output_tiles(out_px)[b.rank]
    counts = [  # how many of the pixels that each output reads are in the image with its border
        tuple(len(rule(Span(i, i + 1)) & Span(-edge, image_px + edge)) for i in range(span.start, span.stop))
        for rule, span, image_px, edge in zip(rules, out, value.size_px, border, strict=True)
    ]
    # The plain kernel divides by one number, whatever lies outside the image.
    if a.get("divisor_override") or [set(axis) for axis in counts] == [{taps} for taps in kernel]:
        apply_locally(b, node, b.image_axes, self=x, padding=native, ceil_mode=False)
        return
    how = "tile.avg_pool_sums", x, kernel, stride, native
    sums = b.add_local_op(f"{node.name}.sums", *how, like=node.result.sums, axes=b.image_axes)
    divisors = counts, None, getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.averages", sums, *divisors, like=node.result, axes=b.image_axes)


@register_kernel("tile.avg_pool_sums")
def sum_windows(x: Tensor, kernel: Settings, stride: Settings, padding: Settings) -> Tensor:
    """Return the sum of each window. Half precision is rounded only once, after the division."""
    x = x.to(get_sum_type(x))
    if len(kernel) == 1:  # the pool along one axis divides in any case
        lines = functional.avg_pool2d(x[..., None, :], (1, *kernel), (1, *stride), (0, *padding), divisor_override=1)
        return lines[..., 0, :]
    pool = functional.avg_pool2d if len(kernel) == 2 else functional.avg_pool3d
    return pool(x, kernel, stride, padding, divisor_override=1)


def _average_few(b: Builder, node: Node, reads: Sequence[Sequence[Span]], border_px: Sequence[int]) -> None:
    """Average to fewer rows or columns than tiles: every rank sums its own part of each, and holds the whole result.

    `reads` are the pixels of each output along each axis; those in the image with its border count.
    """
    source = node.arguments["self"]
    size_px, tile = b.get_value(source).size_px, b.get_tiles(b.get_value(source).size_px)[b.rank]
    cells = []
    for axis, span in zip(reads, tile, strict=True):  # the part of each in this tile, may be empty
        parts = [read & span for read in axis]
        cells.append(tuple((part.start - span.start, part.stop - span.start) if part else (0, 0) for part in parts))
    sums = b.add_local_op(f"{node.name}.sums", "tile.cell_sums", b.crop_to_own(source), cells, like=node.result.sums)
    counts = [
        tuple(len(read & Span(-border, px + border)) for read in axis)
        for axis, px, border in zip(reads, size_px, border_px, strict=True)
    ]
    divisor, dtype = node.arguments.get("divisor_override"), getattr(torch, node.result.dtype)
    b.add_local_op(node.name, "tile.averages", b.all_reduce(sums), counts, divisor, dtype, like=node.result)


@register_kernel("tile.cell_sums")
def sum_cells(x: Tensor, cells: Sequence[Cells]) -> Tensor:
    """Return the sum of each cell: (start, stop) along each of the last axes, which may be empty."""
    x = x.to(get_sum_type(x))
    for axis, spans in enumerate(cells, -len(cells)):
        x = torch.cat([x.narrow(axis, start, stop - start).sum(axis, keepdim=True) for start, stop in spans], axis)
    return x


@register_kernel("tile.averages")
def divide_sums(sums: Tensor, counts: Sequence[Sequence[int]], divisor: int | None, dtype: torch.dtype) -> Tensor:
    """Divide sums by the number of pixels that count there, the product along all axes, or by a given number."""
    if divisor:
        return (sums / divisor).to(dtype)
    along = torch.meshgrid(*map(sums.new_tensor, counts), indexing="ij")
    return (sums / math.prod(along)).to(dtype)


@register_rule("aten.adaptive_avg_pool2d.default", "aten.adaptive_avg_pool3d.default", images=("self",))
def pool_adaptive_average(b: Builder, node: Node) -> None:
    """Average each cell: output i reads pixels i*n//k to -(-(i+1)*n//k). A single cell is a mean over space."""
    out_px, source = b.get_image_px(node.result), node.arguments["self"]
    check_same_axes(b, node)
    if set(out_px) == {1}:
        reduce_mean(b, node, source, b.image_axes, keepdim=True)
        return
    if not b.can_tile(out_px):
        sizes = zip(b.get_value(source).size_px, out_px, strict=True)
        reads = [[Span(*cell) for cell in _split_cells(size, count)] for size, count in sizes]
        _average_few(b, node, reads, (0,) * len(reads))
        return
    x, _, cells = fetch_cells(b, source, out_px)
    b.add_local_op(node.name, "tile.adaptive_average", x, cells, like=node.result, axes=b.image_axes)


def check_same_axes(b: Builder, node: Node) -> None:
    """Raise NeedsGatherError unless a node pools along as many axes as the images are cut."""
    if count_kernel_axes(node) != len(b.image_axes):
        raise make_gather_error(node, f"pools {count_kernel_axes(node)} axes, not the {len(b.image_axes)} that are cut")


@register_kernel("tile.adaptive_average")
def average_cells(x: Tensor, cells: Sequence[Cells]) -> Tensor:
    """Return the mean of each cell; cells are (start, stop) ranges of the window."""
    axes = tuple(range(-len(cells), 0))
    means = [cut_spans(x, axes, cell).mean(axes) for cell in itertools.product(*cells)]
    return torch.stack(means, -1).unflatten(-1, list(map(len, cells)))


def fetch_cells(b: Builder, ref: Ref, out_px: tuple[int, ...]) -> tuple[Ref, Tile, list[Cells]]:
    """Return the window that this tile's cells read, its tile, and (start, stop) of each cell in it, axis by axis."""
    # 7 pixels in 3 cells: 0 to 3, 2 to 5, 4 to 7. Neighbours overlap, so that a tile may read its neighbour's pixels.
    cells = [_split_cells(size, count) for size, count in zip(b.get_value(ref).size_px, out_px, strict=True)]
    rules = [TableWindow(tuple((start, stop - 1) for start, stop in axis)) for axis in cells]
    window = b.read_window(ref, out_px, *rules)
    x, out, wanted = b.pad_window(window), b.get_output_tiles(out_px)[b.rank], window.wanted
    local_cells = [
        tuple((start - first.start, stop - first.start) for start, stop in axis[span.start : span.stop])
        for axis, span, first in zip(cells, out, wanted, strict=True)
    ]
    return x, wanted, local_cells


def _split_cells(size_px: int, count: int) -> list[tuple[int, int]]:
    return [(index * size_px // count, -(-(index + 1) * size_px // count)) for index in range(count)]
