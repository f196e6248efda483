"""Why an operator cannot run on tiles, and what to do about it."""

from __future__ import annotations

import torch

from engines.errors import TraceError
from engines.layer.graph import Node, references
from engines.program.builder import Builder
from engines.spatial.kernels import has_kernel, operator_of

__all__ = ["WHOLE_PX", "WholeError", "apart", "check_deterministic", "no_rule"]

WHOLE_PX = 128 * 128
"""Of images with more pixels no rank holds all: that is what they are cut into tiles for."""


class WholeError(TraceError):
    """An operator that needs more than tiles and windows: it is exact where every rank holds all that it reads.

    `axes` are the rows and columns of its result, if that may be tiled again.
    """

    def __init__(self, message: str, axes: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.axes = axes


def no_rule(node: Node, why: str = "has no entry in the operator table") -> TraceError:
    """The error for an operator that cannot run on tiles, with what to do."""
    reads = ", ".join(dict.fromkeys(references(node.arguments)))
    return TraceError(
        f"{node.operator} (reads {reads}) {why}. It is in {node.where}. Either end the spatial stages before it "
        "(a smaller spatial_size, or another balance), or write an entry: a function like those in "
        f'engines/spatial/entries, under @entry("{node.operator}").'
    )


def apart(node: Node, why: str, axes: tuple[int, int] | None = None) -> WholeError:
    """The refusal of what can be computed from whole values only, which is left to stand for large images."""
    most = f"{why}; beyond {WHOLE_PX} pixels, which every rank would have to hold, there is no rule for that"
    return WholeError(str(no_rule(node, most)), axes)


def check_deterministic(b: Builder, node: Node) -> None:
    """Raises TraceError for a random operator: it would draw differently on each rank of a stage."""
    if node.arguments.get("dropout_p") == 0:
        return
    draws = not has_kernel(node.operator) and torch.Tag.nondeterministic_seeded in operator_of(node.operator).tags
    if len(b.stage.ranks) > 1 and draws:
        raise no_rule(node, "draws random numbers, which the tiles of a stage do not share")
