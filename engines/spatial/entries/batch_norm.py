"""Batch norm over all tiles: local moments, an all-reduce and a local formula. Or each tile by itself."""

from __future__ import annotations

from engines.layer.graph import Node, Ref, TensorSpec, to_user_name
from engines.layer.traceability import CUMULATIVE
from engines.program.builder import Builder
from engines.program.instructions import RunningStatistics
from engines.spatial.local_rules import apply_locally
from engines.spatial.operator_table import register_rule
from engines.spatial.unsupported import make_unsupported_error

__all__: list[str] = []


@register_rule("aten.batch_norm.default", everywhere=True, images=("input",))
def batch_norm(b: Builder, node: Node) -> None:
    """Normalise by the moments of all tiles or, if so planned, of each; the update sets the running statistics."""
    a = node.arguments
    value = b.get_value(a["input"])
    if not a["training"]:
        apply_locally(b, node, value.axes)
        return
    counts = b.count_elements(a["input"], value.spec.shape[1])
    moments = _normalise_tiles(b, node, counts) if len(counts) > 1 else _normalise_whole(b, node)
    if a["running_mean"]:
        names = a["running_mean"].name, a["running_var"].name
        counts = [counts[b.tile]] if b.local_stats_ranks else counts
        counter = _find_counter(b, node) if a["momentum"] == CUMULATIVE else None
        b.statistics.append(
            RunningStatistics(*names, moments.name, a["momentum"], tuple(counts), b.local_stats_ranks, counter)
        )


def _find_counter(b: Builder, node: Node) -> str:
    """Return the buffer that counts the batches of a batch norm with momentum=None.

    Raises TraceError if there is none beside its statistics.
    """
    name = f"{node.arguments['running_mean'].name.removesuffix('running_mean')}num_batches_tracked"
    if name not in b.graph.buffers:
        raise make_unsupported_error(
            node, f"has momentum=None, but there is no {to_user_name(name)} to count its batches"
        )
    return name


def _normalise_tiles(b: Builder, node: Node, counts: list[int]) -> Ref:
    """Normalise each tile by the moments of all tiles, or by its own (`local_stats_ranks`); return the moments."""
    a, value = node.arguments, b.get_value(node.arguments["input"])
    counts, slot = ([counts[b.tile]], 0) if b.local_stats_ranks else (counts, b.tile)
    like = TensorSpec((len(counts), 2, value.spec.shape[1]), "float64")
    own = b.add_local_op(
        f"{node.name}.moments", "tile.moments", b.crop_to_own(a["input"]), slot, len(counts), like=like
    )
    moments = own if b.local_stats_ranks else b.all_reduce(own)
    b.add_local_op(
        node.name, "tile.batch_norm", b.align_to_output(a["input"]), moments, a["weight"], a["bias"], counts, a["eps"],
        like=node.spec, axes=value.axes,
    )  # fmt: skip
    return moments


def _normalise_whole(b: Builder, node: Node) -> Ref:
    """Normalise on a rank that holds whole images, by the plain kernel alone; return the moments."""
    a, value = node.arguments, b.get_value(node.arguments["input"])
    like = TensorSpec((1, 2, value.spec.shape[1]), "float64")
    both = b.add_local_op(
        f"{node.name}.both", "tile.whole_batch_norm", a["input"], a["weight"], a["bias"], a["eps"], like=node.spec
    )
    b.add_local_op(node.name, "getitem", both, 0, like=node.spec, axes=value.axes)
    return b.add_local_op(f"{node.name}.moments", "getitem", both, 1, like=like)


@register_rule("aten.add_.Tensor", everywhere=True)
def count_batches(b: Builder, node: Node) -> None:
    """Record an increment of the number of batches seen: a buffer that grows by a constant at the update."""
    buffer = node.arguments["self"].name
    if buffer not in b.graph.buffers:
        raise make_unsupported_error(node, "writes to a value in a way for which there is no rule")
    b.counters[buffer] = b.counters.get(buffer, 0) + node.arguments["other"] * node.arguments["alpha"]
