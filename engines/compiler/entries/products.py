"""Matrix products: pixels are a batch, rows or columns of a matrix, or they are what the products are summed over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase

import torch

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    all_gather_pixels,
    apply_locally,
    check_deterministic,
    find_sharded_dims,
    get_spec,
    make_gather_error,
    map_refs,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.places import Place
from mpi4dl_nb.engines.graph.model_graph import Node, Ref


@register_rule("aten.linear.default", tiled=("input",))
def linear(b: Builder, node: Node) -> None:
    """Multiply along the channels, which are the last axis, by a matrix that all pixels share."""
    pixels, shape = node.arguments["input"], get_spec(b, node.arguments["input"].name).shape
    if len(shape) - 1 in find_sharded_dims(b, pixels):
        raise make_gather_error(node, "multiplies along a spatial axis")
    apply_locally(b, node, b.get_value(pixels).places)


@register_rule("aten.matmul.default", "aten.bmm.default")
def multiply(b: Builder, node: Node) -> None:
    """Multiply matrices, or stacks of them that are broadcast over each other."""
    factors = list(node.arguments.values())
    counts = [len(get_spec(b, ref.name).shape) for ref in factors]
    if min(counts) < 2:
        raise make_gather_error(node, "multiplies pixels by a vector")
    stacks = ascii_lowercase[: max(counts) - 2]
    terms = [stacks[len(stacks) + 2 - count :] + matrix for count, matrix in zip(counts, ("MK", "KN"), strict=True)]
    _contract(b, node, list(zip(terms, factors, strict=True)), f"{stacks}MN")


@register_rule("aten.einsum.default")
def einsum(b: Builder, node: Node) -> None:
    """Sum the products of what the equation names."""
    equation = node.arguments["equation"].replace(" ", "")
    terms, arrow, out = equation.partition("->")
    if not arrow or "." in equation:
        raise make_gather_error(node, "has no explicit result")
    _contract(b, node, list(zip(terms.split(","), node.arguments["tensors"], strict=True)), out)


@register_rule("aten.scaled_dot_product_attention.default")
def attend(b: Builder, node: Node) -> None:
    """Attend from the queries of each rank to all keys, which are gathered, or within each window by itself.

    Raises NeedsGatherError if there are too many keys to gather.
    """
    check_deterministic(b, node)
    a = node.arguments
    places = b.get_value(a["query"]).places
    dims = {place.dim for place in places}
    if not places or -1 in dims or (-2 in dims and a["is_causal"]):
        raise make_gather_error(node, "attends to pixels that lie anywhere")
    if -2 not in dims:  # windows are a part of the batch
        apply_locally(b, node, places, **align_arguments(b, node))
        return
    keys = {name: all_gather_pixels(b, node, a[name]) for name in ("key", "value")}
    rest = replace(node, arguments={"query": a["query"], **({"attn_mask": a["attn_mask"]} if a["attn_mask"] else {})})
    apply_locally(b, node, places, **keys, **align_arguments(b, rest))


def _contract(b: Builder, node: Node, operands: Sequence[tuple[str, Ref]], out: str) -> None:
    """Multiply operands whose axes have letters: all sharded axes stay, or all are summed over, by an all-reduce.

    Of operands that are sharded in different ways, the largest stays in tiles, and the others are gathered. Raises
    NeedsGatherError for any other product, or if too many pixels would be gathered.
    """

    #     nchw,kc->nkhw      h and w stay: each pixel by itself
    #     nchw,ndhw->ncd     both are summed over: on each tile, then over the ranks
    #     nct,ndt->ncd       the same for tokens, in which h and w are one axis t
    #     nqc,nkc->nqk       few keys k are gathered; the many queries q stay
    #     nchw,nchv->nwv     joins pixels of different columns: refused
    def find_layout(term: str, ref: Ref) -> tuple[tuple[str, int, int], ...]:
        return tuple((term[place.dim], place.outer, place.inner) for place in b.get_value(ref).places)

    tiled = [(term, ref) for term, ref in operands if b.is_tiled(ref)]
    layout = find_layout(*max(tiled, key=lambda pair: math.prod(b.get_value(pair[1]).size_px)))
    sharded = {letter for letter, _, _ in layout}
    parts: dict[Ref, Ref] = {}
    for term, ref in operands:
        if any(term.count(letter) > 1 for letter in sharded):
            raise make_gather_error(node, f"names two axes alike, one of which is spatial ({term})")
        part = ref if find_layout(term, ref) == layout else all_gather_pixels(b, node, ref)
        if parts.setdefault(ref, part) != part:
            raise make_gather_error(node, f"multiplies {ref.name} with itself along different axes")
        sizes = dict(zip(term, get_spec(b, ref.name).shape, strict=True))
        if not b.is_tiled(part) and any(sizes.get(letter, 1) > 1 for letter in sharded):
            raise make_gather_error(node, "multiplies rows or columns with others")
    node = replace(node, arguments=map_refs(lambda ref: parts[ref], node.arguments))
    if sharded <= set(out):
        apply_locally(b, node, (Place(out.index(letter) - len(out), *around) for letter, *around in layout))
    elif sharded & set(out):
        raise make_gather_error(node, "sums over one spatial axis of two")
    else:
        # The parts are added in the type of sums: half precision would be rounded once for each rank.
        part, sums = apply_locally(b, replace(node, name=f"{node.name}.part"), ()), node.result.sums
        wide = b.add_local_op(f"{node.name}.wide", "aten.to.dtype", part, getattr(torch, sums.dtype), like=sums)
        dtype = getattr(torch, node.result.dtype)
        b.add_local_op(node.name, "aten.to.dtype", b.all_reduce(wide), dtype, like=node.result)
