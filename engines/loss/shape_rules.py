"""Aggregation rules of operators that reshape values or process each image separately. None: the result is unknown."""

from __future__ import annotations

from dataclasses import replace

from engines.layer.graph import Node, Ref, find_ref_names
from engines.loss.analysis import LossAnalysis, aggregates
from engines.loss.batch_aggregation import (
    CONSTANT,
    AggregationKind,
    BatchAggregation,
    is_batch_axis_kept,
    normalise_dims,
)

__all__: list[str] = []


@aggregates("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def propagate_view(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a view: images stay separate if the element count before their axis is unchanged."""
    ref = node.arguments["self"]
    found = a.get_aggregation(ref.name)
    if found.kind is not AggregationKind.ROWS:
        return found
    axis = a.find_node_axis(node)
    kept = axis is not None and node.spec and is_batch_axis_kept(a.get_spec(ref), found.axis, node.spec, axis)
    return replace(found, axis=axis) if kept else None


@aggregates("permute", "transpose", "movedim", "swapaxes", "t", "numpy_T", "select", "slice", "narrow")
def propagate_permute(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a permutation of dimensions, or of a slice along a dimension other than the batch's."""
    ref = node.arguments["self"]
    found = a.get_aggregation(ref.name)
    if found.kind is not AggregationKind.ROWS:
        return found if a.is_batch_independent(node) else None
    # A slice that takes all images, as x[:], keeps the shape.
    axis, dim, before = a.find_node_axis(node), node.arguments.get("dim"), a.get_spec(ref)
    takes_images = isinstance(dim, int) and dim % len(before.shape) == found.axis and node.spec != before
    return None if axis is None or takes_images else replace(found, axis=axis)


@aggregates("expand", "expand_as", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
def propagate_expand(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a broadcast or fill whose output shape may contain the batch size."""
    ref = node.arguments.get("self")
    is_fill = not isinstance(ref, Ref) or node.operator.startswith("aten.new_")  # `new_zeros` takes only the type
    found = CONSTANT if is_fill else a.get_aggregation(ref.name)
    # A fill with the number of images, or with its inverse, is not the same in the whole batch.
    if a.get_number_aggregation(node, "fill_value") != CONSTANT:
        return None
    if found.kind is AggregationKind.SUM:
        return found if a.is_batch_independent(node) else None
    if node.name in a._twins and a._twins[node.name].spec == node.spec and found.kind is AggregationKind.SAME:
        return found
    axis = a.find_node_axis(node)
    return None if axis is None or found.degree else replace(found, kind=AggregationKind.ROWS, axis=axis)


@aggregates(
    *("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "logsumexp", "amax", "amin", "argmax"),
    *("argmin", "max", "min", "all", "any", "var", "std", "prod", "linalg_vector_norm", "norm", "sort", "topk"),
)
def propagate_along_dims(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of an operator along dimensions other than the batch's."""
    ref = node.arguments["self"]
    found = a.resolve_total(ref.name)
    if found.kind is AggregationKind.SAME:
        return found if found.degree == 0 else None
    given = node.arguments.get("dim")
    dims = normalise_dims(given, len(a.get_spec(ref).shape))
    if not found.is_plain or not dims or found.axis in dims or len(node.reads) != 1:
        return None
    if node.spec is None:
        return found
    axis = a.find_node_axis(node)
    return None if axis is None else replace(found, axis=axis)


@aggregates(
    *("one_hot", "gather", "scatter", "scatter_add", "embedding", "conv1d", "conv2d", "conv3d", "convolution"),
    *("avg_pool2d", "avg_pool3d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d", "upsample_nearest2d"),
    *("upsample_bilinear2d", "constant_pad_nd", "pad", "linear", "bmm"),
)
def propagate_per_image(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of an operator that processes each entry of the first dimension, the batch, separately."""
    shares = [a.resolve_total(name) for name in node.reads]
    if not all(each.is_plain and each.axis == 0 for each in shares):
        return None
    rows = [each for each in shares if each.kind is AggregationKind.ROWS]
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
    if not all(each.is_plain for each in (table, *shares)) or table.kind is not AggregationKind.SAME:
        return None
    made, axis = table.combine(*shares), a.find_node_axis(node)
    if all(each.kind is AggregationKind.SAME for each in shares):
        return made
    return None if axis is None or len(shares) != 1 else replace(made, kind=AggregationKind.ROWS, axis=axis)


@aggregates("stack", "cat")
def propagate_concat(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a concatenation or stack along a dimension other than the batch's."""
    found = [a.get_aggregation(name) for name in node.reads]
    # Joined values must aggregate alike: rows with rows of the same axis, sums with sums of the same degree.
    first = found[0]
    if any((each.kind, each.degree, each.axis) != (first.kind, first.degree, first.axis) for each in found):
        return None
    made = first.combine(*found)
    if first.kind is not AggregationKind.ROWS:
        return made
    axis = a.find_node_axis(node)
    along = node.arguments.get("dim")
    count = len(node.spec.shape) if node.spec else 0
    if axis is None or not isinstance(along, int) or along % count == axis:
        return None
    return replace(made, axis=axis)


@aggregates("split", "split_with_sizes", "chunk", "unbind")
def propagate_split(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of a split into several tensors, each of which `getitem` reads."""
    ref = node.arguments["self"]
    found, dim = a.get_aggregation(ref.name), node.arguments.get("dim", 0)
    apart = found.kind is not AggregationKind.ROWS or dim % len(a.get_spec(ref).shape) != found.axis
    return found if apart else None


@aggregates("getitem")
def propagate_getitem(a: LossAnalysis, node: Node) -> BatchAggregation | None:
    """Return the aggregation of one of several outputs."""
    found = a.get_aggregation(node.reads[0])
    if found.kind is not AggregationKind.ROWS:
        return found
    axis = a.find_node_axis(node)
    return None if axis is None else replace(found, axis=axis)
