"""Description of the loss of a training step: that of the whole batch, or a mean over the micro-batches' losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpi4dl_nb.engines.compiler.local_rules import map_refs, split_arguments
from mpi4dl_nb.engines.compiler.loss_analysis import (
    AggregationKind,
    BatchAggregation,
    LossAnalysis,
    make_denominator_key,
)
from mpi4dl_nb.engines.compiler.loss_rules import SUM
from mpi4dl_nb.engines.graph.model_graph import (
    BatchLoss,
    BatchTotal,
    ModelGraph,
    Node,
    Ref,
    TensorSpec,
    find_loss_nodes,
    find_ref_names,
)
from mpi4dl_nb.engines.plan import OPTIONS, Plan
from mpi4dl_nb.engines.program.kernels import get_kernel

WHOLE_BATCH = "of the whole batch"


def describe_step_loss(graph: ModelGraph, plan: Plan) -> str:
    """Return a phrase that says what the loss of a step is, for the description of a training."""
    if plan.micro_batches == 1 or graph.whole is None or not (graph.whole.unknown or graph.whole.mixes):
        return WHOLE_BATCH
    if not graph.whole.unknown:
        return f"of the outputs of {plan.micro_batches} micro-batches, each computed by itself"
    return f"mean of the losses of {plan.micro_batches} micro-batches, each computed by itself"


def warn_of_mean(graph: ModelGraph, plan: Plan, stacklevel: int) -> None:
    """Warn if the model or the loss may give other numbers for the micro-batches of a step than for the whole batch."""
    if describe_step_loss(graph, plan) == WHOLE_BATCH or graph.whole is None:
        return
    chosen = ", ".join(f"{name}={value!r}" for name, value in plan.chosen.items() if OPTIONS[name].divides == "step")
    if graph.whole.mixes:
        warnings.warn(
            f"The model computes with several images at once, as far as its trace tells (see {graph.whole.mixes}), and "
            f"a step gives it {plan.micro_batches} micro-batches ({chosen}), each by itself: the outputs are not those "
            "for the whole batch. verify() compares with one process that does the same. For the outputs of the whole "
            "batch use a plan with one micro-batch.",
            stacklevel=stacklevel + 1,
        )
    if not graph.whole.unknown:
        return
    warnings.warn(
        f"The loss of a step is the mean of the losses of its {plan.micro_batches} micro-batches ({chosen}), each "
        "computed by itself, and not the loss of the whole batch: as far as its trace tells it is no sum or mean over "
        f"the batch (see {graph.whole.unknown}). verify() compares with one process that does "
        "the same. For the whole batch's loss use a plan with one micro-batch, or a loss that is such a sum or mean.",
        stacklevel=stacklevel + 1,
    )


# The loss of the whole batch from micro-batches: numerator and denominator are sums over all micro-batches.
#
# The denominator of a mean over labels that are not ignored, or of a class-weighted mean, depends on the labels. The
# mean of such means over micro-batches is not the mean over the whole batch. The denominator is therefore computed from
# the labels of all micro-batches before the first one runs, and each micro-batch divides its own sum by it.


_COUNTED = "loss.counted.default"
"""Operator that computes the denominator of a mean over class numbers: the sum of the class weights of all labels that
are not ignored."""


def with_whole_loss(graph: ModelGraph, twin: Callable[[], ModelGraph], micro_batches: int) -> ModelGraph:
    """Return the graph with a loss whose mean over the micro-batches is that of the whole batch.

    `twin` traces the same model with twice as many images; it is called only to distinguish the batch size from other
    sizes. If the loss has no such form, or has it already, only the graph's `whole` changes.
    """
    totals: frozenset[str] = frozenset()
    # Only a total that is known may stand in a denominator. Once a sum counts as a total, values computed from it may
    # turn out to be needed as totals themselves: (labels == 1).sum() first, then what is divided by it.
    for _ in range(8):
        analysis = LossAnalysis(graph, twin, totals)
        if analysis.analyse().kind is AggregationKind.UNKNOWN:
            return replace(graph, whole=BatchLoss(unknown=analysis.why))
        if analysis.wanted <= totals:
            break
        totals |= analysis.wanted
    else:
        return replace(graph, whole=BatchLoss(unknown="sums of sums"))
    return _LossRewrite(analysis, micro_batches).apply()


class _LossRewrite:
    """The rewrite of the loss of a graph."""

    def __init__(self, found: LossAnalysis, micro_batches: int) -> None:
        self.found, self.count = found, micro_batches
        self.loss = found.get_aggregation(found.graph.loss or "")

    def make_whole_loss(self) -> BatchLoss:
        """Return the description of the rewritten loss, with the nodes that depend on the labels alone."""
        # Before the first micro-batch, on the labels alone:    count(labels) of each, summed, / M  =  total
        # In each micro-batch, in place of the class loss:      cross_entropy(sum) / total
        #
        # Their mean over the M micro-batches is (sum of all losses) / (M * total), and M * total counts all labels.
        nodes = {node.name: node for node in self.found.graph.nodes}
        counted = {source: nodes[name] for name, source in sorted(self.sources.items())}
        totals = [BatchTotal(_name_total(source), source, node.result, 1) for source, node in counted.items()]
        degrees = {name: self.found.aggregations[name].degree for name in sorted(self.found.totals)}
        totals += [BatchTotal(_name_total(name), name, nodes[name].result, degree) for name, degree in degrees.items()]
        for source, node in counted.items():
            arguments = {name: node.arguments[name] for name in ("target", "weight", "ignore_index")}
            spec = TensorSpec((), "float64")
            nodes[source] = replace(node, name=source, operator=_COUNTED, arguments=arguments, spec=spec, flops=0)
        pending, reached = [total.source for total in totals], set[str]()
        while pending:  # the nodes from the labels to the totals
            name = pending.pop()
            if name in nodes and name not in reached:
                reached.add(name)
                pending += find_ref_names(nodes[name].arguments)
        label_nodes = tuple(node for name, node in nodes.items() if name in reached)
        # The one source that all terms of the loss are divided by: "" for a constant, None if there is none.
        (first, *others) = self.loss.over or {""}
        by_key = {make_denominator_key(self.found.nodes[name]): source for name, source in self.sources.items()}
        weighed_by = None if others or first == "?" else by_key.get(first, first)
        return BatchLoss(label_nodes, tuple(totals), self.scales, weighed_by=weighed_by)

    @cached_property
    def sources(self) -> dict[str, str]:
        """The count that each label-dependent mean divides by, by node name. Means of the same key share a count."""
        first: dict[str, str] = {}
        nodes = self.found.nodes
        return {
            name: first.setdefault(make_denominator_key(nodes[name]), f"{name}.counted")
            for name in sorted(self.found.ratios)
        }

    @property
    def scales(self) -> bool:
        """Whether any sum over the batch is multiplied by the number of micro-batches."""
        return bool(self.found.scaled) or _is_sum(self.loss)

    def apply(self) -> ModelGraph:
        """Return the rewritten graph, without loss nodes that nothing reads any more."""
        graph = self.found.graph
        renamed = {name: Ref(_name_total(name)) for name in self.found.totals}
        cone = {node.name for node in find_loss_nodes(graph)}
        nodes: list[Node] = []
        for node in graph.nodes:  # only the loss reads totals: the model's own nodes keep their operands
            rewritten = _replace_reads(node, renamed) if node.name in cone else node
            sums = {Ref(name): name for reader, name in self.found.scaled if reader == node.name}
            nodes += [self._make_scaled_sum(name, f"{node.name}.{name}") for name in sorted(sums.values())]
            if sums:
                rewritten = _replace_reads(rewritten, {name: Ref(f"{node.name}.{name}") for name in sums.values()})
            if node.name in self.found.ratios:  # a mean over labels becomes (sum of the losses) / (total)
                numerator = replace(
                    rewritten, name=f"{node.name}.sum", arguments={**rewritten.arguments, "reduction": SUM}
                )
                nodes.append(numerator)
                quotient = {"self": Ref(numerator.name), "other": Ref(_name_total(self.sources[node.name]))}
                rewritten = replace(rewritten, operator="aten.div.Tensor", arguments=quotient, flops=0)
            nodes.append(rewritten)
        loss = graph.loss
        if loss is not None and _is_sum(self.loss):
            nodes.append(self._make_scaled_sum(loss))
            loss = nodes[-1].name
        read, kept = {loss, *graph.answers}, []
        for node in reversed(nodes):
            if node.name in read or node.name not in cone:
                kept.append(node)
                read.update(node.reads)
        return replace(graph, nodes=tuple(kept[::-1]), loss=loss, whole=self.make_whole_loss())

    def _make_scaled_sum(self, name: str, out: str = "") -> Node:
        """Return a node that multiplies a sum over the batch by M, so that the mean of M such sums is the whole sum."""
        like = next(node for node in self.found.graph.nodes if node.name == name)
        arguments = {"self": Ref(name), "other": self.count}
        return replace(like, name=out or f"{name}.whole", operator="aten.mul.Scalar", arguments=arguments, flops=0)


def _is_sum(loss: BatchAggregation) -> bool:
    return loss.kind is AggregationKind.SUM and loss.degree == 0


def _name_total(name: str) -> str:
    return f"{name}.total"


def _replace_reads(node: Node, renamed: Mapping[str, Ref]) -> Node:
    """Return the node with some of the values that it reads replaced by others."""
    if renamed.keys().isdisjoint(node.reads):
        return node
    return replace(node, arguments=map_refs(lambda ref: renamed.get(ref.name, ref), node.arguments))


# Weights of images in a mean loss, so that the mean equals the loss of all images in one batch.


@dataclass(frozen=True)
class ImageWeights:
    """The denominator of the loss of one image: `nodes` compute `source` from its labels.

    All images have the same weight if the loss has no denominator that depends on the labels, or is no such mean.
    """

    nodes: Sequence[Node] = ()
    source: str = ""

    @classmethod
    def of(cls, trace: Callable[[int], ModelGraph]) -> ImageWeights:
        """Return the weights for the loss that `trace(images)` traces for a given number of images."""
        whole = with_whole_loss(trace(1), lambda: trace(2), 1).whole
        return cls(whole.nodes, whole.weighed_by or "") if whole else cls()

    def compute_weight(self, labels: Tensor, owned: Mapping[str, Tensor]) -> float:
        """Return the weight of one image with `labels` (1, ...); `owned` are the loss's buffers by graph name."""
        if not self.source:
            return 1.0
        return float(run_nodes(self.nodes, {**owned, "labels": labels})[self.source])


def run_nodes(nodes: Iterable[Node], inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run nodes that compute something from the labels, one after another on the CPU; return all values by name."""
    values: dict[str, Any] = {**inputs, "@device": torch.device("cpu")}

    def resolve(argument: Any) -> Any:
        return map_refs(lambda ref: values[ref.name], argument)

    for node in nodes:
        positional, keywords = split_arguments(node, {})
        named = {name: resolve(argument) for name, argument in keywords.items()}
        values[node.name] = get_kernel(node.operator)(*map(resolve, positional), **named)
    return values


def compute_mean_loss(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of the losses of images. Losses of weight 0, which are NaN, are skipped.

    >>> compute_mean_loss([2.0, float("nan"), 5.0], [3.0, 0.0, 1.0])
    2.75
    """
    if not any(weights):
        return float("nan")
    pairs = zip(losses, weights, strict=True)
    return sum(weight * loss for loss, weight in pairs if weight) / sum(weights)
