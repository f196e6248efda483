"""Where a model computes with several images at once: its outputs for a micro-batch are then not those for the batch.

Mixup by `flip(0)`, a standard deviation or a softmax over the batch, the subtraction of its mean, a division by its
size. Batch norm is the known exception, which normalises each micro-batch by itself, as in GPipe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from mpi4dl_nb.engines.compiler.each_image import FILLS, SHAPED, describe_image_axis
from mpi4dl_nb.engines.compiler.loss_analysis import (
    CONSTANT,
    AggregationKind,
    BatchAggregation,
    LossAnalysis,
    make_rows,
)
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref
from mpi4dl_nb.engines.program.rng import find_sample_number, uses_generator

_Rule = Callable[["ModelAnalysis", Node, Mapping[str, BatchAggregation]], BatchAggregation | None]


@dataclass
class ModelAnalysis(LossAnalysis):
    """The aggregation of every value of the model itself, by the rules for losses and those for layers below.

    `norms` are the modules that are norms of PyTorch. `apart` is set if one process can compare with the model only
    micro-batch by micro-batch: it draws numbers for all images of a micro-batch together, or normalises without a
    module.
    """

    norms: Collection[str] = ()
    apart: bool = False
    of_model = True

    @cached_property
    def layers(self) -> Sequence[Node]:
        """The nodes that the model's outputs depend on, in order."""
        return _find_layers(self.graph)

    @cached_property
    def twins(self) -> Mapping[str, Node]:
        """The nodes of the model traced with twice as many images; empty if these are other operators."""
        theirs = _find_layers(self.double) if self.double else ()
        alike = [(node.name, node.operator) for node in self.layers] == [(node.name, node.operator) for node in theirs]
        return {node.name: node for node in theirs} if alike else {}

    def find_mixing(self) -> str:
        """Return where the model computes with several images at once; empty if it does not, as far as can be told."""
        if not self.twins:
            return "its operators, which are others for other numbers of images"
        # A norm that is called twice updates its statistics twice for one micro-batch, and only then for the next one.
        norms = [node.module for node in self.layers if node.operator == "aten.batch_norm.default"]
        self.apart |= len(set(norms)) < len(norms)
        for node in self.layers:
            self.aggregations[node.name] = aggregation = self._compute_layer(node)
            rows = aggregation.kind is AggregationKind.ROWS
            if aggregation.kind is AggregationKind.UNKNOWN or (rows and aggregation.degree):
                return f"{node.short_operator} in {node.where}"
        return ""

    def _compute_layer(self, node: Node) -> BatchAggregation:
        shares = {name: self.get_aggregation(name) for name in node.reads}
        rows = {share.outer for share in shares.values() if share.kind is AggregationKind.ROWS}
        if len(rows) > 1 or any(share.kind is AggregationKind.UNKNOWN for share in shares.values()):
            return BatchAggregation(AggregationKind.UNKNOWN)
        if node.operator == "aten.batch_norm.default" and node.arguments["training"]:
            self.apart |= node.module not in self.norms
        by_position = find_sample_number(self.graph, node) is not None
        if by_position or uses_generator(node):
            self.apart |= not by_position or self.find_node_axis(node) != 0
            if (aggregation := self._compute_draw(node, shares)) is not None:
                return aggregation
        aggregation = self.apply_rule(node)
        if aggregation.kind is not AggregationKind.UNKNOWN:
            return aggregation
        return _LAYERS.get(node.short_operator, propagate_layer)(self, node, shares) or aggregation

    def _compute_draw(self, node: Node, shares: Mapping[str, BatchAggregation]) -> BatchAggregation | None:
        """Return the aggregation of random numbers, or of values that are changed by them one by one; else None."""
        combined = CONSTANT.combine(*shares.values())
        if not shares:
            axis = self.find_node_axis(node)
            return make_rows(combined, axis) if axis is not None and node.short_operator in FILLS else None
        if not all(share.is_plain for share in shares.values()) or node.short_operator in _LAYERS:
            return None
        first = shares[node.reads[0]]  # dropout, bernoulli, noise like the values
        return replace(first, known=False) if node.spec == self.graph.specs.get(node.reads[0]) else None


def find_mixing(trace: Callable[[int], ModelGraph], images: int, norms: Collection[str] = ()) -> tuple[str, bool]:
    """Return where a model computes with several images at once ("" if nowhere), and whether it compares only apart.

    `trace(times)` traces it with so many times its `images` images.
    """
    analysis = ModelAnalysis(trace(1), partial(trace, 2), norms=norms)
    where = analysis.find_mixing()
    # A single image may be a special case, as for x.squeeze(): then two of them are asked as well, if the model takes
    # any other number than one.
    if where and images == 1 and analysis.double:
        analysis = ModelAnalysis(analysis.double, partial(trace, 4), norms=norms)
        where = analysis.find_mixing()
    return where, analysis.apart


def _find_layers(graph: ModelGraph) -> list[Node]:
    needed, layers = set(graph.answers), []
    for node in reversed(graph.nodes):
        if node.name in needed:
            layers.append(node)
            needed.update(node.reads)
    return layers[::-1]


def propagate_layer(a: ModelAnalysis, node: Node, shares: Mapping[str, BatchAggregation]) -> BatchAggregation | None:
    """Return the aggregation of an operator without a rule of its own.

    It computes each entry of the first axis by itself, unless an argument names that axis or depends on its size.
    """
    if not all(share.is_plain for share in shares.values()):
        return None
    combined = CONSTANT.combine(*shares.values())
    rows = [share for share in shares.values() if share.kind is AggregationKind.ROWS]
    if not rows:
        if a.is_batch_independent(node):
            return combined
        return (
            make_rows(combined, a.find_node_axis(node)) if node.short_operator in (*FILLS, "repeat", "tile") else None
        )
    combined = replace(combined, kind=AggregationKind.ROWS, outer=rows[0].outer)
    if any(share.axis for share in rows) or not _has_same_settings(a, node):
        return None
    if describe_image_axis(node, a.graph.specs, shares[node.reads[0]].kind is AggregationKind.ROWS):
        return None
    return combined if node.spec is None or a.find_node_axis(node) == 0 else None


def _has_same_settings(a: ModelAnalysis, node: Node) -> bool:
    """Return whether the arguments of a node do not depend on the number of images, but for the shape of its result."""
    if node.operator not in SHAPED and node.short_operator != "affine_grid_generator":
        return a.has_constant_arguments(node)
    mine, theirs = (
        {name: value for name, value in version.arguments.items() if name not in ("size", "shape", "sizes")}
        for version in (node, a.twins[node.name])
    )
    return repr(mine) == repr(theirs)


# Layers whose images need not lie along the first axis: attention with (sequence, images, channels), recurrent layers.


def _propagate_last_axes(
    a: ModelAnalysis, node: Node, shares: Mapping[str, BatchAggregation]
) -> BatchAggregation | None:
    """Return the aggregation of an operator on the last axes, that broadcasts the others: products, layer norm."""
    arguments = node.arguments
    name = node.short_operator
    last = {"linear": 1, "layer_norm": len(arguments.get("normalized_shape") or ())}.get(name, 2)
    last = len(arguments["normalized_shape"]) if name == "rms_norm" else last
    rows = {read: share for read, share in shares.items() if share.kind is AggregationKind.ROWS}
    if not rows or not all(share.is_plain for share in shares.values()) or not a.has_constant_arguments(node):
        return None
    ends = {share.axis - len(a.graph.specs[read].shape) for read, share in rows.items()}
    if len(ends) != 1:
        return None
    (end,) = ends
    # The rows of a first matrix, and the columns of a second one, stay separate, too.
    others = [ref.name for key, ref in arguments.items() if isinstance(ref, Ref) and key in ("other", "mat2")]
    alone = name in ("matmul", "mm") and len(rows) == 1
    kept = end < -last or (alone and end == (-1 if others and others[0] in rows else -2))
    combined = CONSTANT.combine(*shares.values())
    return make_rows(replace(combined, outer=next(iter(rows.values())).outer), a.find_node_axis(node)) if kept else None


def _propagate_recurrent(
    a: ModelAnalysis, node: Node, shares: Mapping[str, BatchAggregation]
) -> BatchAggregation | None:
    """Return the aggregation of an LSTM, GRU or RNN, whose states have the images along their second axis."""
    first = 0 if node.arguments.get("batch_first") else 1
    reads = list(shares)
    rows = [name for name in reads if shares[name].kind is AggregationKind.ROWS]
    if any(shares[name].axis != (first if name == reads[0] else 1) for name in rows):
        return None
    combined = CONSTANT.combine(*shares.values())
    return make_rows(combined, 0) if all(share.is_plain for share in shares.values()) else None


def _propagate_einsum(a: ModelAnalysis, node: Node, shares: Mapping[str, BatchAggregation]) -> BatchAggregation | None:
    """Return the aggregation of an einsum: one letter stands for the images in every operand that has them."""
    inputs, _, output = str(node.arguments["equation"]).replace(" ", "").partition("->")
    letters = set()
    for term, name in zip(inputs.split(","), node.reads, strict=False):
        share = shares[name]
        if not share.is_plain or "." in term:
            return None
        if share.kind is AggregationKind.ROWS:
            letters.add(term[share.axis])
    if len(letters) != 1 or not letters <= set(output) or inputs.count(",") + 1 != len(node.reads):
        return None
    combined = CONSTANT.combine(*shares.values())
    outer = max(share.outer for share in shares.values())
    return make_rows(replace(combined, outer=outer), output.index(letters.pop()))


_LAYERS: dict[str, _Rule] = {
    **dict.fromkeys(
        ("linear", "layer_norm", "rms_norm", "matmul", "bmm", "mm", "scaled_dot_product_attention"),
        _propagate_last_axes,
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _propagate_recurrent),
    "einsum": _propagate_einsum,
}
