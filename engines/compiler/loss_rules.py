"""Aggregation rules of the operators of a loss: views, what keeps images apart, sums, products, class losses.

A rule returns None if the result is unknown.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from mpi4dl_nb.engines.compiler.loss_analysis import (
    CLASS_LOSSES,
    CONSTANT,
    AggregationKind,
    BatchAggregation,
    LossAnalysis,
    aggregates,
    make_denominator_key,
    make_rows,
    normalise_dims,
)
from mpi4dl_nb.engines.graph.model_graph import Node, Ref, find_ref_names


@aggregates("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def propagate_view(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a view: images stay separate if the element count before their axis is unchanged."""
    ref = node.arguments["self"]
    share = a.get_aggregation(ref.name)
    if share.kind is not AggregationKind.ROWS:
        return share
    axis = a.find_node_axis(node)
    if axis is None or node.spec is None:
        return None
    # (T, N, C) as (T * N, C): the new axis holds the images T times. Losses take no such rows.
    before, kept = share.outer * prod(a.get_spec(ref).shape[: share.axis]), prod(node.spec.shape[:axis])
    outer = before // kept
    whole = before == outer * kept and node.spec.shape[axis] % outer == 0
    return replace(share, axis=axis, outer=outer) if whole and (outer == 1 or a.of_model) else None


@aggregates("permute", "transpose", "movedim", "swapaxes", "t", "numpy_T", "select", "slice", "narrow")
def propagate_permute(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a permutation of dimensions, or of a slice along a dimension other than the batch's."""
    ref = node.arguments["self"]
    share = a.get_aggregation(ref.name)
    if share.kind is not AggregationKind.ROWS:
        return share if a.is_batch_independent(node) else None
    # A slice that takes all images, as x[:], keeps the shape.
    dim, before = node.arguments.get("dim"), a.get_spec(ref)
    takes_images = isinstance(dim, int) and dim % len(before.shape) == share.axis and node.spec != before
    return None if takes_images else make_rows(share, a.find_node_axis(node))


@aggregates("expand", "expand_as", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
def propagate_expand(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a broadcast or fill whose output shape may contain the batch size."""
    ref = node.arguments.get("self")
    share = CONSTANT
    if isinstance(ref, Ref) and not node.operator.startswith("aten.new_"):  # `new_zeros` takes only the type
        share = a.get_aggregation(ref.name)
    # A fill with the number of images, or with its inverse, is not the same in the whole batch.
    if a.get_number_aggregation(node, "fill_value") != CONSTANT:
        return None
    if share.kind is AggregationKind.SUM:
        return share if a.is_batch_independent(node) else None
    if node.name in a.twins and a.twins[node.name].spec == node.spec and share.kind is AggregationKind.SAME:
        return share
    return None if share.degree else make_rows(share, a.find_node_axis(node))


@aggregates(
    *("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logsumexp", "amax", "amin", "argmax"),
    *("argmin", "max", "min", "all", "any", "var", "std", "prod", "linalg_vector_norm", "norm", "sort", "topk"),
)
def propagate_along_dims(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of an operator along dimensions other than the batch's."""
    ref = node.arguments["self"]
    share = a.resolve_total(ref.name)
    if not share.is_plain or len(node.reads) != 1:
        return None
    if share.kind is AggregationKind.SAME:
        return share
    dims = normalise_dims(node.arguments.get("dim"), len(a.get_spec(ref).shape))
    if not dims or share.axis in dims:
        return None
    return share if node.spec is None else make_rows(share, a.find_node_axis(node))


@aggregates(
    *("one_hot", "gather", "scatter", "scatter_add", "embedding", "conv1d", "conv2d", "conv3d", "convolution"),
    *("avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d", "upsample_nearest2d"),
    *("upsample_bilinear2d", "constant_pad_nd", "pad", "linear", "bmm"),
)
def propagate_per_image(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of an operator that processes each entry of the first dimension, the batch, separately."""
    shares = [a.resolve_total(name) for name in node.reads]
    if not all(share.is_plain and share.axis == 0 for share in shares):
        return None
    rows = [share for share in shares if share.kind is AggregationKind.ROWS]
    dims = normalise_dims(node.arguments.get("dim"), len(a.graph.specs[node.reads[0]].shape))
    if not rows:
        return CONSTANT.combine(*shares)
    if 0 in dims or a.find_node_axis(node) != 0:
        return None
    return rows[0].combine(*shares)


@aggregates("index")
def propagate_index(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of indexing a constant, such as class weights, with per-image indices."""
    table, indices = a.resolve_total(node.arguments["self"].name), node.arguments["indices"]
    shares = [a.resolve_total(name) for name in find_ref_names(indices)]
    if not all(share.is_plain for share in (table, *shares)) or table.kind is not AggregationKind.SAME:
        return None
    combined = table.combine(*shares)
    if all(share.kind is AggregationKind.SAME for share in shares):
        return combined
    return make_rows(combined, a.find_node_axis(node)) if len(shares) == 1 else None


@aggregates("stack", "cat")
def propagate_concat(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a concatenation or stack along a dimension other than the batch's."""
    shares = [a.get_aggregation(name) for name in node.reads]
    # Joined values must aggregate alike: rows with rows of the same axis, sums with sums of the same degree.
    first = shares[0]
    if any((share.kind, share.degree, share.axis) != (first.kind, first.degree, first.axis) for share in shares):
        return None
    combined = first.combine(*shares)
    if first.kind is not AggregationKind.ROWS:
        return combined
    axis, along = a.find_node_axis(node), node.arguments.get("dim")
    count = len(node.spec.shape) if node.spec else 0
    return make_rows(combined, axis) if axis is not None and isinstance(along, int) and along % count != axis else None


@aggregates("split", "split_with_sizes", "chunk", "unbind")
def propagate_split(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a split into several tensors, each of which `getitem` reads."""
    ref = node.arguments["self"]
    share, dim = a.get_aggregation(ref.name), node.arguments.get("dim", 0)
    separate = share.kind is not AggregationKind.ROWS or dim % len(a.get_spec(ref).shape) != share.axis
    return share if separate else None


@aggregates("getitem")
def propagate_getitem(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of one of several outputs."""
    share = a.get_aggregation(node.reads[0])
    return make_rows(share, a.find_node_axis(node)) if share.kind is AggregationKind.ROWS else share


@aggregates("broadcast_tensors")
def propagate_broadcast(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of tensors of one shape, each of which `getitem` reads."""
    shares = {name: a.resolve_total(name) for name in node.reads}
    combined = CONSTANT.combine(*shares.values())
    if all(share.kind is AggregationKind.SAME and share.degree == 0 for share in shares.values()):
        return combined
    aligned = all(share.is_plain for share in shares.values()) and a.find_axis_from_end(shares) is not None
    return make_rows(combined, 0) if aligned else None  # `getitem` finds the axis


# Arithmetic operators: sums, means, products and losses.


NONE, MEAN, SUM = 0, 1, 2  # ATen's `reduction`


@aggregates("*", "max.other", "min.other", "view.dtype")
def propagate_pointwise(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of any pointwise function; a reduction of that name has a rule of its own."""
    shares = {name: a.resolve_total(name) for name in node.reads}
    if not all(share.is_plain for share in shares.values()) or not a.has_constant_arguments(node):
        return None
    combined = CONSTANT.combine(*shares.values())
    if all(share.kind is AggregationKind.SAME for share in shares.values()):
        return combined
    return make_rows(combined, a.find_aligned_axis(node, shares))


@aggregates(
    *("neg", "negative", "to", "type_as", "_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh_copy")
)
def propagate_linear(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a change of sign or dtype; a conversion that loses digits is pointwise only."""
    return propagate_pointwise(a, node) if _loses_digits(a, node) else a.get_aggregation(node.reads[0])


def _loses_digits(a: LossAnalysis, node: Node) -> bool:
    """Return whether a node rounds its input, or converts it to a type that its sums may not fit into.

    No such conversion is linear: trunc(x) + trunc(y) is not trunc(x + y), nor is bool(x + y) the sum of two bools.
    """
    before = a.graph.specs.get(node.reads[0])
    if before is None or node.spec is None or node.spec.is_floating:
        return False
    return before.is_floating or node.spec.item_bytes < before.item_bytes or node.spec.dtype == "bool" != before.dtype


@aggregates("mul", "multiply", "div", "divide", "true_divide")
def propagate_product(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a product or quotient: degrees add up or are subtracted; one operand may be a sum."""
    divides = node.short_operator.startswith(("div", "true_divide"))
    if node.arguments.get("rounding_mode"):
        return propagate_pointwise(a, node)
    left, right = a.get_operand_aggregation(node, "self"), a.get_operand_aggregation(node, "other")
    if left is None or right is None:
        return None
    # labels.sum() * x.sum():    linear in x if the first is the total of all micro-batches, which is known before
    # x.sum() / labels.sum():    likewise
    # w * x.sum():               linear as it is
    # x.sum() * z.sum():         unknown: neither sum is known before
    left, right = _resolve_factors(a, node, left, right, divides)
    # sum_i(x_i) * c = sum_i(x_i * c) holds only for a factor c that is the same for all micro-batches.
    if AggregationKind.SUM in (left.kind, right.kind) and (left.kind, right.kind).count(AggregationKind.SAME) != 1:
        return None
    if divides and right.kind is AggregationKind.SUM:
        return None
    degree = left.degree - right.degree if divides else left.degree + right.degree
    main = left if right.kind is AggregationKind.SAME else right
    combined = main.combine(left, right, degree=degree)
    first, second = node.arguments["self"], node.arguments["other"]
    if divides and right.derived:  # "?" stands for a denominator that is computed from totals, but is not one itself
        is_total = isinstance(second, Ref) and second.name in a.totals | a.wanted
        combined = replace(combined, over=left.over | {second.name if is_total else "?"})
    if combined.kind is not AggregationKind.ROWS:
        return combined
    operands = {ref.name: share for ref, share in ((first, left), (second, right)) if isinstance(ref, Ref)}
    return make_rows(combined, a.find_aligned_axis(node, operands))


def _resolve_factors(
    a: LossAnalysis, node: Node, left: BatchAggregation, right: BatchAggregation, divides: bool
) -> tuple[BatchAggregation, BatchAggregation]:
    """Replace known sums by their totals where linearity does not cover them.

    A denominator is always replaced. A factor is replaced unless the other one is a constant.
    """

    def resolve_operand(argument: str, aggregation: BatchAggregation) -> BatchAggregation:
        ref = node.arguments[argument]
        return a.resolve_total(ref.name) if isinstance(ref, Ref) else aggregation

    if divides:
        right = resolve_operand("other", right)
    if right.kind is not AggregationKind.SAME or right.derived:
        left = resolve_operand("self", left)
    if left.kind is not AggregationKind.SAME or left.derived:
        right = resolve_operand("other", right)
    return left, right


@aggregates("add", "sub", "subtract", "rsub")
def propagate_addition(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a sum or difference; sums over the batch may be added to means over it."""
    left, right = a.get_operand_aggregation(node, "self"), a.get_operand_aggregation(node, "other")
    if left is None or right is None or a.get_number_aggregation(node, "alpha") != CONSTANT:
        return None
    kinds = {left.kind, right.kind}
    if AggregationKind.ROWS in kinds or (kinds == {AggregationKind.SAME}):
        return (
            propagate_pointwise(a, node) if left.degree == right.degree == 0 or AggregationKind.SUM in kinds else None
        )
    # A value that is the same for all M micro-batches is the sum of them, divided by M once more.
    left, right = (
        replace(share, kind=AggregationKind.SUM, degree=share.degree + 1)
        if share.kind is AggregationKind.SAME
        else share
        for share in (left, right)
    )
    if left.degree == right.degree:
        return left.combine(right)
    if left.known and right.known:
        return propagate_pointwise(a, node)
    # A sum (degree 0) and a mean (degree 1). The rewritten graph multiplies the sum by M, which makes it a mean, too:
    # sum_i(x_i) + sum_i(y_i) / M = sum_i(M * x_i + y_i) / M.
    for argument, share in (("self", left), ("other", right)):
        ref = node.arguments[argument]
        if share.degree not in (0, 1) or (share.degree == 0 and not isinstance(ref, Ref)):
            return None
        if share.degree == 0:
            a.scaled.add((node.name, ref.name))
    return left.combine(right, degree=1)


@aggregates("sum", "mean")
def propagate_reduction(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a sum or mean, over the batch or over other dimensions."""
    ref, mean = node.arguments["self"], ".mean." in node.operator
    share, spec = a.get_aggregation(ref.name), a.get_spec(ref)
    if _loses_digits(a, node):  # dtype=
        return None
    if share.kind is not AggregationKind.ROWS:
        return share
    count = len(spec.shape)
    dims = normalise_dims(node.arguments.get("dim"), count) or tuple(range(count))
    if share.axis not in dims:
        gone = 0 if node.arguments.get("keepdim") else sum(dim < share.axis for dim in dims)
        return replace(share, axis=share.axis - gone)
    over = share.over | ({""} if mean else set())
    return replace(share, kind=AggregationKind.SUM, degree=share.degree + mean, axis=0, over=over)


@aggregates(*CLASS_LOSSES)
def propagate_class_loss(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a cross-entropy or NLL loss.

    The denominator of a mean over class numbers depends on the labels: the node is added to `ratios`.
    """
    arguments = node.arguments
    if len(a.get_spec(arguments["self"]).shape) < 2:  # the classes of a single image
        return None
    scores, labels = a.get_aggregation(arguments["self"].name), a.resolve_total(arguments["target"].name)
    weight = a.resolve_total(arguments["weight"].name) if isinstance(arguments["weight"], Ref) else CONSTANT
    rows = all(
        share.kind is AggregationKind.ROWS and share.axis == 0 and share.degree == 0 for share in (scores, labels)
    )
    if not rows or weight.kind is not AggregationKind.SAME or weight.degree:
        return None
    combined = scores.combine(labels, weight)
    if arguments["reduction"] == NONE:
        return combined
    if arguments["reduction"] == SUM:
        return replace(combined, kind=AggregationKind.SUM)
    if a.get_spec(arguments["target"]).is_floating:  # class probabilities: a mean over the images' pixels
        return replace(combined, kind=AggregationKind.SUM, degree=1, over=frozenset({""}))
    if not (labels.known and weight.known):
        return None
    a.ratios.add(node.name)
    over = frozenset({make_denominator_key(node)})
    return replace(combined, kind=AggregationKind.SUM, degree=1, known=False, over=over)


@aggregates(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "hinge_embedding_loss", "margin_ranking_loss"),
)
def propagate_element_loss(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of an element-wise loss, whose mean divides by the number of elements."""
    shares = {name: a.resolve_total(name) for name in node.reads}
    if not all(share.is_plain for share in shares.values()) or a.find_axis_from_end(shares) is None:
        return None
    combined, reduction = CONSTANT.combine(*shares.values()), node.arguments["reduction"]
    if reduction == NONE:
        return make_rows(combined, a.find_aligned_axis(node, shares))
    over = frozenset({""}) if reduction == MEAN else frozenset()
    return replace(combined, kind=AggregationKind.SUM, degree=int(reduction == MEAN), over=combined.over | over)


@aggregates(
    *("multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss", "triplet_margin_loss"),
    *("pairwise_distance", "cosine_similarity"),
)
def propagate_row_loss(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a loss or distance that reduces a dimension after the batch, and then means over all.

    One-dimensional scores are the classes of a single image for PyTorch.
    """
    shares = {name: a.resolve_total(name) for name in node.reads}
    weight = node.arguments.get("weight")
    weights = {weight.name} if isinstance(weight, Ref) else set()
    combined, rows = CONSTANT.combine(*shares.values()), [name for name in shares if name not in weights]
    if any(shares[name].kind is not AggregationKind.SAME or shares[name].degree for name in weights):
        return None
    if any(shares[name].kind is not AggregationKind.ROWS or shares[name].axis or shares[name].degree for name in rows):
        return None
    # All have the same number of dimensions but class numbers and signs, of which there is one for each image.
    counts = {len(a.graph.specs[name].shape) for name in rows}
    first = len(a.graph.specs[node.reads[0]].shape)
    takes_images = node.arguments.get("dim", -1) % first == 0  # also where the dimension is the only one
    if takes_images or counts not in ({first}, {first, 1}):
        return None
    reduction = node.arguments.get("reduction", NONE)
    if reduction == NONE:
        return make_rows(combined, a.find_node_axis(node))
    over = frozenset({""}) if reduction == MEAN else frozenset()
    return replace(combined, kind=AggregationKind.SUM, degree=int(reduction == MEAN), over=combined.over | over)
