"""Operators that read or write pixels at places which the data say."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.entries.pooling import pool_rules
from engines.spatial.kernels import local_kernel
from engines.spatial.ops import entry
from engines.spatial.places import places_of
from engines.spatial.plain import as_it_is
from engines.spatial.refusals import apart
from engines.spatial.whole import gathered
from engines.spatial.windows import SlidingWindow, TransposedWindow

__all__: list[str] = []


@entry("aten.grid_sampler.default")
def sample_at_places(b: Builder, node: Node) -> None:
    """The image is gathered, and each rank looks up its own outputs (Jaderberg et al., 2015, arXiv:1506.02025)."""
    a, grid = node.arguments, node.arguments["grid"]
    if b.is_tiled(grid) and b.value(grid).axes != (-3, -2):
        raise apart(node, "reads places whose rows and columns are not the two axes before the last", (-2, -1))
    spans = [place[1:] for place in places_of(b, node.spec, (-2, -1))[-2:]]
    if b.is_tiled(grid):
        own = b.beneath(grid)
    else:
        own = b.local(f"{node.name}.places", "tile.cut", grid, (-3, -2), spans, like=b.value(grid).spec)
    as_it_is(b, node, (-2, -1), input=gathered(b, node, a["input"]), grid=own)


@entry(
    *(
        f"aten.{name}"
        for name in (
            "rot90.default", "median.default", "prod.default", "argsort.default", "argsort.stable", "kthvalue.default",
            "msort.default", "im2col.default", "unfold.default", "bmm.default", "tril.default", "triu.default",
        )
    )
)  # fmt: skip
def anywhere(b: Builder, node: Node) -> None:
    """Any output may read any pixel."""
    raise apart(node, "reads pixels that lie anywhere")


@local_kernel("tile.unpool")
def unpool_tile(x: Tensor, places: Tensor, tile: tuple[int, int, int, int], width_px: int) -> Tensor:
    """Each value at its place in the whole image, where that lies in the tile (rows, columns: start and stop)."""
    top, bottom, left, right = tile
    height, width = bottom - top, right - left
    row, col = places // width_px - top, places % width_px - left
    inside = (places >= 0) & (row >= 0) & (row < height) & (col >= 0) & (col < width)
    nowhere = height * width
    flat = torch.where(inside, row * width + col, nowhere).flatten(-2)
    made = x.new_zeros((*x.shape[:-2], nowhere + 1)).scatter(-1, flat, x.flatten(-2))
    return made[..., :nowhere].unflatten(-1, (height, width))


@entry("aten.max_unpool2d.default", images=("self", "indices"))
def unpool(b: Builder, node: Node) -> None:
    """A pixel is written by the output that read it, where the places are those of a pool whose windows lie apart."""
    a, out_px = node.arguments, (node.spec.shape[-2], node.spec.shape[-1])
    pool = _pool_of(b, a["indices"])
    rules = pool_rules(pool) if pool else ()
    if not rules or b.value(pool.arguments["self"]).size_px != out_px or any(map(_overlaps, rules)):
        raise apart(node, "writes to places that are not known before", (-2, -1))
    back = [TransposedWindow(rule.kernel, rule.stride, rule.padding, rule.dilation) for rule in rules]
    values = b.padded(b.window(a["self"], out_px, *back))
    places = b.padded(b.window(a["indices"], out_px, *back, fill=-1))
    out = b.outputs(out_px)[b.rank]
    tile = (out.rows.start, out.rows.stop, out.cols.start, out.cols.stop)
    b.local(node.name, "tile.unpool", values, places, tile, out_px[1], like=node.spec, axes=(-2, -1))


def _pool_of(b: Builder, places: Ref) -> Node | None:
    """The tiled pool whose second output some places are."""
    nodes = {node.name: node for node in b.graph.nodes}
    pick = nodes.get(places.name)
    if pick is None or pick.operator != "getitem" or pick.arguments["1"] != 1:
        return None
    pool = nodes.get(pick.arguments["0"].name)
    known = pool and pool.operator == "aten.max_pool2d_with_indices.default"
    return pool if known and b.is_tiled(pool.arguments["self"]) else None


def _overlaps(rule: SlidingWindow) -> bool:
    return rule.stride < rule.dilation * (rule.kernel - 1) + 1
