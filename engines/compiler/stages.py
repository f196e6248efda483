"""How ranks divide a model into stages of consecutive layers.

A layer is one convolution or matrix product with the operators after it. It is a whole block if a cut inside the block
would carry more tensors than a cut at its ends (a residual block, a cell). Layers are found from the graph, whatever
the names of the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Span
from mpi4dl_nb.engines.graph.model_graph import ModelGraph
from mpi4dl_nb.engines.plan import Plan

FLOPS_PER_ELEMENT = 40
"""FLOPs that take as long as writing and reading one element, roughly so on CPUs and GPUs alike. The value is the same
in every precision, so that a plan has the same stages in all of them.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """Consecutive nodes. `name` is the module of the first weighted operator; `elements` counts the output elements."""

    name: str
    nodes: Span
    flops: int
    elements: int

    @property
    def cost(self) -> int:
        """Time in FLOPs: computation plus memory traffic (the roofline of Williams et al., 2009)."""
        return self.flops + FLOPS_PER_ELEMENT * self.elements


def find_layers(graph: ModelGraph) -> tuple[Layer, ...]:
    """Return the model's layers, in order. The nodes of the loss belong to the last layer."""
    weighted = [not graph.matrices.isdisjoint(node.reads) for node in graph.nodes]

    def has_weights(layer: Layer) -> bool:
        return any(weighted[layer.nodes.start : layer.nodes.stop])

    parts = list(_LayerFinder(graph, weighted).find_parts())
    starts = [*(part.start for part in parts), len(graph.nodes)]
    layers: list[Layer] = []
    for part, (start, stop) in zip(parts, pairwise(starts), strict=True):
        nodes = graph.nodes[start:stop]
        numel = sum(node.spec.numel for node in nodes if node.spec is not None)
        layer = Layer(part.name, Span(start, stop), sum(node.flops for node in nodes), numel)
        # A part without weights joins the part before it; a first part without weights is joined by the next.
        if layers and not (has_weights(layer) and has_weights(layers[-1])):
            head = layers.pop()
            name = head.name if has_weights(head) else layer.name
            flops, elements = head.flops + layer.flops, head.elements + layer.elements
            layer = Layer(name, Span(head.nodes.start, stop), flops, elements)
        layers.append(layer)
    return tuple(layers)


def cut_stages(found: Sequence[Layer], plan: Plan) -> tuple[Span, ...]:
    """Return the nodes of each stage, for the layers `found` and `plan.balance`.

    `auto` minimises the largest cost per rank of any stage. Raises PlanError if there are fewer layers than stages, or
    if the balance does not add up to the number of layers.
    """
    if plan.split_size > len(found):
        raise PlanError(
            f"split_size={plan.split_size} but the model has only {len(found)} layers. Use split_size <= {len(found)}."
        )
    balance = plan.balance if not isinstance(plan.balance, str) else _find_balance(found, plan)
    if sum(balance) != len(found):
        raise PlanError(
            f"balance={balance} adds up to {sum(balance)} layers but the model has {len(found)}. "
            f"Make it add up to {len(found)}, or use balance='auto'."
        )
    ends = [sum(balance[: stage + 1]) for stage in range(len(balance))]
    return tuple(
        Span(found[end - count].nodes.start, found[end - 1].nodes.stop)
        for end, count in zip(ends, balance, strict=True)
    )


def _find_balance(found: Sequence[Layer], plan: Plan) -> tuple[int, ...]:
    """Partition the layers so that the most expensive stage is cheapest, by dynamic programming over the prefixes."""
    tiles = [grid.tiles if stage < plan.spatial_size else plan.local_dp for stage, grid in enumerate(plan.grids)]
    total = [0]
    for layer in found:
        total.append(total[-1] + layer.cost)
    # best[end]: the first `end` layers in the stages so far, as (largest cost per rank, layers of each stage):
    #
    #     |  the stages so far: best[start]  |  one stage more  |   layers of later stages
    #     0                                start               end
    #
    # Ranges start at the stage number, so that no stage is empty.
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        end: (total[end] / tiles[0], (end,)) for end in range(1, len(found) + 1)
    }
    for stage in range(1, len(tiles)):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in range(stage + 1, len(found) + 1):
            longer[end] = min(
                (max(best[start][0], (total[end] - total[start]) / tiles[stage]), (*best[start][1], end - start))
                for start in range(stage, end)
            )
        best = longer
    return best[len(found)][1]


@dataclass(frozen=True, slots=True)
class _NodeRange:
    start: int
    stop: int
    name: str


class _LayerFinder:
    """Finds where the graph may be cut: module by module, from the outermost inwards."""

    def __init__(self, graph: ModelGraph, weighted: Sequence[bool]) -> None:
        self.graph, self.weighted = graph, weighted
        self.paths = [tuple(node.module.split(".")) if node.module else () for node in graph.nodes]

    def find_parts(self) -> Iterator[_NodeRange]:
        """Return the parts between two cuts, in order; the nodes of the loss follow the last part."""
        last = max(index for index, node in enumerate(self.graph.nodes) if node.name in self.graph.answers)
        return self._split_module(_NodeRange(0, 1 + last, ""), depth=0, wraps_all=True)

    def _split_module(self, whole: _NodeRange, depth: int, wraps_all: bool) -> Iterator[_NodeRange]:
        """Yield the parts of a module, or the whole module if a cut inside carries more tensors than one at its ends.

        `wraps_all` is set if the module holds every weight of the model, as the model itself does. Such a module is
        always split, as are chains and modules with most of the FLOPs: the inner levels of a U-Net with nested modules.
        """

        def get_child(index: int) -> str | int:
            path = self.paths[index]
            return ".".join(path[: depth + 1]) if len(path) > depth else index

        # The runs of nodes of each child module; each node of the module itself is a part of its own.
        parts = []
        for name, run in groupby(range(whole.start, whole.stop), get_child):
            members = list(run)
            parts.append(_NodeRange(members[0], members[-1] + 1, name if isinstance(name, str) else whole.name))
        # A residual block carries one tensor at its ends and two inside:
        #
        #     --+--> conv --> conv --(+)-->      The cut | inside would send the skip connection's tensor as well.
        #       |          |         /
        #       +----------|--------+
        # The value of `alive` at a position is the number of lines that a cut there crosses.
        within = max(self.alive[whole.start], self.alive[whole.stop])
        is_dominant = 2 * sum(node.flops for node in self.graph.nodes[whole.start : whole.stop]) > self.graph.flops
        open_anyway = wraps_all or whole.name in self.graph.chains or is_dominant
        if not open_anyway and any(self.alive[part.start] > within for part in parts[1:]):
            yield whole
            return
        # A module around everything, such as a wrapper's `model`, must not count as one layer: it holds all weights.
        heavy = [part for part in parts if any(self.weighted[part.start : part.stop])]
        for part in parts:
            if part.stop - part.start > 1:
                yield from self._split_module(part, depth + 1, wraps_all and heavy == [part])
            else:
                yield part

    @cached_property
    def alive(self) -> list[int]:
        """Number of tensors that a cut before each position carries."""
        producers = {node.name: index for index, node in enumerate(self.graph.nodes)}
        last = {"images": 0}
        for index, node in enumerate(self.graph.nodes):
            last.update({name: index for name in node.reads if name in producers or name == "images"})
        # Differences: a value is carried by every cut after its producer, up to the one before its last reader.
        change = [0] * (len(self.graph.nodes) + 2)
        for name, use in last.items():
            change[producers.get(name, -1) + 1] += 1
            change[use + 1] -= 1
        return list(accumulate(change))
