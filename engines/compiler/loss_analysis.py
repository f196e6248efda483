"""How the values that a loss computes for each micro-batch combine to the value for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

from mpi4dl_nb.engines.compiler.local_rules import is_pointwise
from mpi4dl_nb.engines.errors import TraceError
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref, TensorSpec, find_loss_nodes
from mpi4dl_nb.engines.program.rng import find_sample_number, uses_generator


class AggregationKind(Enum):
    """How the values of all micro-batches combine to that of the whole batch."""

    ROWS = "concatenated"
    SUM = "added"
    SAME = "equal"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class BatchAggregation:
    """How a value of M micro-batches aggregates: whole = combine(values by `kind`) / M ** `degree`.

    A sum over the batch has degree 0, a mean degree 1. `axis` is the image axis, counted from the front. `known`: the
    value depends only on the labels and untrained tensors, not on other micro-batches. `derived`: it depends on a
    total over all micro-batches. `over` are the denominators of a loss; "" stands for a mean over a constant count.
    The axis may hold `outer` times all images, one time after another: that of (T, N, C) as (T * N, C) holds T times.
    """

    kind: AggregationKind
    degree: int = 0
    axis: int = 0
    known: bool = False
    derived: bool = False
    over: frozenset[str] = frozenset()
    outer: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether any pointwise function, linear or not, may be applied to each micro-batch separately."""
        return self.kind in (AggregationKind.ROWS, AggregationKind.SAME) and self.degree == 0

    def combine(self, *others: BatchAggregation, degree: int | None = None) -> BatchAggregation:
        """Return the aggregation of a value computed from this one and `others`.

        It is known if all are, derived if any is, and has the denominators of all. Its degree is that of this one, or
        the one that is given.
        """
        every = (self, *others)
        known, derived = all(share.known for share in every), any(share.derived for share in every)
        over = frozenset[str]().union(*(share.over for share in every))
        return replace(self, known=known, derived=derived, over=over, degree=self.degree if degree is None else degree)


# Two micro-batches (M = 2) of four images, and the mean squared error of their predictions p:
#
#     value               micro-batch 0      micro-batch 1      whole batch                   aggregation
#     (p - y) ** 2        [a b]              [c d]              [a b c d]                     ROWS
#     .sum()              a + b              c + d              their sum                     SUM, degree 0
#     .mean()             (a + b) / 2        (c + d) / 2        their sum / 2                 SUM, degree 1
#     weight.norm()       w                  w                  w                             SAME
#     (p - y).sum() ** 2  ...                ...                no function of the two above  UNKNOWN
#
# A loss of degree 1 is what training needs: the mean of the micro-batches' losses is that of the whole batch.
CONSTANT = BatchAggregation(AggregationKind.SAME, known=True)


def find_batch_axis(one: TensorSpec | None, two: TensorSpec | None) -> int | None:
    """Return the axis whose size doubles with the number of images, or None unless it is the only axis that differs.

    >>> find_batch_axis(TensorSpec((3, 2, 8), "float32"), TensorSpec((3, 4, 8), "float32"))
    1
    """
    if one is None or two is None or len(one.shape) != len(two.shape):
        return None
    differing = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    return differing[0] if len(differing) == 1 and two.shape[differing[0]] == 2 * one.shape[differing[0]] else None


def make_rows(found: BatchAggregation, axis: int | None) -> BatchAggregation | None:
    """Return `found` as values of separate images along `axis`; None if the axis is not known."""
    return None if axis is None else replace(found, kind=AggregationKind.ROWS, axis=axis)


def normalise_dims(given: Any, count: int) -> tuple[int, ...]:
    """Return the dimensions that an argument names as non-negative numbers, for a tensor of `count` dimensions."""
    listed: Iterable[int] = [given] if isinstance(given, int) else given or ()
    return tuple(dim % count for dim in listed) if count else ()


# Propagation of the batch dimension through a traced loss: which values are sums or means, and their denominators.
#
# Only operators that are known to keep images separate have a rule. Any other operator that reads batch-dependent
# values makes the result unknown. A second trace with twice as many images (the twin) shows which are the batch size.


CLASS_LOSSES = ("cross_entropy_loss", "nll_loss_nd")

_Rule = Callable[["LossAnalysis", Node], BatchAggregation | None]

_RULES: dict[str, _Rule] = {}


def aggregates(*operators: str) -> Callable[[_Rule], _Rule]:
    """Register a function as the rule of ATen operators; "*" stands for any pointwise operator.

    A name without overload stands for all overloads that are not registered themselves. The function returns the
    aggregation of a node's output, or None if it is unknown.
    """

    def register(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(operators, rule))
        return rule

    return register


def make_denominator_key(node: Node) -> str:
    """Return the text that stands in `over` for what a class loss divides by: equal for equal denominators."""
    return repr([node.arguments[name] for name in ("target", "weight", "ignore_index")])


@dataclass
class LossAnalysis:
    """The aggregation of every value of a loss. `twin` traces the same loss with twice as many images.

    `totals` are the known sums that are taken over all micro-batches, and `wanted` those that the loss needs so.
    `ratios` are the nodes that divide by a count of the labels. `scaled` holds (reader, value) pairs of sums that are
    added to means.
    """

    graph: ModelGraph
    twin: Callable[[], ModelGraph]
    totals: frozenset[str] = frozenset()
    wanted: set[str] = field(default_factory=set)
    ratios: set[str] = field(default_factory=set)
    scaled: set[tuple[str, str]] = field(default_factory=set)
    of_model: ClassVar[bool] = False
    why: str = ""
    aggregations: dict[str, BatchAggregation] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The graph's nodes by name."""
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def double(self) -> ModelGraph | None:
        """The trace with twice as many images, or None if it cannot be traced."""
        try:
            return self.twin()
        except TraceError:
            return None

    @cached_property
    def twins(self) -> Mapping[str, Node]:
        """The twin's nodes by name; empty if the twin's sequence of operators differs."""
        if self.double is None:
            return {}
        mine, theirs = ([(node.name, node.operator) for node in graph.nodes] for graph in (self.graph, self.double))
        return {node.name: node for node in self.double.nodes} if mine == theirs else {}

    def analyse(self) -> BatchAggregation:
        """Return the aggregation of the loss itself."""
        for node in find_loss_nodes(self.graph):
            aggregation = self._compute_aggregation(node)
            # The twin costs a second trace. It is consulted only if a rule has already computed it (cached_property).
            if aggregation.kind is AggregationKind.ROWS and node.spec and "twins" in self.__dict__:
                twin = self.twins.get(node.name)
                if twin is None or find_batch_axis(node.spec, twin.spec) != aggregation.axis:
                    aggregation = self._mark_unknown(node)
            self.aggregations[node.name] = aggregation
        aggregation = self.get_aggregation(self.graph.loss or "")
        if self.__dict__.get("twins"):  # each of the model's outputs that the loss reads has its images along axis 0
            read = {name for node in find_loss_nodes(self.graph) for name in node.reads}.intersection(
                self.graph.answers
            )
            if any(find_batch_axis(self.nodes[name].spec, self.twins[name].spec) != 0 for name in read):
                aggregation = BatchAggregation(AggregationKind.ROWS)
        if aggregation.kind is AggregationKind.ROWS or (
            aggregation.kind is AggregationKind.SUM and aggregation.degree not in (0, 1)
        ):
            return self._mark_unknown(self.nodes[self.graph.loss or ""])
        return aggregation

    def get_aggregation(self, name: str) -> BatchAggregation:
        """Return the aggregation of a node's output, an input, a weight or a buffer."""
        if name in self.totals:
            return BatchAggregation(AggregationKind.SAME, derived=True)
        if name in self.aggregations:
            return self.aggregations[name]
        if name in self.graph.weights or name in self.graph.buffers:
            # The same for every micro-batch. But a constant that the loss creates may contain the number of images: it
            # is then another one in the twin.
            mine = self.graph.constants.get(name)
            theirs = self.double.constants.get(name) if mine is not None and self.double else None
            if mine is not None and (theirs is None or mine.shape != theirs.shape or (mine != theirs).any()):
                return BatchAggregation(AggregationKind.UNKNOWN)
            return replace(CONSTANT, known=name not in self.graph.trainable)
        spec, images = self.graph.specs.get(name), self.graph.inputs["images"].shape[0]
        is_given = name in self.graph.inputs or name in self.graph.answers
        if is_given and spec is not None and spec.shape[:1] == (images,):
            return BatchAggregation(AggregationKind.ROWS, known=name == "labels")
        return BatchAggregation(AggregationKind.UNKNOWN)

    def _mark_unknown(self, node: Node) -> BatchAggregation:
        self.why = self.why or f"{node.short_operator} in {node.where}"
        return BatchAggregation(AggregationKind.UNKNOWN)

    def _compute_aggregation(self, node: Node) -> BatchAggregation:
        shares = {ref: self.get_aggregation(ref) for ref in node.reads}
        drawn = uses_generator(node) or find_sample_number(self.graph, node) is not None  # others in each micro-batch
        if drawn or any(share.kind is AggregationKind.UNKNOWN for share in shares.values()):
            return self._mark_unknown(node)
        return self.apply_rule(node)

    def apply_rule(self, node: Node) -> BatchAggregation:
        """Return the aggregation of a node's output by the rule of its operator."""
        names = node.operator.removeprefix("aten."), node.short_operator, "*" if is_pointwise(node.operator) else ""
        rule = next((_RULES[name] for name in names if name in _RULES), None)
        if rule:
            return rule(self, node) or self._mark_unknown(node)
        # Without a rule, any function of batch-independent values is batch-independent itself.
        plain = [self.resolve_total(ref) for ref in node.reads]
        is_same = all(share.kind is AggregationKind.SAME and share.degree == 0 for share in plain)
        if is_same and self.is_batch_independent(node):
            return CONSTANT.combine(*plain)
        return self._mark_unknown(node)

    # ---- operands

    def resolve_total(self, name: str) -> BatchAggregation:
        """Return the aggregation of a value that is needed for the whole batch.

        A known sum is added to `wanted` and counts as its total over all micro-batches.
        """
        aggregation = self.get_aggregation(name)
        if aggregation.kind is AggregationKind.SUM and aggregation.known:
            self.wanted.add(name)
            return BatchAggregation(AggregationKind.SAME, derived=True)
        return aggregation

    def is_batch_independent(self, node: Node) -> bool:
        """Return whether neither a node's arguments nor its output shape depend on the number of images."""
        return self.has_constant_arguments(node) and self.twins[node.name].spec == node.spec

    def has_constant_arguments(self, node: Node) -> bool:
        """Return whether a node's arguments do not depend on the number of images; its output shape may."""
        twin = self.twins.get(node.name)
        return twin is not None and repr(twin.arguments) == repr(node.arguments)

    def get_number_aggregation(self, node: Node, argument: str) -> BatchAggregation | None:
        """Return the aggregation of a numeric argument, which may be proportional to the batch size or its inverse.

        None if it is no plain number, or changes with the batch size in any other way.
        """
        mine = node.arguments.get(argument)
        if mine is None or isinstance(mine, bool):
            return CONSTANT
        theirs = self.twins[node.name].arguments.get(argument) if node.name in self.twins else None
        if not isinstance(mine, int | float) or not isinstance(theirs, int | float):
            return None
        if mine == theirs:
            return CONSTANT
        if theirs == 2 * mine and mine % self.graph.inputs["images"].shape[0]:
            return None  # doubled by coincidence, as log(2) to log(4)
        # A number proportional to the images is M times as large for the whole batch, hence degree -1.
        return {2 * mine: replace(CONSTANT, degree=-1), mine / 2: replace(CONSTANT, degree=1)}.get(theirs)

    def get_operand_aggregation(self, node: Node, argument: str) -> BatchAggregation | None:
        """Return the aggregation of an argument that is a tensor or a number."""
        value = node.arguments.get(argument)
        if isinstance(value, Ref):
            return self.get_aggregation(value.name)
        return self.get_number_aggregation(node, argument)

    def get_spec(self, ref: Any) -> TensorSpec:
        """Return the shape and dtype of a value."""
        return self.graph.specs[ref.name]

    def find_axis_from_end(self, shares: Mapping[str, BatchAggregation]) -> int | None:
        """Return the image axis counted from the end (as broadcasting does), if it is the same for all operands.

        None also if an operand that is the same for all micro-batches has more than one entry along that axis: it
        would not broadcast against the whole batch.
        """
        specs = self.graph.specs
        shapes = [(share, specs[name].shape) for name, share in shares.items() if name in specs]
        ends = {(share.axis - len(shape), share.outer) for share, shape in shapes if share.kind is AggregationKind.ROWS}
        if len(ends) != 1:
            return None
        ((end, _),) = ends
        others = [shape for share, shape in shapes if share.kind is AggregationKind.SAME]
        return None if any(len(shape) >= -end and shape[end] != 1 for shape in others) else end

    def find_aligned_axis(self, node: Node, shares: Mapping[str, BatchAggregation]) -> int | None:
        """Return the image axis of a node's output under broadcasting, or None (see `find_axis_from_end`)."""
        end = self.find_axis_from_end(shares)
        return None if end is None or node.spec is None else end + len(node.spec.shape)

    def find_node_axis(self, node: Node) -> int | None:
        """Return the image axis of a node's output according to the twin, or None."""
        twin = self.twins.get(node.name)
        return find_batch_axis(node.spec, twin.spec) if twin else None
