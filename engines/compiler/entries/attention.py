"""Attention: within windows each by itself; over all pixels, to keys that are gathered, or that travel in a ring."""

from __future__ import annotations

import math
from dataclasses import replace

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    all_gather_pixels,
    apply_locally,
    check_deterministic,
    cut_to_tile,
    get_spec,
    is_too_large,
    make_gather_error,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.compiler.value_layout import ValueLayout
from mpi4dl_nb.engines.geometry.places import Ranges, drop_lead, list_ranges
from mpi4dl_nb.engines.geometry.tiles import Span, Tile
from mpi4dl_nb.engines.graph.model_graph import Node, Ref
from mpi4dl_nb.engines.program.instructions import SEED
from mpi4dl_nb.engines.program.ring import RING_TAGS, KeyBlock, RingAttention, ScoreRule, TokenPlaces
from mpi4dl_nb.engines.program.rng import find_sample_number


@register_rule("aten.scaled_dot_product_attention.default", everywhere=True)
def attend(b: Builder, node: Node) -> None:
    """Attend from the queries of each rank to all keys, or within each window by itself.

    Few keys are gathered. Many stay where they are, and travel in a ring, as do those of attention along one axis
    (axial attention), causal attention and dropout. Raises NeedsGatherError for a mask with a gradient beside a ring,
    and for queries and keys that are sharded along different axes.
    """
    #     windows (N H/8 W/8, 64, C)   tokens are whole on their rank: no message
    #     tokens  (N, H W, C)          queries stay; keys are gathered, or come one block after another
    #     rows    (N, H, W, C)         along W: the blocks of the ranks beside this one, in the same rows
    a = node.arguments
    query = b.get_value(a["query"])
    dims = {place.dim for place in query.places}
    if any(b.is_tiled(Ref(name)) for name in node.reads) and (not dims or -1 in dims):
        raise make_gather_error(node, "attends to pixels that lie anywhere")
    if b.tile_by_tile and -2 in dims and len(b.stage.ranks) > 1:
        raise make_gather_error(node, "attends to the pixels of all tiles")
    if len(_find_ring(b, query)) == 1:
        _attend_locally(b, node, query)
        return
    pair = {name: a[name] for name in ("key", "value")}
    is_random = find_sample_number(b.graph, node) is not None
    if is_random or a["is_causal"] or dims != {-2} or any(is_too_large(b, ref) for ref in pair.values()):
        _attend_in_ring(b, node, query)
        return
    check_deterministic(b, node)
    keys = {name: all_gather_pixels(b, node, ref) for name, ref in pair.items()}
    rest = replace(node, arguments={name: a[name] for name in ("query", "attn_mask") if a[name]})
    apply_locally(b, node, query.places, **keys, **align_arguments(b, rest))


def _find_ring(b: Builder, query: ValueLayout) -> list[int]:
    """Return the ranks that hold tokens of the same images, or windows, or rows as this one."""
    tiles = b.get_tiles(query.size_px) if query.places else {b.rank: Tile()}

    def get_group(tile: Tile) -> list[Span]:
        return [span for place, span in zip(query.places, tile, strict=True) if place.dim != -2]

    return [rank for rank, tile in tiles.items() if get_group(tile) == get_group(tiles[b.rank])]


def _attend_locally(b: Builder, node: Node, query: ValueLayout) -> None:
    """Attend to keys that are all on this rank."""
    aligned = align_arguments(b, node) if query.places else {}
    draw = find_sample_number(b.graph, node)
    if draw is None:
        check_deterministic(b, node)
        apply_locally(b, node, query.places, **aligned)
        return
    _check_heads(b, node)
    a = {**node.arguments, **aligned}
    tile = b.get_output_tiles(query.size_px)[b.rank] if query.places else Tile()
    settings = SEED, _make_rule(b, node, draw), *_list_token_ranges(query, tile)
    tensors = a["query"], a["key"], a["value"], a["attn_mask"]
    b.add_local_op(node.name, "tile.attention", *tensors, *settings, like=node.result, axes=query.places)


def _attend_in_ring(b: Builder, node: Node, query: ValueLayout) -> None:
    a = node.arguments
    key, value = b.get_value(a["key"]), b.get_value(a["value"])
    _check_heads(b, node)
    layouts = query, key, value
    # With the number of the mesh's axis: that of rows and that of columns may be at the same place, in two values.
    before = {tuple(pair for pair in enumerate(layout.places) if pair[1].dim != -2) for layout in layouts}
    if len(before) > 1 or key.places != value.places or all(place.dim != -2 for place in key.places):
        raise make_gather_error(node, "reads queries and keys that are sharded along different axes")
    mask = _align_mask(b, node, query)
    tile, key_tiles = b.get_tiles(query.size_px)[b.rank], b.get_tiles(key.size_px)
    ranks = _find_ring(b, query)
    groups, tokens = _list_token_ranges(query, tile)
    read = [b.crop_to_own(a[name]) for name in ("query", "key", "value")]
    differentiable = any(b.get_value(ref).differentiable for ref in read)
    target = ValueLayout(f"{node.name}.ring", node.result, query.places, differentiable)
    ring = RingAttention(
        name=target.name,
        queries=read[0].name,
        keys=read[1].name,
        values=read[2].name,
        mask=None if mask is None else mask.name,
        target=target.name,
        spec=replace(node.result, shape=target.compute_shape(tile)),
        blocks=tuple(_make_block(rank, key, value, key_tiles[rank]) for rank in ranks),
        position=ranks.index(b.rank),
        rule=_make_rule(b, node, find_sample_number(b.graph, node) or 0),
        groups=groups,
        tokens=tokens,
        tag=b.reserve_tags(RING_TAGS),
        differentiable=differentiable,
    )
    b.add_local_op(node.name, "aten.alias.default", b.add_ring(ring, target), like=node.result, axes=query.places)
    b.hold_like(Ref(node.name), Ref(target.name))


def _make_block(rank: int, key: ValueLayout, value: ValueLayout, tile: Tile) -> KeyBlock:
    specs = [replace(whole.spec, shape=whole.compute_shape(tile)) for whole in (key, value)]
    return KeyBlock(rank, specs[0], specs[1], tile, _list_token_ranges(key, tile)[1])


def _align_mask(b: Builder, node: Node, query: ValueLayout) -> Ref | None:
    """Return the rows of the mask that belong to this rank's own queries, with those of all keys."""
    ref = node.arguments["attn_mask"]
    if ref is None:
        return None
    mask = b.get_value(ref)
    if mask.differentiable:
        raise make_gather_error(node, "adds a mask that is trained")
    if mask.places:
        if mask.places != query.places:
            raise make_gather_error(node, "reads a mask that is sharded along other axes than the queries")
        return b.crop_to_own(ref)
    part = cut_to_tile(b, node, ref, query, b.get_tiles(query.size_px)[b.rank])
    return b.add_local_op(f"{node.name}.mask", "aten.alias.default", part, like=mask.spec)  # a value, also of a buffer


def _check_heads(b: Builder, node: Node) -> None:
    """Raise NeedsGatherError if keys are shared by several heads, or broadcast over images."""
    shapes = [get_spec(b, node.arguments[name].name).shape[:-2] for name in ("query", "key", "value")]
    if len(set(shapes)) > 1:
        raise make_gather_error(node, f"has queries, keys and values for other images and heads: {shapes}")


def _make_rule(b: Builder, node: Node, draw: int) -> ScoreRule:
    a = node.arguments
    scale = a.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(get_spec(b, a["query"].name).shape[-1])
    return ScoreRule(scale, bool(a["is_causal"]), float(a["dropout_p"]), draw)


def _list_token_ranges(value: ValueLayout, tile: Tile) -> tuple[Ranges, TokenPlaces]:
    """Return the positions of a tile along the axes before the tokens, and along the tokens."""
    shape, places = drop_lead(value.spec.shape, value.places)
    pairs = list(zip(places, tile, strict=True))

    def list_positions(first: int, last: int) -> Ranges:
        """Return the positions along the dimensions from `first` to the one before `last`, counted from the end."""
        held = [(place._replace(dim=place.dim - last), span) for place, span in pairs if first <= place.dim < last]
        return list_ranges(shape[first:last], tuple(place for place, _ in held), Tile(*(span for _, span in held)))

    return list_positions(-len(shape), -2), TokenPlaces(list_positions(-2, -1), value.lead)
