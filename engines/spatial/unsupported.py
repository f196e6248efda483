"""Errors for operators that cannot run on tiles, and their remedies."""

from __future__ import annotations

import torch

from engines.errors import TraceError
from engines.layer.graph import Node, find_ref_names
from engines.program.builder import Builder
from engines.spatial.kernels import get_operator, has_kernel

__all__ = ["WHOLE_PX", "NeedsGatherError", "check_deterministic", "make_gather_error", "make_unsupported_error"]

WHOLE_PX = 128 * 128
"""Maximum number of pixels of an image that each rank may hold whole; larger images are tiled to avoid that."""


class NeedsGatherError(TraceError):
    """An operator that needs more than tiles and windows: it is exact if every rank holds all of its inputs.

    `axes` are the rows and columns of its result, if the result may be tiled again.
    """

    def __init__(self, message: str, axes: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.axes = axes


def make_unsupported_error(node: Node, why: str = "has no entry in the operator table") -> TraceError:
    """Return the error for an operator that cannot run on tiles, with remedies."""
    reads = ", ".join(dict.fromkeys(find_ref_names(node.arguments)))
    return TraceError(
        f"{node.operator} (reads {reads}) {why}. It is in {node.where}. Either end the spatial stages before it "
        "(a smaller spatial_size, or another balance), or write a rule: a function like those in "
        f'engines/spatial/entries, under @register_rule("{node.operator}").'
    )


def make_gather_error(node: Node, why: str, axes: tuple[int, int] | None = None) -> NeedsGatherError:
    """Return the error for an operator that needs whole values; for large images it is final."""
    most = f"{why}; beyond {WHOLE_PX} pixels, which every rank would have to hold, there is no rule for that"
    return NeedsGatherError(str(make_unsupported_error(node, most)), axes)


def check_deterministic(b: Builder, node: Node) -> None:
    """Raise TraceError for a random operator: it would draw differently on each rank of a stage."""
    if node.arguments.get("dropout_p") == 0:
        return
    draws = not has_kernel(node.operator) and torch.Tag.nondeterministic_seeded in get_operator(node.operator).tags
    if len(b.stage.ranks) > 1 and draws:
        raise make_unsupported_error(node, "draws random numbers, which the tiles of a stage do not share")
