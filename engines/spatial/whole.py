"""Operators that read all pixels: every rank gathers them, for images of few pixels only."""

from __future__ import annotations

from dataclasses import replace

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.places import each, places_of
from engines.spatial.refusals import WHOLE_PX, apart
from engines.spatial.tiles import Tile
from engines.spatial.windows import Window

__all__ = ["gathered", "lines_of_all", "own_part", "with_whole"]


def gathered(b: Builder, node: Node, ref: Ref) -> Ref:
    """All pixels of a value, for a node.

    Raises WholeError where they are more than `WHOLE_PX`.
    """
    if b.is_tiled(ref) and len(b.stage.ranks) > 1:
        height, width = b.value(ref).size_px
        if height * width > WHOLE_PX:
            raise apart(node, f"reads all {height} x {width} pixels of {ref.name}")
    return b.gathered(ref)


def with_whole(b: Builder, node: Node) -> Node:
    """The node reading gathered values in place of tiled ones.

    Raises WholeError as above.
    """
    whole = {name: each(lambda ref: gathered(b, node, ref), value) for name, value in node.arguments.items()}
    return replace(node, arguments=whole)


def own_part(b: Builder, node: Node, whole: Ref, axes: tuple[int, int]) -> None:
    """The node's result is this rank's tile of a value that it holds wholly."""
    places = places_of(b, node.spec, axes)
    spans = tuple(places[axis][1:] for axis in axes)
    b.local(node.name, "tile.cut", whole, axes, spans, like=node.spec, axes=axes)


def lines_of_all(b: Builder, node: Node, source: Ref, wanted: Tile) -> Ref:
    """A few rows or columns of a tiled value, on every rank. Raises WholeError where they are too many pixels."""
    if wanted.pixels > WHOLE_PX:
        raise apart(node, f"takes {len(wanted.rows)} x {len(wanted.cols)} pixels out of {source.name}")
    found = b.exchange(b.owned(source), dict.fromkeys(b.stage.ranks, wanted), 0.0)
    return b.padded(Window(found.name, b.holds(found)[b.rank], wanted, 0.0))
