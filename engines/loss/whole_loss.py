"""The loss of the whole batch, from micro-batches: numerator and denominator are two sums over all of them.

A mean over labels that are not ignored, or that is weighted by class, divides by what the labels say. The mean of such
means over micro-batches is not that of the whole batch. So what a loss divides by is taken from the labels of all
micro-batches before the first one is computed, and each micro-batch divides its own sum by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from engines.layer.graph import BatchLoss, BatchTotal, ModelGraph, Node, Ref, TensorSpec, find_ref_names
from engines.loss import arithmetic_rules, shape_rules
from engines.loss.analysis import LossAnalysis
from engines.loss.arithmetic_rules import SUM
from engines.loss.batch_aggregation import AggregationKind, BatchAggregation

__all__ = ["COUNTED", "analyse_loss", "with_whole_loss"]

COUNTED = "loss.counted.default"
"""What a mean over class numbers divides by: the entries that are not ignored, each times the weight of its class."""

_ROUNDS = 8  # a loss may need totals of what needs totals itself; each round finds some more


def analyse_loss(graph: ModelGraph, twin: Callable[[], ModelGraph]) -> LossAnalysis | str:
    """How the loss of a micro-batch adds up to that of the whole batch, or in words what is not known to."""
    totals: frozenset[str] = frozenset()
    for _ in range(_ROUNDS):
        found = LossAnalysis(graph, twin, {**arithmetic_rules.RULES, **shape_rules.RULES}, totals)
        if found.analyse().kind is AggregationKind.UNKNOWN:
            return found.why
        if found.wanted <= totals:
            return found
        totals |= found.wanted
    return "sums of sums"


def with_whole_loss(graph: ModelGraph, twin: Callable[[], ModelGraph], micro_batches: int) -> ModelGraph:
    """The graph, and its share, with a loss of which the mean over the micro-batches is that of the whole batch.

    `twin` traces the same with twice as many images, where that is needed to tell a batch from other sizes. Where the
    loss has no such form, or has it already, nothing is changed but what `whole` says.
    """
    found = analyse_loss(graph, twin)
    if isinstance(found, str):
        return replace(graph, whole=BatchLoss(unknown=found))
    change = _LossRewrite(found, micro_batches)
    share = graph.share and change.apply(graph.share)
    return replace(change.apply(graph), share=share and replace(share, whole=change.make_whole_loss(graph.share)))


class _LossRewrite:
    """What is changed in a graph, and alike in that of a share of its images."""

    def __init__(self, found: LossAnalysis, micro_batches: int) -> None:
        self.found, self.count = found, micro_batches
        self.loss = found.get_aggregation(found.graph.loss or "")

    def make_whole_loss(self, graph: ModelGraph) -> BatchLoss:
        """What is said of it; the label nodes are those of this graph."""
        nodes = {node.name: node for node in graph.nodes}
        counted = {source: nodes[name] for name, source in sorted(self.sources.items())}
        totals = [BatchTotal(_name_total(source), source, node.spec, 1) for source, node in counted.items()]
        degrees = {name: self.found._found[name].degree for name in sorted(self.found.totals)}
        totals += [BatchTotal(_name_total(name), name, nodes[name].spec, degree) for name, degree in degrees.items()]
        made = [*nodes.values(), *(_make_count_node(node, source) for source, node in counted.items())]
        label_nodes = _find_ancestors([total.source for total in totals], made)
        return BatchLoss(tuple(label_nodes), tuple(totals), self.scales, weighed_by=self._find_denominator())

    @cached_property
    def sources(self) -> dict[str, str]:
        """Of each mean that divides by what the labels count, the name of that count: one for all that count alike."""
        first: dict[str, str] = {}
        nodes = self.found.nodes
        return {name: first.setdefault(_make_key(nodes[name]), f"{name}.counted") for name in sorted(self.found.ratios)}

    @property
    def scales(self) -> bool:
        """Whether sums over the batch are multiplied by the number of micro-batches."""
        return bool(self.found.scaled) or _is_sum(self.loss)

    def _find_denominator(self) -> str | None:
        """The one source by which all terms of the loss are divided."""
        over = self.loss.over or frozenset({""})
        (first, *others) = over
        if others or first == "?":
            return None
        by_key = {_make_key(self.found.nodes[name]): source for name, source in self.sources.items()}
        return by_key.get(first, first)

    def apply(self, graph: ModelGraph) -> ModelGraph:
        """The changed graph, without what is not read any more."""
        renamed = {name: Ref(_name_total(name)) for name in self.found.totals}
        cone = {node.name for node in self.found._find_loss_nodes()}
        nodes: list[Node] = []
        for node in graph.nodes:
            own = _replace_reads(node, renamed) if node.name in cone else node
            nodes += self._rewrite_node(own)
        loss = graph.loss
        if _is_sum(self.loss):
            nodes.append(self._make_scaled_sum(graph, loss))
            loss = nodes[-1].name
        kept = _drop_unused(nodes, {loss, *graph.answers}, among=cone)
        return replace(graph, nodes=tuple(kept), loss=loss, whole=self.make_whole_loss(graph))

    def _rewrite_node(self, node: Node) -> Iterable[Node]:
        """The node, or the few that stand in its place."""
        sums = {Ref(name): name for reader, name in self.found.scaled if reader == node.name}
        for name in sorted(sums.values()):
            yield self._make_scaled_sum(self.found.graph, name, f"{node.name}.{name}")
        if sums:
            node = _replace_reads(node, {name: Ref(f"{node.name}.{name}") for name in sums.values()})
        if node.name not in self.found.ratios:
            yield node
            return
        numerator = replace(node, name=f"{node.name}.sum", arguments={**node.arguments, "reduction": SUM})
        yield numerator
        quotient = {"self": Ref(numerator.name), "other": Ref(_name_total(self.sources[node.name]))}
        yield replace(node, operator="aten.div.Tensor", arguments=quotient, flops=0)

    def _make_scaled_sum(self, graph: ModelGraph, name: str, out: str = "") -> Node:
        """A sum over the batch, times the number of micro-batches: their mean is then the sum over all."""
        like = next(node for node in graph.nodes if node.name == name)
        arguments = {"self": Ref(name), "other": self.count}
        return replace(like, name=out or f"{name}.whole", operator="aten.mul.Scalar", arguments=arguments, flops=0)


def _is_sum(loss: BatchAggregation) -> bool:
    return loss.kind is AggregationKind.SUM and loss.degree == 0


def _name_total(name: str) -> str:
    return f"{name}.total"


def _make_key(node: Node) -> str:
    """As the analysis names the denominators of such a node."""
    return repr([node.arguments[name] for name in ("target", "weight", "ignore_index")])


def _make_count_node(node: Node, source: str) -> Node:
    """What a cross-entropy's mean divides by, as a node of its own."""
    arguments = {name: node.arguments[name] for name in ("target", "weight", "ignore_index")}
    spec = TensorSpec((), "float64")
    return replace(node, name=source, operator=COUNTED, arguments=arguments, spec=spec, flops=0)


def _replace_reads(node: Node, renamed: Mapping[str, Ref]) -> Node:
    """The node with other values in the place of some that it reads."""
    if renamed.keys().isdisjoint(node.reads):
        return node
    return replace(node, arguments={name: _replace_refs(value, renamed) for name, value in node.arguments.items()})


def _replace_refs(value: Any, renamed: Mapping[str, Ref]) -> Any:
    match value:
        case Ref(name):
            return renamed.get(name, value)
        case list() | tuple():
            return tuple(_replace_refs(item, renamed) for item in value)
        case _:
            return value


def _find_ancestors(wanted: Iterable[str], nodes: Iterable[Node]) -> list[Node]:
    """The nodes that the wanted ones follow from, in their order."""
    made = {node.name: node for node in nodes}
    asked, reached = list(wanted), set[str]()
    while asked:
        name = asked.pop()
        if name in made and name not in reached:
            reached.add(name)
            asked += find_ref_names(made[name].arguments)
    return [node for name, node in made.items() if name in reached]


def _drop_unused(nodes: Iterable[Node], ends: Iterable[str | None], among: set[str]) -> list[Node]:
    """Without those of `among` that nothing reads any more."""
    read, kept = set(ends), []
    for node in reversed(list(nodes)):
        if node.name in read or node.name not in among:
            kept.append(node)
            read.update(node.reads)
    return kept[::-1]
