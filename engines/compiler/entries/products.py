"""Matrix products: pixels are a batch, rows or columns of a matrix, or they are what the products are summed over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase

import torch

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import (
    all_gather_pixels,
    apply_locally,
    cut_to_tile,
    get_spec,
    make_gather_error,
    map_refs,
)
from mpi4dl_nb.engines.compiler.operator_table import register_rule
from mpi4dl_nb.engines.geometry.places import Place
from mpi4dl_nb.engines.graph.model_graph import Node, Ref


@register_rule("aten.linear.default", tiled=("input",))
def linear(b: Builder, node: Node) -> None:
    """Multiply along the channels, which are the last axis, by a matrix that all pixels share.

    If the last axis has all pixels, as behind `flatten(1)`, each rank multiplies its own by their columns of the
    matrix, and the products are added up. Raises NeedsGatherError if it has rows, or columns, alone.
    """
    a, value = node.arguments, b.get_value(node.arguments["input"])
    dims = {place.dim for place in value.places}
    if -1 not in dims:
        apply_locally(b, node, value.places)
        return
    if dims != {-1}:
        raise make_gather_error(node, "multiplies along a spatial axis")
    matrix = cut_to_tile(b, node, a["weight"], value, b.get_tiles(value.size_px)[b.rank])
    factors = b.crop_to_own(a["input"]), matrix, None
    part = b.add_local_op(f"{node.name}.part", "aten.linear.default", *factors, like=node.result)
    _add_up(b, node, part, a["bias"])


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
    def find_layout(term: str, ref: Ref) -> tuple[tuple[str, int, int, int], ...]:
        return tuple((term[place.dim], *place[1:]) for place in b.get_value(ref).places)

    tiled = [(term, ref) for term, ref in operands if b.is_tiled(ref)]
    layout = find_layout(*max(tiled, key=lambda pair: math.prod(b.get_value(pair[1]).size_px)))
    sharded = {letter for letter, *_ in layout}
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
        _add_up(b, node, apply_locally(b, replace(node, name=f"{node.name}.part"), ()))


def _add_up(b: Builder, node: Node, part: Ref, bias: Ref | None = None) -> None:
    """Make the node's result from the ranks' parts of it: their sum, and the bias if there is one."""
    # They are added in the type of sums: half precision would be rounded once for each rank.
    sums, dtype = node.result.sums, getattr(torch, node.result.dtype)
    wide = b.add_local_op(f"{node.name}.wide", "aten.to.dtype", part, getattr(torch, sums.dtype), like=sums)
    total = b.all_reduce(wide)
    if bias is not None:
        total = b.add_local_op(f"{node.name}.biased", "aten.add.Tensor", total, bias, like=sums)
    b.add_local_op(node.name, "aten.to.dtype", total, dtype, like=node.result)
