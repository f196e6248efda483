"""Pools that say where their maxima are, and operators that read or write pixels at positions known only then."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.entries.convolution import fold_padding, list_for_axes
from mpi4dl_nb.engines.compiler.entries.pooling import (
    Cells,
    Settings,
    check_same_axes,
    fetch_cells,
    make_pool_windows,
    read_pool_window,
)
from mpi4dl_nb.engines.compiler.entries.reduction import all_gather_partials
from mpi4dl_nb.engines.compiler.local_rules import make_gather_error, split_arguments
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.windows import TransposedWindow
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.kernels import cut_spans, get_operator, register_kernel


def to_whole_index(index: Tensor, size: Sequence[int], corner: Settings, size_px: Sequence[int]) -> Tensor:
    """Convert row-major pixel numbers within a part of that size at `corner` to numbers in the whole image."""
    numbers, step = torch.zeros_like(index), 1
    for local, first, whole in reversed(list(zip(size, corner, size_px, strict=True))):
        numbers += (index % local + first) * step
        index, step = index // local, step * whole
    return numbers


@register_rule(
    *("aten.max_pool1d_with_indices.default", "aten.max_pool2d_with_indices.default"),
    *("aten.max_pool3d_with_indices.default",),
    images=("self",),
)
def pool_maximum_with_indices(b: Builder, node: Node) -> None:
    """Pool by maximum; the indices number the pixels of the whole image in row-major order."""
    check_same_axes(b, node)
    source, rules = node.arguments["self"], make_pool_windows(node)
    value = b.get_value(source)
    # The node has two outputs and therefore no spec: ATen itself tells the shape.
    image = torch.empty(value.spec.shape, dtype=getattr(torch, value.spec.dtype), device="meta")
    positional, keywords = split_arguments(node, {"self": image})
    out_px = tuple(get_operator(node.operator)(*positional, **keywords)[0].shape[-len(rules) :])
    window = read_pool_window(b, node, rules, out_px)
    x, padding = fold_padding(b, window, rules, out_px)
    # The kernel numbers the pixels of what it is given: with its fill, or, if it pads by itself, without.
    seen = window.held if any(padding) else window.wanted
    windows = [tuple(getattr(rule, name) for rule in rules) for name in ("kernel", "stride", "dilation")]
    settings = *windows, padding, tuple(span.start for span in seen), value.size_px
    like = _infer_pooled_spec(b, node, out_px)
    b.add_local_op(node.name, "tile.max_pool_with_places", x, *settings, like=like, axes=b.image_axes)


@register_kernel("tile.max_pool_with_places")
def pool_tile(
    x: Tensor,
    kernel: Settings,
    stride: Settings,
    dilation: Settings,
    padding: Settings,
    corner: Settings,
    size_px: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Pool a tile by maximum; `corner` is the first pixel of `x` in the whole image."""
    pool = get_operator(f"aten.max_pool{len(kernel)}d_with_indices.default")
    values, index = pool(x, kernel, stride, padding, dilation)
    return values, to_whole_index(index, x.shape[-len(kernel) :], corner, size_px)


def _infer_pooled_spec(b: Builder, node: Node, size_px: Sequence[int]) -> TensorSpec:
    """Return the spec of the values of a pool with two outputs, which has no spec of its own."""
    spec = b.get_value(node.arguments["self"]).spec
    return TensorSpec((*spec.shape[: -len(size_px)], *size_px), spec.dtype)


def _find_first_maximum(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest value along the last `count` axes, which become 1, and its row-major number there."""
    value, index = functional.adaptive_max_pool1d(x.flatten(-count), 1, return_indices=True)
    shape = (*value.shape[:-1], *(1,) * count)
    return value.view(shape), index.view(shape)


@register_kernel("tile.first_maximum")
def find_first_maximum(x: Tensor, dims: list[int], corner: Settings, size_px: Sequence[int]) -> Tensor:
    """Return (2, ..., 1, 1) in float64: the tile's largest value, and the whole-image index of its first one."""
    value, index = _find_first_maximum(x, len(dims))
    return torch.stack([value.double(), to_whole_index(index, x.shape[-len(dims) :], corner, size_px).double()])


@register_kernel("tile.first_of_all")
def merge_first_maxima(found: Tensor, dtype: torch.dtype, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest value and its index; of several, the first in row-major order or the last NaN, as in ATen."""
    values, places = found.flatten(-count)
    # Float64 holds whole numbers up to 2 ** 53 exactly, so that indices may travel in one tensor with the values.
    top, unknown = values.amax(-1, keepdim=True), values.isnan()
    order = torch.where(unknown, -places, places).detach().masked_fill((values != top) & ~unknown, math.inf)
    first, shape = order.argmin(-1, keepdim=True), (*values.shape[:-1], *(1,) * count)
    return values.gather(-1, first).view(shape).to(dtype), places.gather(-1, first).view(shape).long()


@register_kernel("tile.adaptive_maximum")
def find_cell_maxima(
    x: Tensor, cells: Sequence[Cells], corner: Settings, size_px: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the largest value of each cell and its index; cells are (start, stop) ranges of the window at `corner`."""
    values, places = [], []
    for cell in itertools.product(*cells):
        value, index = _find_first_maximum(cut_spans(x, range(-len(cell), 0), cell), len(cell))
        size = [stop - start for start, stop in cell]
        begin = tuple(first + start for first, (start, _) in zip(corner, cell, strict=True))
        values.append(value.flatten(-len(cell)))
        places.append(to_whole_index(index, size, begin, size_px).flatten(-len(cell)))
    counts = list(map(len, cells))
    return torch.cat(values, -1).unflatten(-1, counts), torch.cat(places, -1).unflatten(-1, counts)


@register_rule(*list_for_axes("adaptive_max_pool{}d.default"), images=("self",))
def pool_adaptive_maximum(b: Builder, node: Node) -> None:
    """Reduce each cell to its largest value and the index of that, with the cells of the adaptive average."""
    check_same_axes(b, node)
    source, count = node.arguments["self"], len(b.image_axes)
    value, out_px = b.get_value(source), tuple(node.arguments["output_size"])
    like = _infer_pooled_spec(b, node, out_px)
    if set(out_px) == {1}:
        corner = tuple(span.start for span in b.get_tiles(value.size_px)[b.rank])
        dims = list(range(len(like.shape) - count, len(like.shape)))
        how = "tile.first_maximum", dims, corner, value.size_px
        partials = all_gather_partials(b, node, source, *how, dtype="float64", lead=(2,))
        b.add_local_op(node.name, "tile.first_of_all", partials, getattr(torch, value.spec.dtype), count, like=like)
        return
    x, wanted, cells = fetch_cells(b, source, out_px)
    settings = cells, tuple(span.start for span in wanted), value.size_px
    b.add_local_op(node.name, "tile.adaptive_maximum", x, *settings, like=like, axes=b.image_axes)


_ANYWHERE = (
    *("rot90", "median", "prod", "argsort", "kthvalue", "msort", "tril", "triu"),
    *("any", "all", "count_nonzero", "cummax", "cummin"),
)


@register_rule(*(f"aten.{name}.default" for name in _ANYWHERE), "aten.argsort.stable", "aten.sort.stable")
def require_gather(b: Builder, node: Node) -> None:
    """Refuse tiles: any output may read any pixel."""
    raise make_gather_error(node, "reads pixels that lie anywhere")


@register_kernel("tile.unpool")
def unpool_tile(x: Tensor, places: Tensor, spans: Sequence[tuple[int, int]], size_px: Sequence[int]) -> Tensor:
    """Write each value to its place in the whole image, if inside the tile (start and stop along each axis)."""
    inside, flat, step, nowhere = places >= 0, torch.zeros_like(places), 1, math.prod(b - a for a, b in spans)
    for (start, stop), whole in reversed(list(zip(spans, size_px, strict=True))):
        at = places % whole - start
        inside = inside & (at >= 0) & (at < stop - start)
        flat, places, step = flat + at * step, places // whole, step * (stop - start)
    # Values of other tiles go to one extra element, which is cropped: the scatter needs no dynamic shape.
    flat = torch.where(inside, flat, nowhere).flatten(-len(spans))
    pixels = x.new_zeros((*x.shape[: -len(spans)], nowhere + 1)).scatter(-1, flat, x.flatten(-len(spans)))
    return pixels[..., :nowhere].unflatten(-1, [stop - start for start, stop in spans])


@register_rule("aten.max_unpool2d.default", "aten.max_unpool3d.default", images=("self", "indices"))
def unpool_maximum(b: Builder, node: Node) -> None:
    """Unpool: the output that read a pixel writes it, if the places are those of a pool with disjoint windows."""
    check_same_axes(b, node)
    a, out_px = node.arguments, b.get_image_px(node.result)
    pool = _find_pool(b, a["indices"])
    rules = make_pool_windows(pool) if pool else ()
    overlap = any(rule.stride < rule.dilation * (rule.kernel - 1) + 1 for rule in rules)
    if pool is None or overlap or b.get_value(pool.arguments["self"]).size_px != out_px:
        raise make_gather_error(node, "writes to places that are not known before", b.image_axes)
    # A pooled pixel is written back into the window that it was pooled from. A tile is written by the pooled pixels
    # whose windows meet it: those that a transposed convolution would read.
    back = [TransposedWindow(rule.kernel, rule.stride, rule.padding, rule.dilation) for rule in rules]
    values = b.pad_window(b.read_window(a["self"], out_px, *back))
    places = b.pad_window(b.read_window(a["indices"], out_px, *back, fill=-1))
    spans = tuple((span.start, span.stop) for span in b.get_output_tiles(out_px)[b.rank])
    b.add_local_op(node.name, "tile.unpool", values, places, spans, out_px, like=node.result, axes=b.image_axes)


def _find_pool(b: Builder, places: Ref) -> Node | None:
    """Return the tiled pool of which `places` are the second output; None if there is none."""
    nodes = {node.name: node for node in b.graph.nodes}
    pick = nodes.get(places.name)
    if pick is None or pick.operator != "getitem" or pick.arguments["1"] != 1:
        return None
    pool = nodes.get(pick.arguments["0"].name)
    if pool is None or "_with_indices." not in pool.operator:
        return None
    return pool if b.is_tiled(pool.arguments["self"]) else None
