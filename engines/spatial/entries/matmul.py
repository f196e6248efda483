"""Matrix products in which pixels are a batch, or which sum over all of space."""

from __future__ import annotations

from dataclasses import replace

from engines.layer.graph import Node, Ref
from engines.program.builder import Builder
from engines.spatial.align import get_spatial_axes, get_spec
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.unsupported import make_gather_error

__all__: list[str] = []


@register_rule("aten.linear.default")
def linear(b: Builder, node: Node) -> None:
    """Multiply along the channels, which are the last axis."""
    _multiply_by_weight(b, node, node.arguments["input"], node.arguments["weight"], node.arguments["bias"])


@register_rule("aten.matmul.default")
def matmul(b: Builder, node: Node) -> None:
    """Multiply along the last axis by a matrix that all pixels share."""
    _multiply_by_weight(b, node, node.arguments["self"], node.arguments["other"])


def _multiply_by_weight(b: Builder, node: Node, pixels: Ref, weight: Ref, *more: Ref | None) -> None:
    if not b.is_tiled(pixels) or any(b.is_tiled(other) for other in (weight, *more)):
        raise make_gather_error(node, "multiplies pixels with pixels")
    rows, cols, count = get_spatial_axes(b, pixels)
    if count - 1 in (rows, cols) or len(get_spec(b, weight.name).shape) != 2:
        raise make_gather_error(node, "multiplies along a spatial axis")
    apply_locally(b, node, b.get_value(pixels).axes)


@register_rule("aten.einsum.default")
def einsum(b: Builder, node: Node) -> None:
    """Keep both rows and columns, or sum over both: that sum includes an all-reduce over the ranks."""
    equation = node.arguments["equation"].replace(" ", "")
    terms, arrow, out = equation.partition("->")
    operands = list(zip(terms.split(","), node.arguments["tensors"], strict=True))
    #     nchw,kc->nkhw      h and w stay: each pixel by itself
    #     nchw,ndhw->ncd     both are summed over: on each tile, then over the ranks
    #     nchw,nchv->nwv     joins pixels of different columns: refused
    letters = _find_spatial_letters(b, operands)
    if not arrow or "." in equation or len(letters) != 1:
        raise make_gather_error(node, "has no explicit result, or its operands name rows and columns differently")
    rows, cols = letters.pop()
    if any((rows in term or cols in term) and not b.is_tiled(ref) for term, ref in operands):
        raise make_gather_error(node, "multiplies rows or columns with what is no image")
    if rows in out and cols in out:
        apply_locally(b, node, (out.index(rows) - len(out), out.index(cols) - len(out)))
    elif rows in out or cols in out:
        raise make_gather_error(node, "sums over one spatial axis of two")
    else:
        part = apply_locally(b, replace(node, name=f"{node.name}.part"), None)
        b.add_local_op(node.name, "aten.alias.default", b.all_reduce(part), like=node.spec)


def _find_spatial_letters(b: Builder, operands: list[tuple[str, Ref]]) -> set[tuple[str, str]]:
    """Return the letters of rows and columns of each tiled operand; a repeated letter adds a pair of its own."""
    found = set()
    for term, ref in operands:
        if b.is_tiled(ref):
            rows, cols, _ = get_spatial_axes(b, ref)
            found.add((term[rows], term[cols]))
            if term.count(term[rows]) > 1 or term.count(term[cols]) > 1:
                found.add(("", ""))
    return found
