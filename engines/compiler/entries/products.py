"""Matrix products: pixels are a batch, rows or columns of a matrix, or they are what the products are summed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_lowercase

from mpi4dl_nb.engines.compiler.builder import Builder
from mpi4dl_nb.engines.compiler.local_rules import (
    align_arguments,
    apply_locally,
    check_deterministic,
    find_largest_image,
    find_sharded_dims,
    get_spec,
    make_gather_error,
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
def attend_in_windows(b: Builder, node: Node) -> None:
    """Attend within each window by itself, if the ranks have different windows; they are a part of the batch."""
    places = find_largest_image(b, node).places
    if any(place.dim >= -2 for place in places):
        raise make_gather_error(node, "attends to pixels that lie anywhere")
    check_deterministic(b, node)
    apply_locally(b, node, places, **align_arguments(b, node))


def _contract(b: Builder, node: Node, operands: Sequence[tuple[str, Ref]], out: str) -> None:
    """Multiply operands whose axes have letters: all sharded axes stay, or all are summed over, by an all-reduce.

    Raises NeedsGatherError for any other product.
    """
    #     nchw,kc->nkhw      h and w stay: each pixel by itself
    #     nchw,ndhw->ncd     both are summed over: on each tile, then over the ranks
    #     nct,ndt->ncd       the same for tokens, in which h and w are one axis t
    #     nchw,nchv->nwv     joins pixels of different columns: refused
    layouts = set()
    for term, ref in operands:
        if b.is_tiled(ref):
            places = b.get_value(ref).places
            layouts.add(tuple((term[place.dim], place.outer, place.inner) for place in places))
            if any(term.count(term[place.dim]) > 1 for place in places):
                raise make_gather_error(node, f"names two axes alike, one of which is spatial ({term})")
    if len(layouts) != 1:
        raise make_gather_error(node, "multiplies pixels with other pixels")
    layout = layouts.pop()
    sharded = {letter for letter, _, _ in layout}
    for term, ref in operands:
        if not b.is_tiled(ref):
            shape = get_spec(b, ref.name).shape
            if any(letter in sharded and size > 1 for letter, size in zip(term, shape, strict=True)):
                raise make_gather_error(node, "multiplies rows or columns with what is no image")
    if sharded <= set(out):
        apply_locally(b, node, (Place(out.index(letter) - len(out), *around) for letter, *around in layout))
    elif sharded & set(out):
        raise make_gather_error(node, "sums over one spatial axis of two")
    else:
        part = apply_locally(b, replace(node, name=f"{node.name}.part"), ())
        b.add_local_op(node.name, "aten.alias.default", b.all_reduce(part), like=node.spec)
