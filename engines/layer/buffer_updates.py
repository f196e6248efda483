"""Buffers that a model changes in forward: ranks change them at the update, one process in each forward pass."""

from __future__ import annotations

from collections.abc import Iterator

from engines.errors import PlanError, TraceError
from engines.layer.graph import ModelGraph, Node, Ref, to_user_name

__all__ = ["check_buffer_reads", "find_updated_buffers", "is_batch_dependent"]


def check_buffer_reads(graph: ModelGraph, micro_batches: int) -> None:
    """Raise an error if an operator reads a buffer that another operator of the model changes.

    A read after the change would see the value before it (TraceError). A read before the change is right, unless a step
    has several micro-batches: from the second on it would see the value of the first (PlanError).
    """
    changers = {name: node for node in graph.nodes for name in find_updated_buffers(graph, node)}
    # One process, in each forward pass:   read m | m = 0.9 m + 0.1 mean | read m
    # A rank, at the end of the step:      read m |                      | read m   ...   m = 0.9 m + 0.1 mean
    #
    # The first read is the same unless a micro-batch came before it in the step; the second one never is.
    # `behind` are the buffers whose change has been passed.
    behind: set[str] = set()
    for node in graph.nodes:
        own = set(find_updated_buffers(graph, node))
        for name in sorted({*node.reads} & changers.keys() - own):
            changer = changers[name]
            both = (
                f"{node.operator} in {node.where} reads the buffer {to_user_name(name)}, which {changer.operator} in "
            )
            if name in behind:
                raise TraceError(
                    f"{both}{changer.where} has changed before. Ranks change buffers at the end of a step: read it "
                    "before the change, or compute what you need without the buffer."
                )
            if micro_batches > 1:
                raise PlanError(
                    f"{both}{changer.where} changes in each of the {micro_batches} micro-batches of a step. Ranks "
                    "change buffers at the end of a step. Use a plan with one micro-batch, or a model that does not "
                    "read it."
                )
        behind |= own


def is_batch_dependent(graph: ModelGraph) -> bool:
    """Return whether predictions depend on the rest of the batch: a batch norm without running statistics."""
    return any(node.operator == "aten.batch_norm.default" and node.arguments["training"] for node in graph.nodes)


def find_updated_buffers(graph: ModelGraph, node: Node) -> Iterator[str]:
    """Yield the names of the buffers that a node changes."""
    arguments = node.arguments
    if node.operator == "aten.add_.Tensor" and arguments["self"].name in graph.buffers:
        yield arguments["self"].name
    mode = {"aten.batch_norm.default": "training", "aten.instance_norm.default": "use_input_stats"}.get(node.operator)
    for name in ("running_mean", "running_var") if mode and arguments[mode] else ():
        if isinstance(arguments[name], Ref):
            yield arguments[name].name
