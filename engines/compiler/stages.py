"""How ranks divide a model: into stages of consecutive layers, or by the images of a micro-batch.

A layer is one convolution or matrix product with the operators after it. It is a whole block if a cut inside the block
would carry more tensors than a cut at its ends (a residual block, a cell). Layers are found from the graph, whatever
the names of the modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from mpi4dl_nb.engines.compiler.local_rules import is_pointwise, make_shared_images_error
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.geometry.tiles import Span
from mpi4dl_nb.engines.graph.model_graph import ModelGraph, Node, Ref, TensorSpec
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
    best = {end: (total[end] / tiles[0], (end,)) for end in range(1, len(found) + 1)}
    for stage in range(1, len(tiles)):
        longer = {}
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


# The model of one of several ranks that share the images of a micro-batch (`local_dp`).
#
# It is traced twice: with all images, and with one rank's share of them. Values that differ in their first axis are
# sharded over the ranks. An operator that joins images needs a rule that sums over the ranks, as batch norm and losses
# have.


# Operators whose arguments include the shape of the result: of the same values, or of values that are alike everywhere.
_RESHAPED = {f"aten.{name}" for name in ("view.default", "reshape.default", "_unsafe_view.default", "unflatten.int")}
FILLS = ("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty", "expand")
_MADE_ALIKE = {f"aten.{name}.default" for name in FILLS}
SHAPED = _RESHAPED | _MADE_ALIKE
_AXES = ("dim", "dims", "dimension", "dim0", "dim1", "dim2", "axis0", "axis1", "source", "destination")
# Operators that only move axes: the shapes of their results say where the images went.
_MOVED = ("permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims")
# Operators that add an axis, which they count among those of the result.
_ADDING = ("unsqueeze", "stack")
# Operators along the first axis, which no argument names; some only if there are no more than so many axes.
_ALONG_FIRST = ("vstack", "vsplit", "flipud", "msort", "masked_scatter", "renorm", "hstack", "tril", "triu")
_IF_FEW_AXES = {"hstack": 1, "tril": 2, "triu": 2}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def find_sharded_names(whole: ModelGraph, share: ModelGraph) -> frozenset[str]:
    """Return the values of which each rank has its own images.

    Raises PlanError if the two traces have different operators.
    """
    if [(n.name, n.operator) for n in whole.nodes] != [(n.name, n.operator) for n in share.nodes]:
        raise PlanError(
            "The model does different things for different numbers of images, so its ranks cannot share the images "
            "of a micro-batch. Leave local_dp at 1, or use data_parallel."
        )
    ours, theirs = share.specs, whole.specs
    sharded = {name for name in ours if ours[name].shape != theirs[name].shape}
    # An operator of several outputs has no shape of its own; it is sharded if all outputs that are picked are.
    picks: dict[str, list[str]] = {node.name: [] for node in whole.nodes if node.spec is None}
    for node in whole.nodes:
        for name in picks.keys() & set(node.reads):
            picks[name].append(node.name)
    return frozenset(sharded.union(name for name, picked in picks.items() if picked and sharded.issuperset(picked)))


def shard_graph(whole: ModelGraph, share: ModelGraph, nodes: Iterable[Node]) -> ModelGraph:
    """Return `whole` with the shapes of one rank's share; `nodes` (some of `whole`) are those that the rank runs.

    Raises TraceError if one of them cannot work on sharded images.
    """
    # A node runs on the shapes of a share, but computes with the numbers of the whole batch: x / len(images) divides by
    # the number of all images.
    parted = find_sharded_names(whole, share)
    twins = {node.name: node for node in share.nodes}
    run = {node.name: _shard_node(node, twins[node.name], parted, whole, share) for node in nodes}
    return replace(
        share,
        nodes=tuple(run.get(node.name, twins[node.name]) for node in whole.nodes),
        buffers={**share.buffers, **whole.buffers},
        constants={**share.constants, **whole.constants},
    )


def _shard_node(node: Node, twin: Node, parted: frozenset[str], whole: ModelGraph, share: ModelGraph) -> Node:
    reads = parted.intersection(node.reads)
    for ours, theirs in zip(twin.reads, node.reads, strict=True):  # a constant is called after its numbers
        if ours != theirs and share.specs[ours].shape != whole.specs[theirs].shape:
            raise make_shared_images_error(node, "reads a constant with an entry for each image")
    if node.name not in parted and not reads:
        return node
    if node.name in parted:
        mine, its = (twin.spec.shape, node.spec.shape) if node.spec and twin.spec else ((), ())  # else its outputs have
        if mine[1:] != its[1:]:
            raise make_shared_images_error(node, f"lays images out along other axes than the first ({its})")
        # Every input has an entry for each image: the images, or the labels alone in a graph that counts labels.
        shared, images = (next(iter(graph.inputs.values())).shape[0] for graph in (share, whole))
        if mine and mine[0] * images != its[0] * shared:
            raise make_shared_images_error(
                node, f"makes {its[0]} entries of {images} images, but {mine[0]} of {shared}"
            )
        if why := describe_image_axis(node, whole.specs, next(iter(node.reads), None) in parted):
            raise make_shared_images_error(node, why)
        if not reads and node.operator not in _MADE_ALIKE:
            raise make_shared_images_error(node, "makes values for each image, for which there is no rule")
    mine, its = ({name: repr(value) for name, value in version.arguments.items()} for version in (twin, node))
    if mine != its and not (is_pointwise(node.operator) or node.operator in SHAPED):
        raise make_shared_images_error(node, "has the number of images as an argument, for which there is no rule")
    shape = {name: twin.arguments[name] for name in ("size", "shape", "sizes") if name in twin.arguments}
    return replace(twin, arguments={**node.arguments, **(shape if node.operator in SHAPED else {})})


def describe_image_axis(node: Node, sizes: Mapping[str, TensorSpec], reads_images: bool) -> str:
    """Return how an operator works along the axis of the images, the first one; empty if it does not.

    `reads_images`: the first value that it reads has an entry for each image. `sizes` are the specs of all values.
    """
    name = node.operator.removeprefix("aten.").split(".")[0]
    ranks = [len(sizes[read].shape) for read in node.reads if read in sizes]
    count = len(node.spec.shape) if node.spec and name in _ADDING else next(iter(ranks), 0)
    # Axes, and numbers of entries, are those of what is read first: a table, perhaps, of which no rank has its own.
    if reads_images and name not in _MOVED:
        for axis in _AXES if name != "tile" else ():
            dims = node.arguments.get(axis, 0.0)  # 0.0: it has no such argument; none at all is all axes
            given = [0] if dims is None or dims in ([], ()) else dims if isinstance(dims, list | tuple) else [dims]
            if any(type(dim) is int and count and dim % count == 0 for dim in given):
                return f"works along the axis of the images ({axis}={dims})"
        # A mask has an entry for each of the images that a rank has; numbers count those of all ranks.
        indices = node.arguments.get("indices")
        chosen = indices[0] if isinstance(indices, list | tuple) and indices else None
        if chosen is not None and not (isinstance(chosen, Ref) and sizes[chosen.name].dtype == "bool"):
            return "picks or writes images by their numbers"
    along = name in _ALONG_FIRST and count <= _IF_FEW_AXES.get(name, count)
    if along or (name in _RECURRENT and node.arguments.get("batch_first") is not True):
        return "works along the first axis, that of the images"
    repeats = node.arguments.get("dims" if name == "tile" else "repeats")
    if isinstance(repeats, list | tuple) and len(repeats) == max(ranks, default=0) and repeats[0] != 1:
        return "repeats the images"
    return ""
