"""Why an operator cannot run on tiles, and what to do about it."""

from __future__ import annotations

import torch

from engines.errors import TraceError
from engines.layer.graph import Node, Ref, references
from engines.program.builder import Builder
from engines.spatial.kernels import has_kernel, operator_of

__all__ = ["check_deterministic", "no_rule", "refuse_if_read"]


def no_rule(node: Node, why: str = "has no entry in the operator table") -> TraceError:
    """The error for an operator that cannot run on tiles, with what to do."""
    reads = ", ".join(dict.fromkeys(references(node.arguments)))
    return TraceError(
        f"{node.operator} (reads {reads}) {why}. It is in {node.where}. Either end the spatial stages before it "
        "(a smaller spatial_size, or another balance), or write an entry: a function like those in "
        f'engines/spatial/entries, under @entry("{node.operator}").'
    )


def refuse_if_read(b: Builder, node: Node, output: int, what: str) -> None:
    """Raises TraceError where anybody reads the output of that number of an operator that has several."""
    picked = {
        other.name
        for other in b.graph.nodes
        if other.operator == "getitem" and other.arguments["0"] == Ref(node.name) and other.arguments["1"] == output
    }
    if picked & {b.graph.prediction, *(name for other in b.graph.nodes for name in other.reads)}:
        raise no_rule(node, f"is asked for {what}, for which there is no rule")


def check_deterministic(b: Builder, node: Node) -> None:
    """A random operator would draw differently on each tile of a stage."""
    draws = not has_kernel(node.operator) and torch.Tag.nondeterministic_seeded in operator_of(node.operator).tags
    if len(b.stage.ranks) > 1 and draws:
        raise no_rule(node, "draws random numbers, which the tiles of a stage do not share")
