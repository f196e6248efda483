"""Operators that read or write pixels at data-dependent positions."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.align import get_local_ranges
from engines.spatial.entries.pooling import make_pool_windows
from engines.spatial.gather_fallback import all_gather_pixels
from engines.spatial.kernels import register_kernel
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.unsupported import make_gather_error
from engines.spatial.windows import TransposedWindow

__all__: list[str] = []


@register_rule("aten.grid_sampler.default")
def grid_sampler(b: Builder, node: Node) -> None:
    """Gather the image; each rank samples its own outputs (Jaderberg et al., 2015, arXiv:1506.02025)."""
    a, grid = node.arguments, node.arguments["grid"]
    if b.is_tiled(grid) and b.get_value(grid).axes != (-3, -2):
        raise make_gather_error(
            node, "reads places whose rows and columns are not the two axes before the last", (-2, -1)
        )
    spans = [place[1:] for place in get_local_ranges(b, node.spec, (-2, -1))[-2:]]
    if b.is_tiled(grid):
        own = b.align_to_output(grid)
    else:
        own = b.add_local_op(f"{node.name}.places", "tile.cut", grid, (-3, -2), spans, like=b.get_value(grid).spec)
    apply_locally(b, node, (-2, -1), input=all_gather_pixels(b, node, a["input"]), grid=own)


_ANYWHERE = ("rot90", "median", "prod", "argsort", "kthvalue", "msort", "im2col", "unfold", "bmm", "tril", "triu")


@register_rule(*(f"aten.{name}.default" for name in _ANYWHERE), "aten.argsort.stable")
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
    made = x.new_zeros((*x.shape[:-2], nowhere + 1)).scatter(-1, flat, x.flatten(-2))
    return made[..., :nowhere].unflatten(-1, (height, width))


@register_rule("aten.max_unpool2d.default", images=("self", "indices"))
def max_unpool2d(b: Builder, node: Node) -> None:
    """Unpool: the output that read a pixel writes it, if the places are those of a pool with disjoint windows."""
    a, out_px = node.arguments, (node.spec.shape[-2], node.spec.shape[-1])
    pool = _find_pool(b, a["indices"])
    rules = make_pool_windows(pool) if pool else ()
    overlap = any(rule.stride < rule.dilation * (rule.kernel - 1) + 1 for rule in rules)
    if not rules or overlap or b.get_value(pool.arguments["self"]).size_px != out_px:
        raise make_gather_error(node, "writes to places that are not known before", (-2, -1))
    # A pooled pixel is written back into the window that it was pooled from. A tile is written by the pooled pixels
    # whose windows meet it: those that a transposed convolution would read.
    back = [TransposedWindow(rule.kernel, rule.stride, rule.padding, rule.dilation) for rule in rules]
    values = b.pad_window(b.read_window(a["self"], out_px, *back))
    places = b.pad_window(b.read_window(a["indices"], out_px, *back, fill=-1))
    out = b.get_output_tiles(out_px)[b.rank]
    tile = (out.rows.start, out.rows.stop, out.cols.start, out.cols.stop)
    b.add_local_op(node.name, "tile.unpool", values, places, tile, out_px[1], like=node.spec, axes=(-2, -1))


def _find_pool(b: Builder, places: Ref) -> Node | None:
    """Return the tiled pool of which `places` are the second output; None if there is none."""
    nodes = {node.name: node for node in b.graph.nodes}
    pick = nodes.get(places.name)
    if pick is None or pick.operator != "getitem" or pick.arguments["1"] != 1:
        return None
    pool = nodes.get(pick.arguments["0"].name)
    known = pool and pool.operator == "aten.max_pool2d_with_indices.default"
    return pool if known and b.is_tiled(pool.arguments["self"]) else None
