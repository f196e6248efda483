"""The model of one of several ranks that share the images of a micro-batch (`local_dp`).

It is traced twice: with all images, and with one rank's share of them. Values that differ in their first axis are
sharded over the ranks. An operator that joins images needs a rule that sums over the ranks, as batch norm and losses
have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engines.errors import PlanError
from engines.graph.model_graph import ModelGraph, Node
from engines.spatial.local_rules import is_pointwise, make_unsupported_error

__all__ = ["find_sharded_names", "shard_graph"]

# Operators whose arguments include the shape of the result: of the same values, or of values that are alike everywhere.
_RESHAPED = {f"aten.{name}" for name in ("view.default", "reshape.default", "_unsafe_view.default", "unflatten.int")}
_FILLS = ("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty", "expand")
_MADE_ALIKE = {f"aten.{name}.default" for name in _FILLS}
_SHAPED = _RESHAPED | _MADE_ALIKE
_AXES = ("dim", "dims", "dim0", "dim1", "axis0", "axis1", "source", "destination")


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
    return frozenset(name for name in ours if ours[name].shape != theirs[name].shape)


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
            raise make_unsupported_error(node, "reads a constant with an entry for each image, which ranks share")
    if node.name not in parted and not reads:
        return node
    if node.name in parted:
        mine, its = (twin.spec.shape, node.spec.shape) if node.spec and twin.spec else ((), ())
        if mine[1:] != its[1:]:
            raise make_unsupported_error(
                node, f"lays images out along other axes than the first ({its}), which ranks cannot share"
            )
        _check_image_axis(node, whole)
        if not reads and node.operator not in _MADE_ALIKE:
            raise make_unsupported_error(
                node, "makes values for each image, for which there is no rule where ranks share images"
            )
    mine, its = ({name: repr(value) for name, value in each.arguments.items()} for each in (twin, node))
    if mine != its and not (is_pointwise(node.operator) or node.operator in _SHAPED):
        raise make_unsupported_error(
            node, "has the number of images as an argument, for which there is no rule where ranks share them"
        )
    shape = {name: twin.arguments[name] for name in ("size", "shape", "sizes") if name in twin.arguments}
    return replace(twin, arguments={**node.arguments, **(shape if node.operator in _SHAPED else {})})


def _check_image_axis(node: Node, whole: ModelGraph) -> None:
    """Raise TraceError if an operator works along the axis of the images."""
    sizes = whole.specs
    ranks = [len(sizes[name].shape) for name in node.reads if name in sizes]
    for name in _AXES:
        dims = node.arguments.get(name)
        given = [dims] if isinstance(dims, int) else dims if isinstance(dims, list | tuple) else []
        if any(isinstance(dim, int) and count and dim % count == 0 for dim in given for count in ranks[:1]):
            raise make_unsupported_error(node, f"works along the axis of the images ({name}={dims}), which ranks share")
    repeats = node.arguments.get("repeats")
    if isinstance(repeats, list | tuple) and len(repeats) == max(ranks, default=0) and repeats[0] != 1:
        raise make_unsupported_error(node, "repeats the images, which ranks share")
