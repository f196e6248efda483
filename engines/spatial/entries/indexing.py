"""Selections along an axis: one index, or those of a list."""

from __future__ import annotations

import torch

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.align import get_axes_without, get_spatial_axes, get_spec
from engines.spatial.entries.channels import check_only_first_tiled
from engines.spatial.entries.sampling import lower_resample, make_copy_taps
from engines.spatial.gather_fallback import all_gather_lines
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.tiles import Span, Tile
from engines.spatial.unsupported import make_gather_error

__all__ = ["read_line_numbers"]


@register_rule("aten.select.int")
def select(b: Builder, node: Node) -> None:
    """Select one channel of each pixel; or one row or column, which every rank then holds."""
    source, place = node.arguments["self"], node.arguments["dim"]
    rows, cols, count = get_spatial_axes(b, source)
    if place % count not in (rows, cols):
        apply_locally(b, node, get_axes_without(b, source, [place % count]))
        return
    height, width = b.get_value(source).size_px
    is_row = place % count == rows
    number = node.arguments["index"] % (height if is_row else width)
    line = Span(number, number + 1)
    wanted = Tile(line, Span(0, width)) if is_row else Tile(Span(0, height), line)
    line_of_all = all_gather_lines(b, node, source, wanted)
    b.add_local_op(node.name, "aten.select.int", line_of_all, place, 0, like=node.spec)


@register_rule("aten.index.Tensor")
def pick_channels(b: Builder, node: Node) -> None:
    """Pick channels by a list of their numbers; or rows and columns by a constant list."""
    source, indices = node.arguments["self"], node.arguments["indices"]
    picked = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(picked) == 1 and b.is_tiled(source) and not b.is_tiled(picked[0][1]):
        (dim, index), spec = picked[0], get_spec(b, picked[0][1].name)
        if len(spec.shape) == 1 and spec.dtype != "bool":
            pick_lines(b, node, source, dim, index)
            return
    raise make_gather_error(node, "picks by something other than one list of channels, rows or columns")


@register_rule("aten.index_select.default")
def pick_along(b: Builder, node: Node) -> None:
    """Pick values along one axis, by a list."""
    pick_lines(b, node, check_only_first_tiled(b, node), node.arguments["dim"], node.arguments["index"])


def pick_lines(b: Builder, node: Node, source: Ref, dim: int, index: Ref) -> None:
    """Pick values along one axis by a list of their numbers."""
    rows, cols, count = get_spatial_axes(b, source)
    if dim % count not in (rows, cols):
        apply_locally(b, node, b.get_value(source).axes)
        return
    sizes = zip((rows, cols), b.get_value(source).size_px, strict=True)
    taken = (read_line_numbers(b, node, index, size) if dim % count == axis else range(size) for axis, size in sizes)
    lower_resample(b, node, source, *map(make_copy_taps, taken))


def read_line_numbers(b: Builder, node: Node, index: Ref, size_px: int) -> list[int]:
    """Return the numbers of rows or columns in a list. Raises NeedsGatherError if the list is no constant."""
    # Windows are computed before any pixel is known: only a list that the trace knows can tell which lines to fetch.
    constant = b.graph.constants.get(index.name)
    if constant is None or constant.dtype == torch.bool:
        raise make_gather_error(node, "picks rows or columns that are not known before")
    return [number % size_px for number in constant.flatten().tolist()]
