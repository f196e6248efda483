"""Aggregation rules of arithmetic operators: sums, means, products and losses. A rule returns None for unknown."""

from __future__ import annotations

from dataclasses import replace

from engines.layer.graph import Node, Ref
from engines.loss.analysis import CLASS_LOSSES, LossAnalysis, aggregates
from engines.loss.batch_aggregation import (
    CONSTANT,
    AggregationKind,
    BatchAggregation,
    compute_reduced_axis,
    normalise_dims,
)

__all__ = ["SUM"]

NONE, MEAN, SUM = 0, 1, 2  # ATen's `reduction`


@aggregates("*")
def propagate_pointwise(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of any pointwise function."""
    shares = {name: a.resolve_total(name) for name in node.reads}
    if not all(each.is_plain for each in shares.values()) or not a.has_constant_arguments(node):
        return None
    made = CONSTANT.combine(*shares.values())
    if all(each.kind is AggregationKind.SAME for each in shares.values()):
        return made
    axis = a.find_aligned_axis(node, shares)
    return None if axis is None else made.combine(kind=AggregationKind.ROWS, axis=axis)


@aggregates(
    *("neg", "negative", "to", "type_as", "_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh_copy")
)
def propagate_linear(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a change of sign or dtype; a conversion from floats to integers is pointwise only."""
    # Rounding is not linear: trunc(x) + trunc(y) is not trunc(x + y).
    found, before = a.get_aggregation(node.reads[0]), a.graph.specs.get(node.reads[0])
    rounds = node.spec and before and before.is_floating and not node.spec.is_floating
    return propagate_pointwise(a, node) if rounds else found


@aggregates("mul", "multiply", "div", "divide", "true_divide")
def propagate_product(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a product or quotient: degrees add up or are subtracted; one operand may be a sum."""
    divides = node.operator.removeprefix("aten.").startswith(("div", "true_divide"))
    if node.arguments.get("rounding_mode"):
        return propagate_pointwise(a, node)
    one, two = a.get_operand_aggregation(node, "self"), a.get_operand_aggregation(node, "other")
    if one is None or two is None:
        return None
    # labels.sum() * x.sum():    linear in x if the first is the total of all micro-batches, which is known before
    # x.sum() / labels.sum():    likewise
    # w * x.sum():               linear as it is
    # x.sum() * z.sum():         unknown: neither sum is known before
    one, two = _resolve_factors(a, node, one, two, divides)
    # sum_i(x_i) * c = sum_i(x_i * c) holds only for a factor c that is the same for all micro-batches.
    if AggregationKind.SUM in (one.kind, two.kind) and (one.kind, two.kind).count(AggregationKind.SAME) != 1:
        return None
    if divides and two.kind is AggregationKind.SUM:
        return None
    degree = one.degree - two.degree if divides else one.degree + two.degree
    main = one if two.kind is AggregationKind.SAME else two
    made = main.combine(one, two, degree=degree)
    first, second = node.arguments["self"], node.arguments["other"]
    if divides and two.derived:  # "?" stands for a denominator that is computed from totals, but is not one itself
        is_total = isinstance(second, Ref) and second.name in a.totals | a.wanted
        made = replace(made, over=one.over | {second.name if is_total else "?"})
    if made.kind is not AggregationKind.ROWS:
        return made
    operands = {ref.name: share for ref, share in ((first, one), (second, two)) if isinstance(ref, Ref)}
    axis = a.find_aligned_axis(node, operands)
    return None if axis is None else replace(made, axis=axis)


def _resolve_factors(
    a: LossAnalysis, node: Node, one: BatchAggregation, two: BatchAggregation, divides: bool
) -> tuple[BatchAggregation, BatchAggregation]:
    """Replace known sums by their totals where linearity does not cover them.

    A denominator is always replaced. A factor is replaced unless the other one is a constant.
    """

    def resolve_operand(argument: str, own: BatchAggregation) -> BatchAggregation:
        ref = node.arguments[argument]
        return a.resolve_total(ref.name) if isinstance(ref, Ref) else own

    if divides:
        two = resolve_operand("other", two)
    if two.kind is not AggregationKind.SAME or two.derived:
        one = resolve_operand("self", one)
    if one.kind is not AggregationKind.SAME or one.derived:
        two = resolve_operand("other", two)
    return one, two


@aggregates("add", "sub", "subtract", "rsub")
def propagate_addition(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a sum or difference; sums over the batch may be added to means over it."""
    one, two = a.get_operand_aggregation(node, "self"), a.get_operand_aggregation(node, "other")
    if one is None or two is None or a.get_number_aggregation(node, "alpha") != CONSTANT:
        return None
    kinds = {one.kind, two.kind}
    if AggregationKind.ROWS in kinds or (kinds == {AggregationKind.SAME}):
        return propagate_pointwise(a, node) if one.degree == two.degree == 0 or AggregationKind.SUM in kinds else None
    # A value that is the same for all M micro-batches is the sum of them, divided by M once more.
    one, two = (
        replace(each, kind=AggregationKind.SUM, degree=each.degree + 1) if each.kind is AggregationKind.SAME else each
        for each in (one, two)
    )
    if one.degree == two.degree:
        return one.combine(two)
    if one.known and two.known:
        return propagate_pointwise(a, node)
    # A sum (degree 0) and a mean (degree 1). The rewritten graph multiplies the sum by M, which makes it a mean, too:
    # sum_i(x_i) + sum_i(y_i) / M = sum_i(M * x_i + y_i) / M.
    for argument, each in (("self", one), ("other", two)):
        ref = node.arguments[argument]
        if each.degree not in (0, 1) or (each.degree == 0 and not isinstance(ref, Ref)):
            return None
        if each.degree == 0:
            a.scaled.add((node.name, ref.name))
    return one.combine(two, degree=1)


@aggregates("sum", "mean")
def propagate_reduction(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a sum or mean, over the batch or over other dimensions."""
    ref, mean = node.arguments["self"], ".mean." in node.operator
    found, spec = a.get_aggregation(ref.name), a.get_spec(ref)
    if found.kind is not AggregationKind.ROWS:
        return found
    count = len(spec.shape)
    dims = normalise_dims(node.arguments.get("dim"), count) or tuple(range(count))
    if found.axis not in dims:
        keepdim = bool(node.arguments.get("keepdim"))
        return replace(found, axis=compute_reduced_axis(found.axis, dims, keepdim))
    over = found.over | ({""} if mean else set())
    return replace(found, kind=AggregationKind.SUM, degree=found.degree + mean, axis=0, over=over)


@aggregates(*CLASS_LOSSES)
def propagate_class_loss(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a cross-entropy or NLL loss.

    The denominator of a mean over class numbers depends on the labels: the node is added to `ratios`.
    """
    given = node.arguments
    scores, labels = a.get_aggregation(given["self"].name), a.resolve_total(given["target"].name)
    weight = a.resolve_total(given["weight"].name) if isinstance(given["weight"], Ref) else CONSTANT
    rows = all(each.kind is AggregationKind.ROWS and each.axis == 0 and each.degree == 0 for each in (scores, labels))
    if not rows or weight.kind is not AggregationKind.SAME or weight.degree:
        return None
    made = scores.combine(labels, weight)
    if given["reduction"] == NONE:
        return made
    if given["reduction"] == SUM:
        return replace(made, kind=AggregationKind.SUM)
    if a.get_spec(given["target"]).is_floating:  # class probabilities: a mean over the images' pixels
        return replace(made, kind=AggregationKind.SUM, degree=1, over=frozenset({""}))
    if not (labels.known and weight.known):
        return None
    a.ratios.add(node.name)
    key = repr([given["target"], given["weight"], given["ignore_index"]])
    return replace(made, kind=AggregationKind.SUM, degree=1, known=False, over=frozenset({key}))


@aggregates(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss"),
)
def propagate_element_loss(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of an element-wise loss, whose mean divides by the number of elements."""
    shares = {name: a.resolve_total(name) for name in node.reads}
    if not all(each.is_plain for each in shares.values()) or a.find_axis_from_end(shares) is None:
        return None
    made, reduction = CONSTANT.combine(*shares.values()), node.arguments["reduction"]
    if reduction == NONE:
        axis = a.find_aligned_axis(node, shares)
        return None if axis is None else replace(made, kind=AggregationKind.ROWS, axis=axis)
    over = frozenset({""}) if reduction == MEAN else frozenset()
    return replace(made, kind=AggregationKind.SUM, degree=int(reduction == MEAN), over=made.over | over)
