"""Batch norm over all tiles: own moments, a sum over the ranks, and a local formula. Or each tile by itself."""

from __future__ import annotations

from engines.layer.graph import Node, TensorSpec
from engines.program.builder import Builder
from engines.program.instructions import RunningStatistics
from engines.spatial.ops import entry
from engines.spatial.plain import as_it_is
from engines.spatial.refusals import no_rule

__all__: list[str] = []


@entry("aten.batch_norm.default", everywhere=True, images=("input",))
def batch_norm(b: Builder, node: Node) -> None:
    """Moments of own pixels, gathered from all tiles if so planned; the running statistics wait for the update."""
    a = node.arguments
    value = b.value(a["input"])
    if not a["training"]:
        as_it_is(b, node, value.axes)
        return
    channels = value.spec.shape[1]
    counts = b.counts(a["input"], channels)
    slot = b.tile if len(counts) > 1 else 0
    if b.apart:
        counts, slot = counts[slot : slot + 1], 0
    like = TensorSpec((len(counts), 2, channels), "float64")
    own = b.local(f"{node.name}.moments", "tile.moments", b.owned(a["input"]), slot, len(counts), like=like)
    moments = b.all_reduce(own) if len(counts) > 1 else own
    b.local(
        node.name, "tile.batch_norm", b.beneath(a["input"]), moments, a["weight"], a["bias"], counts, a["eps"],
        like=node.spec, axes=value.axes,
    )  # fmt: skip
    if a["running_mean"]:
        names = a["running_mean"].name, a["running_var"].name
        b.statistics.append(RunningStatistics(*names, moments.name, a["momentum"], tuple(counts), b.apart))


@entry("aten.add_.Tensor", everywhere=True)
def counter(b: Builder, node: Node) -> None:
    """The number of batches seen: a buffer that grows by a constant at the update."""
    buffer = node.arguments["self"].name
    if buffer not in b.graph.buffers:
        raise no_rule(node, "writes to a value in a way for which there is no rule")
    b.counters[buffer] = b.counters.get(buffer, 0) + node.arguments["other"] * node.arguments["alpha"]
