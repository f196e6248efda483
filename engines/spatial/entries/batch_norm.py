"""Batch norm over all tiles: local moments, an all-reduce and a local formula. Or each tile by itself."""

from __future__ import annotations

from engines.layer.graph import Node, TensorSpec, to_user_name
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
    channels = value.spec.shape[1]
    #     own pixels -> moments, (tiles, 2, C), 0 but in its slot -> all-reduce -> moments of all tiles -> own result
    #
    # Backward is the same way back: the gradient of the moments is summed over the ranks, and each takes its slot's.
    counts, slot = b.count_elements(a["input"], channels), b.tile
    is_whole = len(counts) == 1
    if b.local_stats_ranks and not is_whole:  # each tile by its own moments
        counts, slot = [counts[b.tile]], 0
    like = TensorSpec((len(counts), 2, channels), "float64")
    affine = a["weight"], a["bias"]
    if is_whole:  # the rank holds whole images: the plain kernel alone
        both = b.add_local_op(
            f"{node.name}.both", "tile.whole_batch_norm", a["input"], *affine, a["eps"], like=node.spec
        )
        b.add_local_op(node.name, "getitem", both, 0, like=node.spec, axes=value.axes)
        moments = b.add_local_op(f"{node.name}.moments", "getitem", both, 1, like=like)
    else:
        x = b.crop_to_own(a["input"])
        moments = b.add_local_op(f"{node.name}.moments", "tile.moments", x, slot, len(counts), like=like)
        if not b.local_stats_ranks:
            moments = b.all_reduce(moments)
        x = b.align_to_output(a["input"])
        b.add_local_op(
            node.name, "tile.batch_norm", x, moments, *affine, counts, a["eps"], like=node.spec, axes=value.axes
        )
    if a["running_mean"]:
        names = a["running_mean"].name, a["running_var"].name
        counter = f"{names[0].removesuffix('running_mean')}num_batches_tracked" if a["momentum"] == CUMULATIVE else None
        if counter and counter not in b.graph.buffers:
            raise make_unsupported_error(
                node, f"has momentum=None, but there is no {to_user_name(counter)} to count its batches"
            )
        b.statistics.append(
            RunningStatistics(*names, moments.name, a["momentum"], tuple(counts), b.local_stats_ranks, counter)
        )


@register_rule("aten.add_.Tensor", everywhere=True)
def count_batches(b: Builder, node: Node) -> None:
    """Record an increment of the number of batches seen: a buffer that grows by a constant at the update."""
    buffer = node.arguments["self"].name
    if buffer not in b.graph.buffers:
        raise make_unsupported_error(node, "writes to a value in a way for which there is no rule")
    b.counters[buffer] = b.counters.get(buffer, 0) + node.arguments["other"] * node.arguments["alpha"]
