"""Operators that read all pixels: every rank gathers them, for images of few pixels only."""

from __future__ import annotations

from dataclasses import replace

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.align import get_local_ranges, map_refs
from engines.spatial.tiles import Tile
from engines.spatial.unsupported import WHOLE_PX, make_gather_error
from engines.spatial.windows import Window

__all__ = ["all_gather_lines", "all_gather_pixels", "keep_own_tile", "with_gathered_inputs"]


def all_gather_pixels(b: Builder, node: Node, ref: Ref) -> Ref:
    """Gather all pixels of a value, for a node.

    Raises NeedsGatherError if there are more than `WHOLE_PX`.
    """
    if b.is_tiled(ref) and len(b.stage.ranks) > 1:
        height, width = b.get_value(ref).size_px
        if height * width > WHOLE_PX:
            raise make_gather_error(node, f"reads all {height} x {width} pixels of {ref.name}")
    return b.all_gather(ref)


def with_gathered_inputs(b: Builder, node: Node) -> Node:
    """Return the node with gathered values in place of tiled ones.

    Raises NeedsGatherError as `all_gather_pixels` does.
    """
    whole = {
        name: map_refs(lambda ref: all_gather_pixels(b, node, ref), value) for name, value in node.arguments.items()
    }
    return replace(node, arguments=whole)


def keep_own_tile(b: Builder, node: Node, whole: Ref, axes: tuple[int, int]) -> None:
    """Set the node's result to this rank's tile of a value that the rank holds whole."""
    places = get_local_ranges(b, node.spec, axes)
    spans = tuple(places[axis][1:] for axis in axes)
    b.add_local_op(node.name, "tile.cut", whole, axes, spans, like=node.spec, axes=axes)


def all_gather_lines(b: Builder, node: Node, source: Ref, wanted: Tile) -> Ref:
    """Gather a few rows or columns of a tiled value on every rank. Raises NeedsGatherError beyond `WHOLE_PX`."""
    if wanted.pixels > WHOLE_PX:
        raise make_gather_error(node, f"takes {len(wanted.rows)} x {len(wanted.cols)} pixels out of {source.name}")
    # Every rank wants the same lines, wherever its own tile lies.
    found = b.exchange(b.crop_to_own(source), dict.fromkeys(b.stage.ranks, wanted), 0.0)
    return b.pad_window(Window(found.name, b.get_held_tiles(found)[b.rank], wanted, 0.0))
