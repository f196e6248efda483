"""Attention: within windows each by itself; over all pixels, to keys that are gathered, or that travel in a ring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
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
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, TensorSpec
from mpi4dl_nb.engines.program.instructions import SEED
from mpi4dl_nb.engines.program.ring import RING_TAGS, KeyBlock, RingAttention, ScoreRule, TokenPlaces
from mpi4dl_nb.engines.program.rng import find_sample_number


@register_rule("aten.scaled_dot_product_attention.default", everywhere=True)
def attend(b: Builder, node: Node) -> None:
    """Attend from the queries of each rank to all keys, or within each window by itself.

    Keys are gathered, or stay where they are and travel in a ring, as `Plan.attention_keys` says. Raises
    NeedsGatherError for queries and keys that are sharded along different axes.
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
    if _wants_ring(b, node, dims):
        _attend_in_ring(b, node, query)
    else:
        _attend_to_gathered(b, node, query)


def _wants_ring(b: Builder, node: Node, dims: set[int]) -> bool:
    """Return whether keys travel in a ring; `dims` are the sharded dimensions of the queries."""
    pair = [node.arguments[name] for name in ("key", "value")]
    if not any(map(b.is_tiled, pair)):
        return False  # every rank has them
    if b.attention_keys != "auto":
        return b.attention_keys == "ring"
    # By size, and not by a forecast: a program is compiled without a machine, and the same on any. Causal attention
    # and dropout need the places of the pixels, which the ring has without a matrix of scores.
    is_placed = find_sample_number(b.graph, node) is not None or node.arguments["is_causal"]
    return is_placed or dims != {-2} or any(is_too_large(b, ref) for ref in pair)


def _attend_to_gathered(b: Builder, node: Node, query: ValueLayout) -> None:
    """Attend to keys of which each rank gathers all that its queries see."""
    a, tiles = node.arguments, b.get_output_tiles(query.size_px)
    _check_sharded_alike(node, query, b.get_value(a["key"]), b.get_value(a["value"]))
    keys = {name: _gather_keys(b, node, a[name], tiles) for name in ("key", "value")}
    rest = replace(node, arguments={name: a[name] for name in ("query", "attn_mask") if a[name]})
    aligned = keys | align_arguments(b, rest)
    if find_sample_number(b.graph, node) is not None or a["is_causal"]:
        _attend_by_place(b, node, query, tiles[b.rank], aligned)
        return
    check_deterministic(b, node)
    apply_locally(b, node, query.places, **aligned)


def _gather_keys(b: Builder, node: Node, ref: Ref, tiles: Mapping[int, Tile]) -> Ref:
    """Return the keys, or values, that the queries of this rank's one of `tiles` see."""
    value, name = b.get_value(ref), f"{node.name}.{ref.name}.seen"
    if all(place.dim == -2 for place in value.places):
        return b.all_gather(ref)
    if name in b.values:
        return Ref(name)  # keys that are values, too
    # Of attention along one axis, the rows (or columns) of this rank alone, all along.
    whole = Tile.whole(*value.size_px)
    wanted = {
        rank: Tile(
            *(all_px if place.dim == -2 else own for place, own, all_px in zip(value.places, tile, whole, strict=True))
        )
        for rank, tile in tiles.items()
    }
    window = b.exchange(b.crop_to_own(ref), wanted, 0.0)
    like = replace(value.spec, shape=value.compute_shape(wanted[b.rank]))
    return b.add_local_op(name, "aten.reshape.default", window, like.shape, like=like)


def _check_sharded_alike(node: Node, *layouts: ValueLayout) -> None:
    """Raise NeedsGatherError unless queries and keys are sharded along the same axes before the tokens."""
    # With the number of the mesh's axis: that of rows and that of columns may be at the same place, in two values.
    before = {tuple(pair for pair in enumerate(layout.places) if pair[1].dim != -2) for layout in layouts}
    if len(before) > 1:
        raise make_gather_error(node, "reads queries and keys that are sharded along different axes")


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
    tile = b.get_output_tiles(query.size_px)[b.rank] if query.places else Tile()
    _attend_by_place(b, node, query, tile, aligned)


def _attend_by_place(b: Builder, node: Node, query: ValueLayout, tile: Tile, aligned: Mapping[str, Any]) -> None:
    """Attend from a tile of queries to keys that are on this rank, with the order and dropout of the whole image."""
    _check_heads(b, node)
    a, draw = {**node.arguments, **aligned}, find_sample_number(b.graph, node) or 0
    settings = SEED, _make_rule(b, node, draw), *_list_token_ranges(query, tile)
    tensors = a["query"], a["key"], a["value"], a["attn_mask"]
    b.add_local_op(node.name, "tile.attention", *tensors, *settings, like=node.result, axes=query.places)


def _attend_in_ring(b: Builder, node: Node, query: ValueLayout) -> None:
    a = node.arguments
    key, value = b.get_value(a["key"]), b.get_value(a["value"])
    _check_heads(b, node)
    _check_sharded_alike(node, query, key, value)
    if key.places != value.places or all(place.dim != -2 for place in key.places):
        raise make_gather_error(node, "reads queries and keys that are sharded along different axes")
    mask = _align_mask(b, node, query)
    tile, key_tiles = b.get_tiles(query.size_px)[b.rank], b.get_tiles(key.size_px)
    ranks = _find_ring(b, query)
    groups, tokens = _list_token_ranges(query, tile)
    read = [b.crop_to_own(a[name]) for name in ("query", "key", "value")]
    differentiable = any(b.get_value(ref).differentiable for ref in (*read, *([mask] if mask else [])))
    target = ValueLayout(f"{node.name}.ring", node.result, query.places, differentiable)
    spec = replace(node.result, shape=target.compute_shape(tile))
    ring = RingAttention(
        name=target.name,
        queries=read[0].name,
        keys=read[1].name,
        values=read[2].name,
        mask=None if mask is None else mask.name,
        target=target.name,
        spec=spec,
        blocks=tuple(_make_block(rank, key, value, key_tiles[rank]) for rank in ranks),
        position=ranks.index(b.rank),
        rule=_make_rule(b, node, find_sample_number(b.graph, node) or 0),
        groups=groups,
        tokens=tokens,
        tag=b.reserve_tags(RING_TAGS),
        differentiable=differentiable,
        trained_mask=_find_trained_mask(b, mask, spec),
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
    if mask.places:
        if mask.places != query.places:
            raise make_gather_error(node, "reads a mask that is sharded along other axes than the queries")
        return b.crop_to_own(ref)
    part = cut_to_tile(b, node, ref, query, b.get_tiles(query.size_px)[b.rank])
    return b.add_local_op(f"{node.name}.mask", "aten.alias.default", part, like=mask.spec)  # a value, also of a buffer


def _find_trained_mask(b: Builder, mask: Ref | None, result: TensorSpec) -> TensorSpec | None:
    """Return the spec of this rank's part of a mask whose gradient is wanted, given that of its part of the result."""
    if mask is None or not b.get_value(mask).differentiable:
        return None
    spec = b.get_value(mask).spec
    sizes = result.shape[len(result.shape) - len(spec.shape) : -1]
    rows = (1 if whole == 1 else size for whole, size in zip(spec.shape[:-1], sizes, strict=True))
    return replace(spec, shape=(*rows, *spec.shape[-1:]))


def _check_heads(b: Builder, node: Node) -> None:
    """Raise NeedsGatherError if keys are broadcast over images, or over heads in another way than `enable_gqa`."""
    shapes = [get_spec(b, node.arguments[name].name).shape[:-2] for name in ("query", "key", "value")]
    alike = [shape[:-1] for shape in shapes] if node.arguments.get("enable_gqa") else shapes
    if len(set(alike)) > 1:
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
