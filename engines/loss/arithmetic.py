"""Rules of arithmetic on the shares of a batch: sums, means, products and losses. None: the result is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engines.layer.graph import Node, Ref
from engines.loss.analysis import CLASS_LOSSES, Analysis
from engines.loss.shares import CONSTANT, Kind, Share, dims_of, reduced_axis

__all__ = ["RULES", "SUM"]

NONE, MEAN, SUM = 0, 1, 2  # ATen's `reduction`

_ELEMENT_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss",
    "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss",
)  # fmt: skip
_LINEAR = ("neg", "negative", "to", "type_as", "_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh_copy")


def _pointwise(a: Analysis, node: Node) -> Share | None:
    """Any function of each element by itself."""
    shares = {name: a.settled(name) for name in node.reads}
    if not all(each.is_plain for each in shares.values()) or not a.numbers_agree(node):
        return None
    made = CONSTANT.made(*shares.values())
    if all(each.kind is Kind.SAME for each in shares.values()):
        return made
    axis = a.aligned(node, shares)
    return None if axis is None else made.made(kind=Kind.ROWS, axis=axis)


def _linear(a: Analysis, node: Node) -> Share | None:
    """What changes the sign or the type, but not into whole numbers."""
    found, before = a.share(node.reads[0]), a.graph.specs.get(node.reads[0])
    rounds = node.spec and before and before.is_floating and not node.spec.is_floating
    return _pointwise(a, node) if rounds else found


def _product(a: Analysis, node: Node) -> Share | None:
    """A product or a quotient: degrees add up or are taken away, and only one operand may be a sum."""
    divides = node.operator.removeprefix("aten.").startswith(("div", "true_divide"))
    if node.arguments.get("rounding_mode"):
        return _pointwise(a, node)
    one, two = a.operand(node, "self"), a.operand(node, "other")
    if one is None or two is None:
        return None
    one, two = _factors(a, node, one, two, divides)
    if Kind.SUM in (one.kind, two.kind) and (one.kind, two.kind).count(Kind.SAME) != 1:
        return None
    if divides and two.kind is Kind.SUM:
        return None
    degree = one.degree - two.degree if divides else one.degree + two.degree
    main = one if two.kind is Kind.SAME else two
    made = main.made(one, two, degree=degree)
    if divides and two.derived:
        made = replace(made, over=one.over | {_denominator(a, node)})
    if made.kind is not Kind.ROWS:
        return made
    named = {ref.name: s for ref, s in ((node.arguments[each], s) for each, s in (("self", one), ("other", two)))
             if isinstance(ref, Ref)}  # fmt: skip
    axis = a.aligned(node, named)
    return None if axis is None else replace(made, axis=axis)


def _factors(a: Analysis, node: Node, one: Share, two: Share, divides: bool) -> tuple[Share, Share]:
    """Of a known sum its total, where what it is combined with is no mere number."""

    def total(argument: str, own: Share) -> Share:
        ref = node.arguments[argument]
        return a.settled(ref.name) if isinstance(ref, Ref) else own

    if divides:
        two = total("other", two)
    if two.kind is not Kind.SAME or two.derived:
        one = total("self", one)
    if one.kind is not Kind.SAME or one.derived:
        two = total("other", two)
    return one, two


def _denominator(a: Analysis, node: Node) -> str:
    """The total that a quotient divides by, "?" where it is not a total itself."""
    ref = node.arguments["other"]
    return ref.name if isinstance(ref, Ref) and (ref.name in a.totals or ref.name in a.wanted) else "?"


def _added(a: Analysis, node: Node) -> Share | None:
    """A sum or a difference of two operands of the same kind; sums over the batch may join means of it."""
    one, two = a.operand(node, "self"), a.operand(node, "other")
    if one is None or two is None or a.number(node, "alpha") != CONSTANT:
        return None
    kinds = {one.kind, two.kind}
    if Kind.ROWS in kinds or (kinds == {Kind.SAME}):
        return _pointwise(a, node) if one.degree == two.degree == 0 or Kind.SUM in kinds else None
    one, two = _as_sum(one), _as_sum(two)
    if one.degree == two.degree:
        return one.made(two)
    if one.known and two.known:
        return _pointwise(a, node)
    return _joined(a, node, {"self": one, "other": two})


def _joined(a: Analysis, node: Node, operands: Mapping[str, Share]) -> Share | None:
    """Sums, means and constants become one mean over the micro-batches."""
    for argument, each in operands.items():
        ref = node.arguments[argument]
        if each.degree not in (0, 1) or (each.degree == 0 and not isinstance(ref, Ref)):
            return None
        if each.degree == 0:
            a.scaled.add((node.name, ref.name))
    one, two = operands.values()
    return one.made(two, degree=1)


def _reduced(a: Analysis, node: Node) -> Share | None:
    """A sum or a mean, over the batch or over other dimensions."""
    ref, mean = node.arguments["self"], ".mean." in node.operator
    found, spec = a.share(ref.name), a.spec(ref)
    if found.kind is not Kind.ROWS:
        return found
    count = len(spec.shape)
    dims = dims_of(node.arguments.get("dim"), count) or tuple(range(count))
    if found.axis not in dims:
        keepdim = bool(node.arguments.get("keepdim"))
        return replace(found, axis=reduced_axis(found.axis, dims, keepdim))
    over = found.over | ({""} if mean else set())
    return replace(found, kind=Kind.SUM, degree=found.degree + mean, axis=0, over=over)


def _class_loss(a: Analysis, node: Node) -> Share | None:
    """Cross-entropy or its second half; of a mean over class numbers the labels decide what it divides by."""
    given = node.arguments
    scores, labels = a.share(given["self"].name), a.settled(given["target"].name)
    weight = a.settled(given["weight"].name) if isinstance(given["weight"], Ref) else CONSTANT
    rows = all(each.kind is Kind.ROWS and each.axis == 0 and each.degree == 0 for each in (scores, labels))
    if not rows or weight.kind is not Kind.SAME or weight.degree:
        return None
    made = scores.made(labels, weight)
    if given["reduction"] == NONE:
        return made
    if given["reduction"] == SUM:
        return replace(made, kind=Kind.SUM)
    if a.spec(given["target"]).is_floating:
        return replace(made, kind=Kind.SUM, degree=1, over=frozenset({""}))
    if not (labels.known and weight.known):
        return None
    a.ratios.add(node.name)
    key = repr([given["target"], given["weight"], given["ignore_index"]])
    return replace(made, kind=Kind.SUM, degree=1, known=False, over=frozenset({key}))


def _element_loss(a: Analysis, node: Node) -> Share | None:
    """A loss of each element, of which a mean divides by their number."""
    shares = {name: a.settled(name) for name in node.reads}
    if not all(each.is_plain for each in shares.values()):
        return None
    if a.end(shares) is None:
        return None
    made, reduction = CONSTANT.made(*shares.values()), node.arguments["reduction"]
    if reduction == NONE:
        axis = a.aligned(node, shares)
        return None if axis is None else replace(made, kind=Kind.ROWS, axis=axis)
    over = frozenset({""}) if reduction == MEAN else frozenset()
    return replace(made, kind=Kind.SUM, degree=int(reduction == MEAN), over=made.over | over)


def _as_sum(share: Share) -> Share:
    """What is the same for all M micro-batches is the sum over them, divided by M once more."""
    return replace(share, kind=Kind.SUM, degree=share.degree + 1) if share.kind is Kind.SAME else share


RULES = {
    "*": _pointwise,
    **dict.fromkeys(CLASS_LOSSES, _class_loss),
    **dict.fromkeys(_ELEMENT_LOSSES, _element_loss),
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide"), _product),
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), _added),
    **dict.fromkeys(_LINEAR, _linear),
}
